"""Calls the CUDA driver through ctypes: loads and launches compiled kernels, and copies to the GPU.

A launch makes the same calls as Triton's own launcher. Launches hold the GIL: a call takes a few microseconds, and a
thread that has released the GIL may wait for it much longer. If a thousand launches are queued, the next one waits for
the GPU, and other Python threads wait too. Imports neither torch nor Triton.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

WARP_SIZE = 32
LIBRARY = "libcuda.so.1"
DEFAULT_SHARED_BYTES = 48 << 10  # a larger size needs cuFuncSetAttribute
# Of cuda.h.
ATTRIBUTE_MAX_DYNAMIC_SHARED_BYTES = 8
LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute; `value` is the member of the union that we set."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    ]  # fmt: skip


class DriverError(RuntimeError):
    """A call of the driver failed."""


class LoadedKernel:
    """A kernel of a cubin on one device, where it stays until the process ends."""

    def __init__(self, cubin: bytes, name: str, shared_bytes: int, device: int) -> None:
        """`shared_bytes`: dynamic shared memory of one thread block. Raises DriverError."""
        use_primary_context(device)
        driver, module = _driver(), ctypes.c_void_p()
        self._function = ctypes.c_void_p()
        _check(_waiting_driver().cuModuleLoadData(ctypes.byref(module), cubin), f"load {name}")
        _check(driver.cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()), f"find {name}")
        if shared_bytes > DEFAULT_SHARED_BYTES:
            attribute = ATTRIBUTE_MAX_DYNAMIC_SHARED_BYTES
            _check(driver.cuFuncSetAttribute(self._function, attribute, shared_bytes), f"set the memory of {name}")
        self._name, self._shared_bytes, self._device = name, shared_bytes, device

    def launch(self, grid: tuple[int, int, int], num_warps: int, uses_pdl: bool, stream: int, arguments: Any) -> None:
        """Launch the kernel on a stream, with PDL if `uses_pdl` (torch_compat/inductor/pdl.py). Raises DriverError.

        arguments: a ctypes array of the addresses of the kernel's arguments, which the driver copies.
        """
        config = _LaunchConfig((ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(num_warps * WARP_SIZE, 1, 1))
        config.shared_bytes, config.stream = self._shared_bytes, stream
        if uses_pdl:
            config.attributes, config.num_attributes = _PDL_ATTRIBUTES, 1
        use_primary_context(self._device)
        _check(
            _driver().cuLaunchKernelEx(ctypes.byref(config), self._function, arguments, None), f"launch {self._name}"
        )


_PDL_ATTRIBUTES = (_LaunchAttribute * 1)(_LaunchAttribute(LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1))


def use_primary_context(device: int) -> None:
    """Make torch's context current in this thread, which may have none, unless one is. Raises DriverError."""
    driver, context, handle = _driver(), ctypes.c_void_p(), ctypes.c_int()
    _check(driver.cuCtxGetCurrent(ctypes.byref(context)), "find the context")
    if not context:
        _check(driver.cuDeviceGet(ctypes.byref(handle), device), "find the device")
        _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), "create a context")
        _check(driver.cuCtxSetCurrent(context), "use the context")


def copy_to_gpu(target: int, source: int, num_bytes: int, stream: int) -> None:
    """Copy from page-locked host memory, and wait until it is done without holding the GIL.

    target, source: addresses. stream: not the legacy default stream, which synchronises with other streams. A context
    must be current (`use_primary_context`). Holds the GIL for a tenth of the time of torch's copy, event and stream
    calls. Raises DriverError.
    """
    _check(_driver().cuMemcpyHtoDAsync_v2(target, source, num_bytes, stream), "copy to the GPU")
    _check(_waiting_driver().cuStreamSynchronize(stream), "copy to the GPU")


@functools.cache
def _waiting_driver() -> Any:
    """libcuda, whose functions are called without the GIL."""
    driver = ctypes.CDLL(LIBRARY)
    driver.cuStreamSynchronize.argtypes = [ctypes.c_void_p]
    driver.cuModuleLoadData.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    return driver


@functools.cache
def _driver() -> Any:
    """libcuda, whose functions are called with the GIL held."""
    driver = ctypes.PyDLL(LIBRARY)
    driver.cuLaunchKernelEx.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    driver.cuMemcpyHtoDAsync_v2.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    driver.cuGetErrorName.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    return driver


def _check(code: int, action: str) -> None:
    if code:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(name))
        raise DriverError(f"the CUDA driver cannot {action}: {(name.value or b'error').decode()} ({code})")
