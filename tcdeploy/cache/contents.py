"""Which files of the cache folder a plan needs, and whether they still have their recorded bytes.

torch does not check a compiled library before it loads it. Of 14 random bit flips in one library, 6 had no effect, 2
raised an error, 5 crashed the process and one changed the results, while torch reported a cache hit. The manifest of a
plan therefore lists its files with their sha256, and every start compares them first (0.1 s per 100 MB).

torch does not report which files a start uses. `FileAccessTracker` records them from Python's audit events while the
buckets are warmed: files that are opened, loaded as a library, renamed or passed to a subprocess. C++ code in torch and
Triton opens further files without an audit event, so the companions of a recorded file count as used too: files with
the same stem, and all files in the same folder of Triton's cache. Does not import torch.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tcdeploy.host.regular_file import UnsafeFileError, open_regular
from tcdeploy.torch_compat.dynamo import compile_refusal

CHUNK_BYTES = 1 << 20
HASHING_THREADS = 4
TRITON_DIR, TOOLCHAIN_DIR = "triton", "toolchain"
CONFLICTS_DIR = "conflicts"  # files whose path another plan uses for different content; named by their sha256
AOT_DIR = "aot"  # ahead-of-time packages (programs/packages.py) and start records (start/record/record.py)
AUTOTUNE_DIR = "cache"  # torch's timings of the choices of max-autotune, in one file per kind of machine
REFERENCES_DIR = "references"  # logits that buckets are compared with (engine/check/stored_reference.py)
# Beside these, torch makes folders named by the first two characters of a source file's hash.
GRAPHS_DIR = "fxgraph"
CACHE_DIRS = (GRAPHS_DIR, "aotautograd", AOT_DIR, AUTOTUNE_DIR, TRITON_DIR, TOOLCHAIN_DIR, REFERENCES_DIR)


@dataclass(frozen=True)
class FileRecord:
    """A cache file: its POSIX path relative to the cache folder, its size, and its sha256 in hex."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class DamagedFile:
    path: str
    reason: str  # completes the sentence "PATH ..."


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
        root = Path(self.folder)
        files: set[Path] = set()
        for name in list(self._opened_paths):
            path = Path(os.path.realpath(name))
            if path.is_dir() and path.parent == root / TRITON_DIR:
                files.update(child for child in path.iterdir() if child.is_file())
            if path.is_file() and path.is_relative_to(root) and is_cache_file(path.relative_to(root).as_posix()):
                files.update(_companion_files(root, path))
        return sorted(path for path in (file.relative_to(root).as_posix() for file in files) if is_cache_file(path))


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
    if event == "open":
        _active_tracker.add(args[0])
    elif event in ("import", "os.rename") and len(args) > 1:
        _active_tracker.add(args[1])  # import: the file of an extension module; rename: the target
    elif event == "ctypes.dlopen":
        _active_tracker.add(args[0])
    elif event == "os.listdir":
        _active_tracker.add(args[0])  # torch only lists a kernel's folder before C++ code loads from it
    elif event == "subprocess.Popen":
        _active_tracker.add(args[1])
        _count_outputs(args[1], _active_tracker.folder)


def _count_outputs(command: object, folder: str) -> None:
    """Count a library that a C++ compiler is about to write into the folder. Raises CompilationRefused."""
    global libraries_compiled
    words = [os.fsdecode(word) for word in command] if isinstance(command, list | tuple) else []
    outputs = words[words.index("-o") + 1 :][:1] if "-o" in words else []
    if any(path.startswith(folder) for path in outputs):
        compile_refusal.check("a C++ library")
        libraries_compiled += outputs[0].endswith(".so")


def _companion_files(root: Path, path: Path) -> Iterator[Path]:
    """`path` and the files used with it: all files of its folder in Triton's cache, else those with the same stem.

    The stem ends at the first dot.
    """
    parts = path.relative_to(root).parts
    is_kernel = parts[0] == TRITON_DIR and len(parts) > 2
    stem = path.name.partition(".")[0]
    for sibling in path.parent.iterdir():
        is_companion = is_kernel or sibling.name.partition(".")[0] == stem
        if is_companion and sibling.is_file() and not sibling.is_symlink():
            yield sibling


def is_cache_file(path: str) -> bool:
    """Whether a file may belong to a plan, by its POSIX path relative to the cache folder.

    True below CACHE_DIRS and the folders of torch's sources, except for locks, temporary and hidden files. Garbage
    collection removes only files for which this is true.
    """
    parts = PurePosixPath(path).parts
    name = parts[-1]
    is_lock = name.endswith((".lock", ".tmp")) or name == "lock"
    if parts[0] == AUTOTUNE_DIR:
        return len(parts) == 2 and re.fullmatch("[0-9a-f]{64}", name) is not None
    is_known = parts[0] in CACHE_DIRS or (len(parts) == 2 and re.fullmatch("[a-z0-9]{2}", parts[0]) is not None)
    return is_known and len(parts) > 1 and not is_lock and not any(part.startswith(".") for part in parts)


def is_plain_record(file: FileRecord) -> bool:
    """Whether the path is relative and stays inside its folder, and size and sha256 have their types."""
    path = file.path
    if not isinstance(path, str) or not isinstance(file.bytes, int) or isinstance(file.bytes, bool):
        return False
    parts = path.split("/")
    is_plain = all(part not in ("", ".", "..") and len(part) < 256 for part in parts)
    is_printable = not any(
        ord(char) < 32 or ord(char) == 127 or char == "\\" or 0xD800 <= ord(char) < 0xE000 for char in path
    )
    is_sha256 = isinstance(file.sha256, str) and re.fullmatch("[0-9a-f]{64}", file.sha256) is not None
    return is_plain and is_printable and len(path) < 1024 and file.bytes >= 0 and is_sha256


def list_cache_files(folder: str | Path) -> list[str]:
    """Every file for which `is_cache_file` is true, and those in CONFLICTS_DIR: relative to the folder, sorted."""
    root = Path(folder)
    paths = (Path(parent, name).relative_to(root).as_posix() for parent, _, names in os.walk(root) for name in names)
    return sorted(path for path in paths if is_cache_file(path) or path.startswith(f"{CONFLICTS_DIR}/"))


def stored_path(folder: str | Path, file: FileRecord) -> str:
    """The path at which the folder stores the file: the file's own path, or one in CONFLICTS_DIR.

    torch names a file after its inputs, so two plans may list the same path with different content: the same program,
    compiled in folders with different paths.
    """
    path = f"{CONFLICTS_DIR}/{file.sha256}"
    return path if Path(folder, path).is_file() else file.path


def group_by_path(files: Iterable[FileRecord]) -> dict[str, list[FileRecord]]:
    groups: dict[str, list[FileRecord]] = {}
    for file in files:
        groups.setdefault(file.path, []).append(file)
    return groups


def path_to_publish(folder: str | Path, file: FileRecord, others: Iterable[FileRecord]) -> str:
    """The path at which to store a new file: its own path, or one in CONFLICTS_DIR.

    `others` are the files that manifests list under the same path. An undamaged one is not overwritten.
    """
    conflict = f"{CONFLICTS_DIR}/{file.sha256}"
    at_path = [other for other in others if other != file and stored_path(folder, other) == file.path]
    is_taken = os.path.lexists(Path(folder, conflict)) or intact_files(folder, at_path)
    return conflict if is_taken else file.path


def hash_files(folder: str | Path, paths: Iterable[str]) -> tuple[FileRecord, ...]:
    """The records of these files, sorted by path. Raises OSError if one cannot be read."""
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        return tuple(pool.map(lambda path: _hash_file(Path(folder), path), sorted(paths)))


def find_damage(folder: str | Path, files: Iterable[FileRecord]) -> list[DamagedFile]:
    """The files that are missing or differ from their records, in the order of `files`."""
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        results = pool.map(lambda file: _check_file(Path(folder), file), files)
        return [damage for damage in results if damage is not None]


def intact_files(folder: str | Path, files: Iterable[FileRecord]) -> set[FileRecord]:
    """The files whose content matches their records."""
    files = list(files)
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        results = pool.map(lambda file: _check_file(Path(folder), file), files)
        return {file for file, damage in zip(files, results, strict=True) if damage is None}


def _hash_file(folder: Path, path: str) -> FileRecord:
    file = folder / path
    return FileRecord(path, file.stat().st_size, sha256_of(file))


def _check_file(folder: Path, file: FileRecord) -> DamagedFile | None:
    return read_checked(folder, file, lambda chunk: None)


def read_checked(folder: Path, file: FileRecord, write: Callable[[bytes], object]) -> DamagedFile | None:
    """Read a file once, passing its bytes to `write`, and compare it with its record. Returns None if they match.

    Otherwise the bytes passed to `write` must not be used. Raises OSError only from `write`.
    """
    try:
        opened = open_regular(folder / stored_path(folder, file))
    except FileNotFoundError:
        return DamagedFile(file.path, "is missing")
    except UnsafeFileError:
        return DamagedFile(file.path, "is not a regular file")
    except OSError as error:
        return DamagedFile(file.path, f"cannot be read: {error.strerror}")
    with opened as source:
        if (size := os.fstat(source.fileno()).st_size) != file.bytes:
            return DamagedFile(file.path, f"has {size} bytes instead of {file.bytes}")
        digest, size = hashlib.sha256(), 0
        while True:
            try:
                chunk = source.read(min(CHUNK_BYTES, file.bytes - size + 1))  # + 1: whether the file has grown
            except OSError as error:
                return DamagedFile(file.path, f"cannot be read: {error.strerror}")
            if not chunk or size > file.bytes:
                break
            digest.update(chunk)
            size += len(chunk)
            write(chunk)
    if digest.hexdigest() != file.sha256:
        return DamagedFile(file.path, "does not match its recorded sha256")
    return None


def sha256_of(path: Path) -> str:
    """In hex. Raises OSError."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
