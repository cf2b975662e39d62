"""The environment of `warm --target-gpu` in tests, with PyTorch's CUDA build or with a CPU build and stubs.

A CPU build lacks some names (cuda_names/sitecustomize.py), a device guard, and two libraries with which packages are
linked. The stubs of these libraries define nothing, so the packages can be read but not loaded.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch

from tests.conftest import PACKAGES

NAMES = Path(__file__).with_name("cuda_names")
LINKED_LIBRARIES = ("torch_cuda", "c10_cuda")
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
static impl::DeviceGuardImplRegistrar registrar(DeviceType::CUDA, new impl::NoOpDeviceGuardImpl<DeviceType::CUDA>());
"""


def cuda_build(folder: Path) -> dict[str, str]:
    """Environment variables for `warm --target-gpu`. `folder`: an empty folder for the stubs."""
    if torch.version.cuda is not None:
        return {}
    packages = Path(torch.__file__).parent
    guard = folder / "libguard.so"
    flags = ("-std=c++20", f"-I{packages}/include", f"-L{packages}/lib", "-lc10")
    _compile_library(guard, "c++", GUARD, *flags)
    for name in LINKED_LIBRARIES:
        _compile_library(folder / f"lib{name}.so", "c", "", f"-Wl,-soname,lib{name}.so")
    return {
        "PYTHONPATH": os.pathsep.join([str(NAMES), PACKAGES]),
        "CUDA_DEVICE_GUARD": str(guard),
        "LIBRARY_PATH": str(folder),
    }


def _compile_library(path: Path, language: str, source: str, *flags: str) -> None:
    command = ["g++", "-shared", "-fPIC", "-x", language, "-", "-o", str(path), *flags]
    subprocess.run(command, input=source.encode(), check=True)
