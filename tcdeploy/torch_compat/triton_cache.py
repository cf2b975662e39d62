"""Triton's cache without its own place in it: a folder that was moved is still full.

Triton keeps a kernel's files in a folder named by the kernel's key, and in a list of them their absolute paths. Where
the folder has moved, was copied or came out of a bundle it finds none of them, says nothing, and compiles again, beside
a hit that Inductor reports. Here the list holds names, and they are looked for where the list stands.

Beside kernels Triton keeps libraries that it builds with a C compiler: one that talks to the driver and, in 3.6, one
per signature that launches. In their key stands what the `file` command says of Python, so an image without that
command found none of them, and had no compiler either. /sbin/ldconfig must be there: Triton asks it for the driver.

Triton imports the class by the variable TRITON_CACHE_MANAGER, in Inductor's compile workers too. This is imported where
Triton is sure to be there. triton 3.6 and 3.7, torch 2.11 to 2.13; tests/torch_compat/test_triton_cache.py fails when they
do without it.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from triton.runtime import build
from triton.runtime.cache import FileCacheManager


def patch_platform_key() -> None:
    """For this process and Inductor's workers: the keys of what Triton builds hold architecture and system, and no
    answer of `file`.

    A worker asks for the library that talks to the driver as soon as it loads a kernel's source. By another name it
    would build one more, which nobody uses.
    """
    from torch._inductor import async_compile

    build.platform_key = _platform_key
    async_compile._worker_compile_triton = compile_in_worker  # type: ignore[attr-defined]


def _platform_key() -> str:
    return f"{platform.machine()},{platform.system()}"


def compile_in_worker(load_kernel: Callable[[], Any], extra_env: dict[str, str], extra_config: dict[str, Any]) -> Any:
    """What Inductor's own function of this place does, in a worker that has been told nothing yet."""
    from torch._inductor.runtime.compile_tasks import _worker_compile_triton

    build.platform_key = _platform_key
    return _worker_compile_triton(load_kernel, extra_env, extra_config)


kernels_compiled = 0  # in this process, and libraries that it built


class RelocatableCacheManager(FileCacheManager):
    """One kernel's folder. A list that Triton's own manager wrote is read too."""

    def put(self, data: str | bytes, filename: str, binary: bool = True) -> str:
        global kernels_compiled
        if filename.startswith("__grp__") or filename.endswith(".so"):  # the last of a kernel's files; a library
            kernels_compiled += 1
        return super().put(data, filename, binary)

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        return super().put_group(filename, {name: name for name in group})

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Name -> path of the kernel's files; None where no list is, none that can be read, or a file is gone."""
        path = self.get_file(f"__grp__{filename}")
        if path is None:
            return None
        try:
            names = list(json.loads(Path(path).read_text())["child_paths"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        found = {name: file for name in names if (file := self.get_file(name)) is not None}
        return found if len(found) == len(names) else None
