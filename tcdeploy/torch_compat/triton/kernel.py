"""Launches our Triton kernels, without importing Triton if their compiled code is stored.

A kernel's module is imported at the first launch that needs Triton. A start from packages loads *stored kernels*
(stored_kernels.py) instead: it saves the import of Triton, the hash of Triton's installation (0.5 s) and its work per
launch. A launch that no stored kernel fits goes through Triton.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from tcdeploy.torch_compat.triton.stored_kernels import KernelRecorder, StoredKernels

log = logging.getLogger("tcdeploy.programs")
_stored: StoredKernels | None = None  # what launches of this process use
_prepare_triton: Callable[[], object] | None = None  # see `use_stored_kernels`
_recorder: KernelRecorder | None = None  # records launches of this process
# Specializations requested in `compiling_only`; None outside it, and in other threads.
_compile_only_keys: ContextVar[set[object] | None] = ContextVar("compile_only_keys", default=None)
ALIGNMENT_BYTES = 16  # Triton specializes a kernel on whether a pointer is aligned to this


class Kernel:
    """A Triton kernel, named by module and function. The module is imported at the first launch through Triton."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    @functools.cached_property
    def function(self) -> Any:
        """Triton's JITFunction. Imports Triton."""
        if _stored is not None:  # such starts do not set up Triton's cache, which has to be done before Triton compiles
            from tcdeploy.torch_compat.triton.cache import use_relocatable_cache  # imports Triton
            from tcdeploy.torch_compat.triton.platform_key import patch_platform_key

            use_relocatable_cache()
            patch_platform_key()
        return getattr(importlib.import_module(self.module), self.name)

    def launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Launch the kernel with positional arguments, on the current stream. In `compiling_only`, only compile it.

        `options` are Triton's: num_warps, num_stages, launch_pdl. They must be given in the same order at each call.
        Raises DriverError if a stored kernel cannot be loaded or launched.
        """
        if _stored is not None and _stored.launch(self.name, grid, args, options):
            return
        _call_prepare_triton()
        if (compile_only_keys := _compile_only_keys.get()) is not None:
            key = (self.name, *map(_specialization, args), *options.items())
            if key not in compile_only_keys:  # all layers of a model launch the same specialization
                compile_only_keys.add(key)
                self.function.warmup(*args, grid=grid, **options)
            return
        if _stored is not None:
            log.debug("no stored kernel fits a launch of %s, so Triton is imported", self.name)
        compiled = self.function[grid](*args, **options)
        if _recorder is not None and compiled is not None:  # None: Triton's interpreter
            _recorder.add(self.name, self.function, args, options, compiled)


def use_stored_kernels(kernels: StoredKernels | None, prepare_triton: Callable[[], object] | None = None) -> None:
    """Launch these kernels from now on; with None, all go through Triton.

    `prepare_triton` is called once, before the first launch that no stored kernel fits.
    """
    global _stored, _prepare_triton
    _stored, _prepare_triton = kernels, prepare_triton


def _call_prepare_triton() -> None:
    """Once for each `use_stored_kernels`."""
    global _prepare_triton
    prepare, _prepare_triton = _prepare_triton, None
    if prepare is not None:
        prepare()


def record_kernels() -> KernelRecorder:
    """From now on, launch through Triton and record the launches. Replaces the recorder of an earlier call."""
    global _recorder
    use_stored_kernels(None)
    _recorder = KernelRecorder()
    return _recorder


def stop_recording_kernels() -> None:
    """Record no more launches: each would take some 20 us longer."""
    global _recorder
    _recorder = None


@contextlib.contextmanager
def compiling_only() -> Iterator[None]:
    """In the block, launches of this thread through Triton compile their kernel and do not run it."""
    token = _compile_only_keys.set(set())
    try:
        yield
    finally:
        _compile_only_keys.reset(token)


def _specialization(argument: Any) -> object:
    """What Triton specializes a kernel on in this argument. May be finer than Triton's own key, never coarser."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNMENT_BYTES
    return argument


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below a positive number. Triton's tensors have such sizes."""
    return 1 << (number - 1).bit_length()
