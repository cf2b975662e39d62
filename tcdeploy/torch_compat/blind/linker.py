"""What the C++ compiler needs to link programs that call the CUDA driver, on a machine without it. No torch.

A stub takes the place of the driver's library. It defines functions that programs call: the linker would drop a library
that defines none of them (--as-needed), and a program that does not name libcuda.so.1 can be loaded only by a process
that has loaded the driver before.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

from tcdeploy.errors import UsageError

STUB_FUNCTIONS = (
    "cuGetErrorString", "cuModuleLoad", "cuModuleLoadData", "cuModuleGetFunction", "cuModuleUnload",
    "cuFuncSetAttribute", "cuFuncGetAttribute", "cuLaunchKernel", "cuLaunchKernelEx", "cuTensorMapEncodeTiled",
)  # fmt: skip
CUDA_ERROR_NO_DEVICE = 100
HEADERS = ("cuda.h", "crt/host_defines.h", "nv/target")  # PyTorch's wheels lack the last two


def prepare_linking(folder: Path, cuda: str) -> None:
    """Make this process's compilers find CUDA's headers and a stub of libcuda in `folder`. `cuda`: version of torch.

    Raises UsageError if the headers or the compiler are missing.
    """
    os.environ["CUDA_HOME"] = str(_find_cuda_home(cuda))
    source = "".join(f"int {name}(void) {{ return {CUDA_ERROR_NO_DEVICE}; }}\n" for name in STUB_FUNCTIONS)
    library = folder / "libcuda.so"
    compiler = shutil.which("gcc")
    if compiler is None:
        raise UsageError("a build for a GPU needs gcc and g++", "install them: apt-get install g++")
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=source.encode(), check=True)
    shutil.copy(library, folder / "libcuda.so.1")  # the name that Triton links
    paths = [str(folder), *filter(None, [os.environ.get("LIBRARY_PATH")])]
    os.environ["LIBRARY_PATH"] = os.pathsep.join(paths)


def _find_cuda_home(cuda: str) -> Path:
    major = cuda.partition(".")[0]
    wheels = Path(sysconfig.get_path("purelib"), "nvidia", f"cu{major}")
    candidates = [Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda"), wheels]
    for folder in candidates:
        if all((folder / "include" / header).is_file() for header in HEADERS):
            return folder
    folder = next((folder for folder in candidates if (folder / "include" / HEADERS[0]).is_file()), candidates[0])
    missing = [header for header in HEADERS if not (folder / "include" / header).is_file()]
    raise UsageError(
        f"a build for a GPU needs CUDA's headers; {folder}/include lacks {', '.join(missing)}",
        f"pip install 'nvidia-cuda-crt=={major}.*' 'nvidia-cuda-cccl=={major}.*', or install CUDA {cuda} and set "
        "CUDA_HOME",
    )
