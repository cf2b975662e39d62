"""Records of cache files, and whether files still have their recorded bytes.

torch does not check a compiled library before it loads it. Of 14 random bit flips in one library, 6 had no effect, 2
raised an error, 5 crashed the process and one changed the results, while torch reported a cache hit. The manifest of a
plan therefore lists its files with their sha256, and every start compares them first (0.1 s per 100 MB). Does not
import torch.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tcdeploy.cache.folder.layout import AUTOTUNE_DIR, CACHE_DIRS, CONFLICTS_DIR
from tcdeploy.host.regular_file import UnsafeFileError, open_regular

CHUNK_BYTES = 1 << 20
WINNER_SUFFIX = ".best_config"
HASHING_THREADS = 4


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
    is_printable = re.search(r"[\x00-\x1f\x7f\\\ud800-\udfff]", path) is None
    is_sha256 = isinstance(file.sha256, str) and re.fullmatch("[0-9a-f]{64}", file.sha256) is not None
    return is_plain and is_printable and len(path) < 1024 and file.bytes >= 0 and is_sha256


def is_winner(path: str) -> bool:
    """Whether a file is Inductor's record of the fastest configuration of a kernel."""
    return path.endswith(WINNER_SUFFIX)


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

    def hash_file(path: str) -> FileRecord:
        with open_regular(Path(folder, path)) as file:
            digest = hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]  # IO lacks `readinto`
            return FileRecord(path, os.fstat(file.fileno()).st_size, digest.hexdigest())

    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        return tuple(pool.map(hash_file, sorted(paths)))


def find_damage(folder: str | Path, files: Iterable[FileRecord]) -> list[DamagedFile]:
    """The files that are missing or differ from their records, in the order of `files`."""
    return [damage for _, damage in _check_files(Path(folder), files) if damage is not None]


def intact_files(folder: str | Path, files: Iterable[FileRecord]) -> set[FileRecord]:
    """The files whose content matches their records."""
    return {file for file, damage in _check_files(Path(folder), files) if damage is None}


def _check_files(folder: Path, files: Iterable[FileRecord]) -> list[tuple[FileRecord, DamagedFile | None]]:
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        return list(pool.map(lambda file: (file, read_checked(folder, file, lambda chunk: None)), files))


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
