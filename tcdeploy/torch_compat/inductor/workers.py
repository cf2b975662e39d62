"""Apply `triton_platform_key` inside Inductor's compile workers.

A worker loads the library that talks to the driver as soon as it loads a kernel's source. Without the patch it would
compute another key and build a second copy, which no other process uses. Workers start without this package, so the
function that Inductor sends to them is replaced by one that patches first and then calls Inductor's own.

Without it, each cold start builds that library twice. tests/torch_compat/test_triton_cache.py fails when Inductor
sends another function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tcdeploy.torch_compat.internal import Internal, find, is_installed, mentions
from tcdeploy.torch_compat.triton.platform_key import patch_platform_key

ASYNC_COMPILE = "torch._inductor.async_compile"
WORKER_FUNCTION = "torch._inductor.runtime.compile_tasks:_worker_compile_triton"


def supported() -> bool:
    """True also if Triton is not installed, because nothing is lost then."""
    return not is_installed("triton") or (
        callable(find(WORKER_FUNCTION))
        and callable(find(f"{ASYNC_COMPILE}:_worker_compile_triton"))
        and mentions(find(f"{ASYNC_COMPILE}:AsyncCompile.triton"), "_worker_compile_triton")
    )


INTERNAL = Internal(
    "compile workers",
    "torch",
    "async_compile._worker_compile_triton",
    "Inductor's workers build Triton's driver library once more",
    supported,
)


def patch_compile_workers() -> None:
    if is_installed("triton") and supported():
        find(ASYNC_COMPILE)._worker_compile_triton = compile_in_worker


def compile_in_worker(load_kernel: Callable[[], Any], extra_env: dict[str, str], extra_config: dict[str, Any]) -> Any:
    """Runs in a worker, in place of Inductor's function of the same signature."""
    patch_platform_key()
    return find(WORKER_FUNCTION)(load_kernel, extra_env, extra_config)
