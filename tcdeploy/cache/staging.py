"""The staging folder of one start: the only folder that torch, Triton and the C++ compiler read and write.

    ROOT/.start-XXXX/                      TORCHINDUCTOR_CACHE_DIR while the process runs
    ROOT/.start-XXXX/triton/               TRITON_CACHE_DIR
    ROOT/.start-XXXX/precompiled_headers/  hard links to ROOT/precompiled_headers/
    ROOT/.start-XXXX/finished.jsonl        the journal of a cold start: one line of file records per finished bucket
    ROOT/.start-XXXX/lock                  locked while the process runs

torch loads every file in its cache folder, even a library that a killed compiler left incomplete. A start therefore
works in a folder of its own. The files that a manifest lists are copied into it and compared with their records during
the copy, so exactly the checked bytes are loaded. When all buckets have passed their checks, the new files are copied
to the cache folder, and then the manifest is written. A killed start leaves its staging folder; the next start that has
to compile takes over the buckets in its journal and deletes it.

If the cache folder is read-only (a container image, a read-only mount), the staging folder is created in TMPDIR, and
the manifest is written into it. Does not import torch.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tcdeploy.cache.contents import (
    DamagedFile,
    FileRecord,
    find_damage,
    group_by_path,
    path_to_publish,
    read_checked,
)
from tcdeploy.cache.leases import folder_lock
from tcdeploy.cache.trust import FOLDER_MODE, check_contents, check_no_links, make_private_folder
from tcdeploy.errors import SpaceError, TcdeployError
from tcdeploy.planning.environment import STAGING_PREFIX

if TYPE_CHECKING:
    from tcdeploy.cache.provenance import StoredBundle

HEADERS_DIR = "precompiled_headers"
JOURNAL, LOCK = "finished.jsonl", "lock"
COPY_THREADS = 4
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_own_folders: dict[str, StagingFolder] = {}  # those of this process, by the real path of their cache folder


class StagingFolder:
    """The staging folder of a start.

    path: the folder that torch uses.
    source: the cache folder.
    target: the folder that receives new files and the manifest: `source`, or `path` if `source` is read-only.
    is_trusted: whether to use the cache folder even if other users can change it.
    bundle: the bundle that the plan was unpacked from, once `restore_plan` has read it; None for a local plan.
    """

    def __init__(self, path: str, source: str, target: str, lock: IO[bytes], is_trusted: bool = False) -> None:
        self.path, self.source, self.target, self.is_trusted = os.path.realpath(path), source, target, is_trusted
        self._lock, self._pid = lock, os.getpid()
        self._copied: set[FileRecord] = set()  # files that the cache folder has too
        self._in_journal: set[FileRecord] = set()
        self.bundle: StoredBundle | None = None

    @property
    def is_private_copy(self) -> bool:
        return self.target != self.source

    @property
    def headers_folder(self) -> str:
        return os.path.join(self.path, HEADERS_DIR)

    @property
    def is_usable(self) -> bool:
        """Whether the folder exists and this process created it. False in a child that was forked afterwards."""
        return self._pid == os.getpid() and os.path.isdir(self.path)

    def fill(self, files: Iterable[FileRecord], abandoned: Path | None = None) -> list[DamagedFile]:
        """Copy files from the cache folder, or from the staging folder `abandoned`, and compare each with its record.

        Returns the files that are missing or differ from their records; these are not copied. Raises SpaceError,
        TrustError and TcdeployError.
        """
        folder, files = abandoned or Path(self.source), list(files)
        parents = {Path(file.path).parent.as_posix() for file in files} - {"."}
        check_no_links(folder, parents)
        if not self.is_trusted:
            check_contents(folder, parents)
        try:
            for parent in {Path(file.path).parent for file in files}:
                Path(self.path, parent).mkdir(parents=True, exist_ok=True)
            with ThreadPoolExecutor(COPY_THREADS) as pool:
                damage = list(pool.map(lambda file: _copy_checked(folder, file, Path(self.path)), files))
        except OSError as error:
            raise self._copy_error(files, error) from error
        if abandoned is None:
            damaged = {item.path for item in damage if item is not None}
            self._copied |= {file for file in files if file.path not in damaged}
        return [item for item in damage if item is not None]

    def _copy_error(self, files: list[FileRecord], error: OSError) -> TcdeployError:
        size = sum(file.bytes for file in files)
        if not self.is_private_copy:
            if error.errno in DISK_FULL:
                return SpaceError(
                    f"the disk of the cache folder {self.source} is full; the start needs {size} bytes for a copy of "
                    "its plan",
                    "free space, or choose another --cache-dir",
                )
            return TcdeployError(
                f"the cache folder {self.source} cannot be written: {error.strerror}", "choose another --cache-dir"
            )
        if error.errno in DISK_FULL:
            return SpaceError(
                f"the cache folder {self.source} cannot be written, and {tempfile.gettempdir()} has no room for a "
                f"private copy of {size} bytes",
                "set TMPDIR to a folder with more free space, or choose a writable --cache-dir",
            )
        return TcdeployError(
            f"the cache folder {self.source} cannot be written, and no private copy can be made: {error.strerror}",
            "set TMPDIR to a writable folder, or choose another --cache-dir",
        )

    def add_to_journal(self, files: Iterable[FileRecord]) -> None:
        """Record the files of a finished bucket, so that the next start can use them if this one is killed.

        Raises OSError.
        """
        new = [file for file in files if file not in self._copied | self._in_journal]
        if not new or self.is_private_copy:
            return
        sync_files(Path(self.path), [file.path for file in new])
        with open(Path(self.path, JOURNAL), "a", encoding="utf-8") as journal:
            journal.write(json.dumps([asdict(file) for file in new]) + "\n")
            journal.flush()
            os.fsync(journal.fileno())
        self._in_journal.update(new)

    def publish(self, files: Iterable[FileRecord], others: Iterable[FileRecord]) -> None:
        """Copy the files that the cache folder does not have into it, and flush them. The caller holds its lock.

        `others` are the files that manifests of other plans list. If one of them has the same path and different
        content, it is kept, and the new file goes to CONFLICTS_DIR.
        """
        if self.is_private_copy:
            return
        root, others_by_path = Path(self.target), group_by_path(others)
        new = [file for file in files if file not in self._copied or find_damage(root, [file])]
        published = []
        for file in new:
            same_path = others_by_path.get(file.path, [])
            if file not in same_path or find_damage(root, [file]):
                path = path_to_publish(root, file, same_path)
                _copy_durably(Path(self.path, file.path), root / path)
                published.append(path)
            self._copied.add(file)
        sync_folders(root, published)
        _link_headers(Path(self.path), root)
        Path(self.path, JOURNAL).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove all files but the lock and precompiled headers, before this process starts another plan."""
        for entry in os.scandir(self.path):
            if entry.name not in (LOCK, HEADERS_DIR):
                shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)
        self._copied.clear()
        self._in_journal.clear()
        self.bundle = None

    def remove(self) -> None:
        if self.is_usable:
            shutil.rmtree(self.path, ignore_errors=True)


def own_staging_folder(root: str, clear: bool = True) -> StagingFolder | None:
    """The staging folder that this process has for a cache folder; None if it has none. `clear` empties it first."""
    staging = _own_folders.get(os.path.realpath(root))
    if staging is None or not staging.is_usable:
        return None
    if clear:
        staging.clear()
    return staging


def create_staging_folder(root: str, is_trusted: bool = False) -> StagingFolder:
    """Create the staging folder of this process in the cache folder. Raises TcdeployError and OSError."""
    with folder_lock(root):  # without it, another process could delete the new folder before its lock is taken
        path = tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=root)
        lock = open(Path(path, LOCK), "wb")  # noqa: SIM115 - held open until the process exits
        fcntl.flock(lock, fcntl.LOCK_EX)
    _link_headers(Path(root), Path(path))
    return _register(StagingFolder(path, root, root, lock, is_trusted))


def create_private_copy(root: str, is_trusted: bool = False) -> StagingFolder:
    """Create a staging folder in TMPDIR, for a cache folder that cannot be written. Raises TcdeployError."""
    try:
        path = os.path.realpath(tempfile.mkdtemp(prefix="tcdeploy-cache-"))
        return _register(StagingFolder(path, root, path, open(Path(path, LOCK), "wb"), is_trusted))
    except OSError as error:
        raise TcdeployError(
            f"the cache folder {root} cannot be written, and no private copy can be made: {error.strerror}",
            "set TMPDIR to a writable folder, or choose another --cache-dir",
        ) from error


def _register(staging: StagingFolder) -> StagingFolder:
    if not _own_folders:
        atexit.register(remove_own_staging_folders)
    _own_folders[os.path.realpath(staging.source)] = staging
    return staging


def remove_own_staging_folders() -> None:
    """Remove the staging folders of this process. To be called before `os._exit`, which runs no exit handlers."""
    for staging in _own_folders.values():
        staging.remove()


def abandoned_folders(root: str | Path) -> list[Path]:
    """Staging folders whose process has ended. The caller holds the folder's lock."""
    return [path for path in sorted(Path(root).glob(f"{STAGING_PREFIX}*")) if not _is_locked(path)]


def take_over_finished_buckets(staging: StagingFolder) -> int:
    """Copy the files in the journals of abandoned staging folders, and delete those folders.

    Returns the number of buckets. Files that do not match their records in the journal are not copied.
    """
    if staging.is_private_copy:
        return 0
    buckets = 0
    with folder_lock(staging.target):
        for folder in abandoned_folders(staging.target):
            for files in _read_journal(folder):
                staging.fill(files, folder)
                buckets += 1
            shutil.rmtree(folder, ignore_errors=True)
    return buckets


def remove_abandoned_folders(root: str | Path, keep_journals: bool) -> list[Path]:
    """Delete abandoned staging folders and return them. The caller holds the folder's lock.

    `keep_journals` keeps the folders that have a journal, for the next start that has to compile.
    """
    folders = [path for path in abandoned_folders(root) if not (keep_journals and (path / JOURNAL).exists())]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return folders


def _is_locked(folder: Path) -> bool:
    try:
        with open(folder / LOCK, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # the process was killed before it created the lock file
        return False
    return False


def _read_journal(folder: Path) -> list[list[FileRecord]]:
    """The records in a journal, one list per bucket. An incomplete last line is skipped."""
    buckets: list[list[FileRecord]] = []
    with contextlib.suppress(OSError, ValueError, TypeError):
        for line in (folder / JOURNAL).read_text(encoding="utf-8").splitlines():
            buckets.append([FileRecord(**record) for record in json.loads(line)])
    return buckets


def _copy_checked(folder: Path, file: FileRecord, target: Path) -> DamagedFile | None:
    path = target / file.path
    temporary = path.with_name(f".{secrets.token_hex(8)}.copy")  # path.name may be too long for an additional suffix
    with open(temporary, "wb") as copy:
        damage = read_checked(folder, file, copy.write)
    if damage is None:
        os.replace(temporary, path)
    else:
        temporary.unlink()
        path.unlink(missing_ok=True)
    return damage


def _copy_durably(source: Path, target: Path) -> None:
    """Copy to a temporary file, flush and rename it, so that `target` is complete or absent at any time."""
    make_private_folder(target.parent)
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with open(source, "rb") as read, open(temporary, "wb") as written:
            shutil.copyfileobj(read, written)
            written.flush()
            os.fsync(written.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _link_headers(source: Path, target: Path) -> None:
    """Hard-link precompiled headers and their sources into `target`, unless it has them.

    Headers are linked into the cache folder after a start has succeeded, so all headers there are complete.
    """
    if not (source / HEADERS_DIR).is_dir():
        return
    with contextlib.suppress(OSError):  # a file system without hard links: the next start precompiles again
        (target / HEADERS_DIR).mkdir(mode=FOLDER_MODE, exist_ok=True)
        for compiled in (source / HEADERS_DIR).glob("*.gch"):
            if (target / HEADERS_DIR / compiled.name).exists():
                continue
            for path in (compiled.with_suffix(""), compiled):
                _sync(path)
                with contextlib.suppress(FileExistsError):
                    os.link(path, target / HEADERS_DIR / path.name)


def sync_files(folder: Path, paths: Iterable[str]) -> None:
    """Flush files to disk, several in parallel, because an fsync mostly waits. Raises OSError."""
    with ThreadPoolExecutor(COPY_THREADS) as pool:
        list(pool.map(lambda path: _sync(folder / path), paths))


def sync_folders(root: Path, paths: Iterable[str]) -> None:
    """Flush `root`, and all folders between it and these files, to disk. Raises OSError."""
    folders = {parent for path in paths for parent in Path(path).parents}
    sync_files(root, (folder.as_posix() for folder in folders))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
