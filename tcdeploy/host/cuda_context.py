"""Creates the CUDA context of the first GPU in a thread, while Python imports torch.

Initialising the driver and creating a context take 0.2 to 0.3 s. torch does both at its first CUDA call, after its
import. It uses the primary context of the device, so it finds the one that this module has made: import and context
took 2.4 instead of 2.9 s together (H100, torch 2.11). ctypes releases the GIL during the calls.

Nothing is done if torch is imported already, because the process may have selected another device, nor if torch was
built without CUDA. Supervising processes must not call this module: a context takes some 0.5 GiB of the GPU, and a
child that is forked later cannot use CUDA. Imports no torch.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import sys
import threading
from pathlib import Path

DRIVER = "libcuda.so.1"
TORCH = "libtorch_cuda.so"  # in builds with CUDA
log = logging.getLogger("tcdeploy.host")


def start_context(driver: str = DRIVER) -> threading.Thread | None:
    """Create the primary context of device 0 in a thread. The start need not wait for it. None if nothing is done.

    The device is the first in CUDA_VISIBLE_DEVICES. Errors are only logged: torch reports a busy or broken GPU. The
    interpreter waits for the thread before it exits, because the driver must not be unloaded during a call.
    """
    if "torch" in sys.modules or not _torch_has_cuda():
        return None
    # As torch does. Drivers before CUDA 12.2 would load all kernels of a library at once. Set before the thread starts,
    # because C code that torch loads may read the environment.
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    thread = threading.Thread(target=_create_context, args=(driver,), name="cuda-context")
    thread.start()
    return thread


def _torch_has_cuda() -> bool:
    """Found by the library's file, without importing torch."""
    spec = importlib.util.find_spec("torch")
    return spec is not None and spec.origin is not None and Path(spec.origin).with_name("lib").joinpath(TORCH).is_file()


def _create_context(driver: str) -> None:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    calls = {
        "cuInit": (0,),
        "cuDeviceGet": (ctypes.byref(device), 0),
        "cuDevicePrimaryCtxRetain": (ctypes.byref(context), device),
    }
    try:
        cuda = ctypes.CDLL(driver)
        for name, arguments in calls.items():
            if code := getattr(cuda, name)(*arguments):
                raise OSError(f"{name} returned {code}")
    except (OSError, AttributeError) as error:  # no library, or one without these functions
        log.debug("the CUDA context could not be created in advance: %s", error)
