"""Which cache files this process uses.

torch does not report which files a start uses. `FileAccessTracker` records them from Python's audit events while the
buckets are warmed: files that are opened, loaded as a library, renamed or passed to a subprocess. C++ code in torch and
Triton opens further files without an audit event, so the companions of a recorded file count as used too: files with
the same stem, and all files in the same folder of Triton's cache, except intermediate code. Does not import torch.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tcdeploy.cache.files.records import is_cache_file
from tcdeploy.cache.folder.layout import TRITON_DIR
from tcdeploy.torch_compat.dynamo import compile_refusal
from tcdeploy.torch_compat.inductor.vector_tests import is_vector_test
from tcdeploy.torch_compat.triton.intermediate_code import INTERMEDIATE_CODE


class FileAccessTracker:
    """Records which files below `folder` this process uses inside `track()`. One tracker is active at a time."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = os.path.realpath(folder)
        self._path_pattern = re.compile(re.escape(self.folder) + r"/[^\s'\"]+")
        self._opened_paths: set[str] = set()

    @contextmanager
    def track(self) -> Iterator[FileAccessTracker]:
        global _active_tracker, _is_hook_installed
        if not _is_hook_installed:
            sys.addaudithook(_audit_hook)  # permanent: Python cannot remove an audit hook
            _is_hook_installed = True
        _active_tracker = self
        try:
            yield self
        finally:
            _active_tracker = None

    def add(self, value: object) -> None:
        """Record the paths in `value`: a path, a text that contains paths (`python -c`), or a sequence of these."""
        if isinstance(value, list | tuple):
            for item in value:
                self.add(item)
        elif isinstance(value, str | bytes | os.PathLike):
            self._opened_paths.update(self._path_pattern.findall(os.fsdecode(value)))

    def paths(self) -> list[str]:
        """The recorded cache files that exist now, and their companions: sorted, relative to the folder."""
        root, list_files = Path(self.folder), functools.cache(_list_files)
        real_path = functools.cache(functools.partial(_real_path, self.folder))
        files: set[Path] = set()
        for name in list(self._opened_paths):
            folder, _, base = name.rpartition("/")
            path = Path(real_path(folder), base)
            if base not in list_files(path.parent):  # a folder, a link, or a file that does not exist
                path = Path(os.path.realpath(name))
            siblings = list_files(path.parent)
            if path.parent == root / TRITON_DIR and path.name not in siblings:
                files.update(path / child for child in list_files(path))
            elif path.name in siblings and path.is_relative_to(root) and is_cache_file(str(path.relative_to(root))):
                files.update(_companion_files(root, path, siblings))
        paths = (file.relative_to(root).as_posix() for file in files)
        return sorted(path for path in paths if is_cache_file(path) and not _is_intermediate_code(path))


@contextmanager
def untracked() -> Iterator[None]:
    """Suspend the active tracker: copying the files of another process is not using them."""
    global _active_tracker
    tracker, _active_tracker = _active_tracker, None
    try:
        yield
    finally:
        _active_tracker = tracker


libraries_compiled = 0  # by C++ compilers that this process started inside `track()`; precompiled headers do not count
_active_tracker: FileAccessTracker | None = None
_is_hook_installed = False


def _audit_hook(event: str, args: tuple[object, ...]) -> None:
    """Called by Python for every audited event of the process: one comparison while no tracker is active."""
    if _active_tracker is None:
        return
    if event in ("open", "ctypes.dlopen", "os.listdir"):  # torch only lists a kernel's folder before C++ code loads it
        _active_tracker.add(args[0])
    elif event in ("import", "os.rename", "subprocess.Popen") and len(args) > 1:
        _active_tracker.add(args[1])  # import: the file of an extension module; rename: the target
        if event == "subprocess.Popen":
            _count_outputs(args[1], _active_tracker.folder)


def _count_outputs(command: object, folder: str) -> None:
    """Count a library that a C++ compiler is about to write into the folder. Raises CompilationRefused."""
    global libraries_compiled
    words = [os.fsdecode(word) for word in command] if isinstance(command, list | tuple) else []
    outputs = words[words.index("-o") + 1 :][:1] if "-o" in words else []
    if any(path.startswith(folder) for path in outputs) and not any(map(is_vector_test, words)):
        compile_refusal.check("a C++ library")
        libraries_compiled += outputs[0].endswith(".so")


def _real_path(root: str, folder: str) -> str:
    """os.path.realpath(folder), with fewer system calls. `folder` is below `root`, whose own path has no links."""
    part = folder
    while len(part) > len(root):
        if os.path.islink(part):
            return os.path.realpath(folder)
        part = os.path.dirname(part)
    return os.path.normpath(folder)


def _is_intermediate_code(path: str) -> bool:
    return path.startswith(f"{TRITON_DIR}/") and path.endswith(INTERMEDIATE_CODE)


def _list_files(folder: Path) -> frozenset[str]:
    """Names of the regular files in a folder, without links. Empty if it is not a folder."""
    try:
        with os.scandir(folder) as entries:
            return frozenset(entry.name for entry in entries if entry.is_file(follow_symlinks=False))
    except OSError:
        return frozenset()


def _companion_files(root: Path, path: Path, siblings: frozenset[str]) -> Iterator[Path]:
    """`path` and the files used with it: all files of its folder in Triton's cache, else those with the same stem.

    The stem ends at the first dot. `siblings`: the names of the files in its folder.
    """
    parts = path.relative_to(root).parts
    is_kernel = parts[0] == TRITON_DIR and len(parts) > 2
    stem = path.name.partition(".")[0]
    for name in siblings:
        if is_kernel or name.partition(".")[0] == stem:
            yield path.parent / name
