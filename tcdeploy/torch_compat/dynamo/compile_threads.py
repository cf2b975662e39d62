"""Load cached programs in this process, without Inductor's compile workers.

A kernel that arrives from a worker was pickled. Pickling a triton.Config drops the mark that coordinate descent found
it, so Inductor would search again at every start (Triton 3.6 and 3.7). torch has no public setting that can change
after import. tests/torch_compat/test_triton_cache.py fails when Triton pickles the mark.
"""

from __future__ import annotations

import contextlib

from tcdeploy.torch_compat.internal import find, internal, is_imported

CONFIG = "torch._inductor.config"


@internal("compile threads", "torch._inductor.config.compile_threads",
          "a warm start may repeat the search of coordinate descent")  # fmt: skip
def supported() -> bool:
    return hasattr(find(CONFIG), "compile_threads") and callable(find(f"{CONFIG}:patch"))


def without_compile_workers() -> contextlib.AbstractContextManager[object]:
    if not is_imported(CONFIG) or not supported():
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[object] = find(CONFIG).patch(compile_threads=1)
    return context
