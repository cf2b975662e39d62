"""Recognises Inductor's tests of CPU vector extensions, short C++ sources that it compiles and loads.

They are no programs. Which of them run depends on the CPU and on what the process has compiled before: on a CPU with
AMX, some are among the files of no plan. If torch names their functions otherwise, `--no-compile` refuses a start of a
new plan on such a CPU. Does not import torch.
"""

from __future__ import annotations

from tcdeploy.host.regular_file import read_regular

FUNCTION_SUFFIX = b"_chk_kernel"  # in all sources of torch._inductor.cpu_vec_isa


def is_vector_test(path: str) -> bool:
    """Whether a C++ source file is such a test. False if it cannot be read."""
    try:
        return path.endswith(".cpp") and FUNCTION_SUFFIX in read_regular(path)
    except OSError:
        return False
