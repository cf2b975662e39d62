"""Adds to a CPU build of PyTorch the names of a CUDA build that `warm --target-gpu` uses.

Only the process that builds is changed, not that of the command. The environment variable CUDA_DEVICE_GUARD is the path
of the library that `cuda_build` (tests/start/cuda_build.py) compiles.
"""

import ctypes
import os
import sys

if "tcdeploy.start.blind.worker" in sys.orig_argv:
    import torch

    torch.version.cuda = "13.0"
    torch.cuda.default_generators = (torch.Generator(),)
    torch._C._cuda_getDeviceCount = lambda: 1
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    ctypes.CDLL(os.environ["CUDA_DEVICE_GUARD"])
