"""The bytes of a cache folder: which files a plan needs, what they were, and whether they are that still.

torch never looks at a compiled library before it loads it: of 14 random bit flips in one, 6 went unnoticed, 5 killed
the process and one computed something else, beside a reported cache hit. So each plan's manifest names its files with
their sha256, and every start compares them first: about 0.1 s per 100 MB.

Which files a plan needs, torch does not say. `FileAccessTracker` listens to Python's own audit events while the buckets are
warmed: every file below the folder counts that is opened, loaded as a library or named to another process, and its
companions (what stands beside it under the same name, or with it in a folder of Triton's, which C++ code opens without
a word to Python). No torch here.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

CHUNK_BYTES = 1 << 20
HASHING_THREADS = 4
TRITON_DIR, TOOLCHAIN_DIR = "triton", "toolchain"
CACHE_DIRS = ("fxgraph", "aotautograd", TRITON_DIR, TOOLCHAIN_DIR)  # of the root; and two letters of a source's hash


@dataclass(frozen=True)
class FileRecord:
    """A file of the folder: its place with slashes, its size and the sha256 of its bytes in hex."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class DamagedFile:
    path: str
    reason: str


class FileAccessTracker:
    """What a process opens below `folder` while it is `track`. One watcher at a time."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = os.path.realpath(folder)
        self._path_pattern = re.compile(re.escape(self.folder) + r"/[^\s'\"]+")
        self._opened_paths: set[str] = set()

    @contextmanager
    def track(self) -> Iterator[FileAccessTracker]:
        global _active_tracker, _is_hook_installed
        if not _is_hook_installed:
            sys.addaudithook(_audit_hook)  # for good: Python takes none back
            _is_hook_installed = True
        _active_tracker = self
        try:
            yield self
        finally:
            _active_tracker = None

    def add(self, value: object) -> None:
        """A path, a text with paths in it (a program for another Python), or several of these."""
        if isinstance(value, list | tuple):
            for one in value:
                self.add(one)
        elif isinstance(value, str | bytes | os.PathLike):
            self._opened_paths.update(self._path_pattern.findall(os.fsdecode(value)))

    def paths(self) -> list[str]:
        """Relative to the folder, sorted: files that are there now, with their companions, without bookkeeping."""
        root = Path(self.folder)
        found: set[str] = set()
        for name in list(self._opened_paths):
            path = Path(os.path.realpath(name))
            if path.is_dir() and path.parent == root / TRITON_DIR:
                found.update(one.relative_to(root).as_posix() for one in path.iterdir() if one.is_file())
            if path.is_file() and path.is_relative_to(root) and is_cache_file(path.relative_to(root).as_posix()):
                found.update(one.relative_to(root).as_posix() for one in _companion_files(root, path))
        return sorted(path for path in found if is_cache_file(path))


libraries_compiled = 0  # by a C++ compiler that this process called while it watched; headers aside
_active_tracker: FileAccessTracker | None = None
_is_hook_installed = False


def _audit_hook(event: str, args: tuple[object, ...]) -> None:
    """Python calls this at every audited event of the process: no more than a comparison where nobody watches."""
    if _active_tracker is None:
        return
    if event == "open":
        _active_tracker.add(args[0])
    elif event in ("import", "os.rename") and len(args) > 1:
        _active_tracker.add(args[1])  # a library by its file; the name that a finished file gets
    elif event == "ctypes.dlopen":
        _active_tracker.add(args[0])
    elif event == "os.listdir":
        _active_tracker.add(args[0])  # a kernel that C++ code loads: torch lists its folder, and no more
    elif event == "subprocess.Popen":
        _active_tracker.add(args[1])
        _count_library(args[1], _active_tracker.folder)


def _count_library(command: object, folder: str) -> None:
    global libraries_compiled
    words = [os.fsdecode(word) for word in command] if isinstance(command, list | tuple) else []
    made = words[words.index("-o") + 1 :][:1] if "-o" in words else []
    libraries_compiled += any(path.startswith(folder) and path.endswith(".so") for path in made)


def _companion_files(root: Path, path: Path) -> Iterator[Path]:
    """The file itself; all in its folder if Triton made it, else what has its name up to the first dot."""
    parts = path.relative_to(root).parts
    in_triton = parts[0] == TRITON_DIR and len(parts) > 2
    for one in path.parent.iterdir():
        is_near = in_triton or one.name.partition(".")[0] == path.name.partition(".")[0]
        if is_near and one.is_file() and not one.is_symlink():
            yield one


def is_cache_file(path: str) -> bool:
    """Whether a file (relative to the root, with slashes) may be what a start needs: where torch and we put such files,
    finished, and no bookkeeping. What removes files removes none but these."""
    parts = PurePosixPath(path).parts
    name = parts[-1]
    is_lock = name.endswith((".lock", ".tmp")) or name == "lock"
    is_ours = parts[0] in CACHE_DIRS or (len(parts) == 2 and re.fullmatch("[a-z0-9]{2}", parts[0]) is not None)
    return is_ours and len(parts) > 1 and not is_lock and not any(part.startswith(".") for part in parts)


def hash_files(folder: str | Path, paths: Iterable[str]) -> tuple[FileRecord, ...]:
    """Hash them. Raises OSError for one that cannot be read."""
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        return tuple(pool.map(lambda path: _hash_file(Path(folder), path), sorted(paths)))


def find_damage(folder: str | Path, files: Iterable[FileRecord]) -> list[DamagedFile]:
    """What of `files` is missing or has other bytes, in order."""
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        found = pool.map(lambda file: _check_file(Path(folder), file), files)
        return [damage for damage in found if damage is not None]


def _hash_file(folder: Path, path: str) -> FileRecord:
    file = folder / path
    return FileRecord(path, file.stat().st_size, sha256_of(file))


def _check_file(folder: Path, file: FileRecord) -> DamagedFile | None:
    path = folder / file.path
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return DamagedFile(file.path, "is no regular file")
        if status.st_size != file.bytes:
            return DamagedFile(file.path, f"has {status.st_size} bytes instead of {file.bytes}")
        return None if sha256_of(path) == file.sha256 else DamagedFile(file.path, "has other bytes")
    except FileNotFoundError:
        return DamagedFile(file.path, "is missing")
    except OSError as error:
        return DamagedFile(file.path, f"cannot be read: {error.strerror}")


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
