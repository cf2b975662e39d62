"""Compiles Triton kernels in several threads.

Triton compiles a kernel at its first launch, so the kernels of a step are compiled one after another: 9 s in a cold
start of an 8B model on an H100. Threads help, because Triton's compiler mostly releases the GIL, and runs ptxas and the
C compiler, which builds each kernel's launcher, as subprocesses. Imports Triton.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from triton import AsyncCompileMode

from tcdeploy.torch_compat.triton.kernel import compiling_only

MAX_THREADS = 8


class _KernelThreads(ThreadPoolExecutor):
    """Compiles kernels and loads them on the current device, so that their first launch does neither."""

    def __init__(self) -> None:
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        super().__init__(min(MAX_THREADS, os.cpu_count() or 1), "kernels", _use_device, (device,))

    def submit(self, compile_kernel: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        return super().submit(_compile_and_load, compile_kernel)


@contextlib.contextmanager
def compiling_kernels(launch_kernels: Callable[[], object]) -> Iterator[None]:
    """Call `launch_kernels`, and compile the kernels it launches in threads while the block runs.

    Leaving the block waits until all are compiled, also after an exception: Triton 3.7 would raise the cancellation of
    a kernel at each later launch. The launches run nothing, so their outputs are uninitialized. A kernel that fails to
    compile raises its error at its first real launch. The block must not launch these kernels.
    """
    with _KernelThreads() as threads, AsyncCompileMode(threads, ignore_errors=True):
        with compiling_only():
            launch_kernels()
        yield


def _use_device(device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)


def _compile_and_load(compile_kernel: Callable[[], Any]) -> Any:
    kernel = compile_kernel()
    kernel.run  # noqa: B018 - reading this property loads the binary and builds the launcher
    return kernel
