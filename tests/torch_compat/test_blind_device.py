"""A name of torch that a build without the GPU replaces, and that another version has moved, ends the build by name."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

needs_cuda_build = pytest.mark.skipif(torch.version.cuda is None, reason="PyTorch is built for CPUs")
PRETEND = """
import sys
from pathlib import Path
from tcdeploy.errors import UsageError
from tcdeploy.planning.gpu_description import read_gpu_description
from tcdeploy.torch_compat.blind.device import pretend
from tcdeploy.torch_compat.internal import find

owner, name = sys.argv[1:]
if name == "nothing":
    pretend(read_gpu_description("l4"), Path("/nonexistent"))
    import torch
    print(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), find("torch.cuda:device_count")())
    sys.exit()
delattr(find(owner), name)
try:
    pretend(read_gpu_description("l4"), Path("/nonexistent"))
except UsageError as error:
    print(error.message)
"""


def pretend_without(owner: str, name: str) -> str:
    """What a process prints that loses a name before it pretends to have a GPU."""
    command = [sys.executable, "-c", PRETEND, owner, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("torch.cuda", "get_rng_state"),
        pytest.param("torch._subclasses.fake_tensor", "init_gpu_context", marks=needs_cuda_build),
        pytest.param("torch._inductor.sizevars:SizeVarAllocator", "optimization_hint", marks=needs_cuda_build),
        pytest.param("torch._inductor.fx_passes.pad_mm", "get_cached_should_pad", marks=needs_cuda_build),
        pytest.param(
            "torch._inductor.runtime.triton_heuristics:CachingAutotuner", "benchmark_all_configs",
            marks=needs_cuda_build,
        ),
    ],
)  # fmt: skip
def test_a_missing_name_is_named(owner: str, name: str) -> None:
    lost = f"{owner.replace(':', '.')}.{name}"
    assert pretend_without(owner, name) == (
        f"PyTorch {torch.__version__} lacks {lost}, which a build without a GPU replaces"
    )


@needs_cuda_build
def test_torch_describes_the_pretended_gpu() -> None:
    assert pretend_without("torch.cuda", "nothing") == "NVIDIA L4 (8, 9) 1"
