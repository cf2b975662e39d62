"""A Triton cache manager whose entries stay valid when the cache folder moves.

Triton stores a kernel's files in a folder named by the kernel's key, and lists them there by absolute path. In a
folder that was moved, copied or unpacked from a bundle it finds none of them and compiles again, without a message and
beside a hit that Inductor reports. This manager stores file names and resolves them next to the list. Files with
intermediate code may be missing.

Triton imports the class that TRITON_CACHE_MANAGER names, in Inductor's compile workers too.
tests/torch_compat/test_triton_cache.py fails when Triton no longer needs the manager.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tcdeploy.planning.extras import is_installed
from tcdeploy.torch_compat.dynamo import compile_refusal
from tcdeploy.torch_compat.internal import find, internal, mentions
from tcdeploy.torch_compat.triton.intermediate_code import INTERMEDIATE_CODE

CACHE_MANAGER = "triton.runtime.cache:FileCacheManager"
ENVIRONMENT_VARIABLE = "TRITON_CACHE_MANAGER"
RELOCATABLE_MANAGER = "tcdeploy.torch_compat.triton.cache:RelocatableCacheManager"

if TYPE_CHECKING:
    FileCacheManager: Any
else:
    FileCacheManager = find(CACHE_MANAGER) or object


@internal("Triton's cache", "triton.runtime.cache.FileCacheManager",
          "Triton kernels compile again at every start, and are not counted")  # fmt: skip
def supported() -> bool:
    manager = find(CACHE_MANAGER)
    return (
        all(callable(getattr(manager, name, None)) for name in ("put", "put_group", "get_file", "get_group"))
        and mentions(manager, "child_paths", "__grp__")
        and mentions(find("triton.runtime.cache:get_cache_manager"), "manager_class")
    )


kernels_compiled = 0  # by this process, and C libraries that it built


def use_relocatable_cache() -> None:
    """Make Triton import the manager, in this process and in those that it starts."""
    if is_installed("triton") and supported():
        os.environ[ENVIRONMENT_VARIABLE] = RELOCATABLE_MANAGER


class RelocatableCacheManager(FileCacheManager):
    """The folder of one kernel. Reads lists that Triton's own manager wrote as well."""

    def put(self, data: str | bytes, filename: str, binary: bool = True) -> str:
        global kernels_compiled
        compile_refusal.check(f"{filename} of Triton")  # with TRITON_ALWAYS_COMPILE=1, which ignores what is cached
        if filename.startswith("__grp__") or filename.endswith(".so"):  # the last file of a kernel; a library
            kernels_compiled += 1
        return str(super().put(data, filename, binary))

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        return str(super().put_group(filename, {name: name for name in group}))

    def get_file(self, filename: str) -> str | None:
        """The path of a file; None if it is missing. Triton then builds it, if it is a library."""
        path: str | None = super().get_file(filename)
        if path is None and filename.endswith(".so"):
            compile_refusal.check(f"the library {filename} of Triton")
        return path

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Name -> path of the kernel's files; None, and Triton compiles it, if the list or a file it needs is missing.

        Raises CompilationRefused instead of returning None if nothing may be compiled.
        """
        group = self._read_group(filename)
        if group is None:
            compile_refusal.check(f"the Triton kernel {Path(filename).stem}")
        return group

    def _read_group(self, filename: str) -> dict[str, str] | None:
        path = self.get_file(f"__grp__{filename}")
        if path is None:
            return None
        try:
            names = list(json.loads(Path(path).read_text())["child_paths"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        paths = {name: file for name in names if (file := self.get_file(name)) is not None}
        return paths if all(name in paths or name.endswith(INTERMEDIATE_CODE) for name in names) else None
