"""The staging folder of one start: the only folder that torch, Triton and the C++ compiler read and write.

    ROOT/.start-XXXX/                      TORCHINDUCTOR_CACHE_DIR while the process runs
    ROOT/.start-XXXX/triton/               TRITON_CACHE_DIR
    ROOT/.start-XXXX/precompiled_headers/  hard links to ROOT/precompiled_headers/
    ROOT/.start-XXXX/finished.jsonl        the journal of a cold start (journal.py)
    ROOT/.start-XXXX/lock                  locked while the process runs

torch loads every file in its cache folder, even a library that a killed compiler left incomplete. A start therefore
works in a folder of its own. The files that a manifest lists are copied into it and compared with their records during
the copy, so exactly the checked bytes are loaded. When all buckets have passed their checks, the new files are copied
to the cache folder, and then the manifest is written. A start that is killed or fails leaves its staging folder; the
next start that has to compile takes over the buckets in its journal.

If the cache folder is read-only, the staging folder is created in TMPDIR, and the manifest is written into it. If other
users can change it, which `--trust-cache-dir` accepts, they could replace a staging folder in it after the comparison.
It is then created in a private folder in TMPDIR, from which no later start can take over buckets. New files are
published as usual; precompiled headers are not shared, because a hard link shares the file with its owner. Does not
import torch.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tcdeploy.cache.files.precompiled_headers import link_headers, publish_headers
from tcdeploy.cache.files.records import (
    DamagedFile,
    FileRecord,
    group_by_path,
    hash_files,
    intact_files,
    path_to_publish,
    read_checked,
    stored_path,
)
from tcdeploy.cache.folder.access import folder_error
from tcdeploy.cache.folder.layout import HEADERS_DIR
from tcdeploy.cache.folder.leases import folder_lock
from tcdeploy.cache.record.bundle_header import CheckedHeader
from tcdeploy.cache.staging.journal import HOST_PREFIX, JOURNAL, LOCK, FinishedBucket, append_to_journal, read_journal
from tcdeploy.cache.trust.ownership import check_contents, check_no_links, check_ownership, make_private_folder
from tcdeploy.errors import SpaceError, TcdeployError, TrustError
from tcdeploy.host.durable import copy_durably, sync_files, sync_folders
from tcdeploy.host.regular_file import DISK_FULL, open_regular
from tcdeploy.host.temporary_files import create_temporary_folder

log = logging.getLogger("tcdeploy.cache")
COPY_THREADS = 4
_own_folders: dict[str, StagingFolder] = {}  # those of this process, by the real path of their cache folder
worker_parent: str | None = None  # in a compile worker whose start has a private folder: that folder
_parent_lock: int | None = None  # held until the process ends


class StagingFolder:
    """The staging folder of a start: `path`, which torch uses.

    target: the folder that receives new files and the manifest: `cache_folder`, or `path` if that is read-only.
    parent: the folder of the staging folders of this start and of its workers: `cache_folder`, or one in TMPDIR.
    is_trusted: whether to use the cache folder even if other users can change it.
    bundle: the bundle that the plan was unpacked from, once `restore_plan` has read it; None for a local plan.
    """

    def __init__(
        self, path: str, cache_folder: str, target: str, lock: int, is_trusted: bool = False, parent: str | None = None
    ) -> None:
        self.path, self.cache_folder, self.target = os.path.realpath(path), cache_folder, target
        self.is_trusted, self.parent = is_trusted, parent or cache_folder
        self._lock, self._pid = lock, os.getpid()  # the lock is a descriptor, held until the process ends
        self._copied: set[FileRecord] = set()  # files that the cache folder has too
        self._in_journal: dict[str, FileRecord] = {}  # by path
        self._hashed: dict[str, tuple[int, int]] = {}  # size and modification time of files when they were hashed
        self.deferred: tuple[FileRecord, ...] = ()  # files that `fill_deferred` copies
        self.winners: set[str] = set()  # measured configurations of kernels that compile workers have compiled
        self.bundle: CheckedHeader | None = None

    @property
    def is_private_copy(self) -> bool:
        return self.target != self.cache_folder

    @property
    def shares_headers(self) -> bool:
        """Whether precompiled headers are linked from the cache folder and into it."""
        return self.parent == self.cache_folder == self.target

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
        folder, files = abandoned or Path(self.cache_folder), list(files)
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

    def defer(self, files: Iterable[FileRecord]) -> list[DamagedFile]:
        """Leave files in the cache folder until `fill_deferred`, because the start will probably not read them.

        Returns damage for files that are missing or have the wrong size. `fill_deferred` checks the hashes of the rest.
        """
        files = list(files)
        self.deferred += tuple(files)
        self._copied |= set(files)
        unfit = [file for file in files if not _has_size(Path(self.cache_folder), file)]
        return [DamagedFile(file.path, "is missing or has another size") for file in unfit]

    def fill_deferred(self) -> list[DamagedFile]:
        """Copy the deferred files, as `fill` does. Raises SpaceError, TrustError and TcdeployError."""
        damage = self.fill(self.deferred)
        self.deferred = ()
        return damage

    def _copy_error(self, files: list[FileRecord], error: OSError) -> TcdeployError:
        if error.errno not in DISK_FULL:
            problem = f"the cache folder {self.cache_folder} cannot be written, and no private copy can be made"
            return _tmpdir_error(problem, error) if self.is_private_copy else folder_error(self.cache_folder, error)
        size = sum(file.bytes for file in files)
        if self.is_private_copy:
            return SpaceError(
                f"the cache folder {self.cache_folder} cannot be written, and {tempfile.gettempdir()} has no room for "
                f"a private copy of {size} bytes",
                "set TMPDIR to a folder with more free space, or choose a writable --cache-dir",
            )
        return SpaceError(
            f"the disk of the cache folder {self.cache_folder} is full; the start needs {size} bytes for a copy of "
            "its plan",
            "free space, or choose another --cache-dir",
        )

    def link_headers(self) -> None:
        """Make the precompiled headers of the cache folder available to this start."""
        if self.shares_headers:
            link_headers(Path(self.cache_folder), Path(self.path))

    def add_to_journal(self, plan_key: str, paths: Iterable[str]) -> None:
        """Record the files of a finished bucket, so that a later start can use them if this one does not finish.

        Files that the cache folder has, or that are recorded already, are left out. Raises OSError.
        """
        if self.is_private_copy:
            return
        statuses = {path: Path(self.path, path).stat() for path in paths}
        states = {path: (status.st_size, status.st_mtime_ns) for path, status in statuses.items()}
        changed = [path for path, state in states.items() if self._hashed.get(path) != state]
        self._hashed |= states
        self._write_to_journal(plan_key, hash_files(self.path, changed))

    def _write_to_journal(self, plan_key: str, files: Iterable[FileRecord]) -> None:
        new = [file for file in files if file not in self._copied and self._in_journal.get(file.path) != file]
        if new:
            sync_files(Path(self.path), [file.path for file in new])
            append_to_journal(Path(self.path), FinishedBucket(plan_key, tuple(new)))
            self._in_journal |= {file.path: file for file in new}

    def take_over(self, folder: Path, plan_key: str) -> int:
        """Copy the files in the journal of another staging folder. Returns the number of buckets.

        Buckets of this plan are added to this start's journal. Files that do not match their records are not copied.
        """
        buckets = read_journal(folder)
        for bucket in buckets:
            damaged = {file.path for file in self.fill(bucket.files, folder)}
            if bucket.plan == plan_key:
                self._write_to_journal(plan_key, (file for file in bucket.files if file.path not in damaged))
        return len(buckets)

    def discard_journal(self) -> None:
        """Delete the journal: its files are in the cache folder, or are not needed. Raises OSError."""
        Path(self.path, JOURNAL).unlink(missing_ok=True)
        self._in_journal.clear()

    def publish(self, files: Iterable[FileRecord], listed: Iterable[FileRecord]) -> None:
        """Copy the files that the cache folder does not have into it, and flush them. The caller holds its lock.

        `listed` are the files that the manifests in the folder list. If one of them has the same path and different
        content, it is kept, and the new file goes to CONFLICTS_DIR. Raises TrustError and OSError.
        """
        if self.is_private_copy:
            return
        root, files, listed = Path(self.target), list(files), set(listed)
        check_no_links(root, (Path(file.path).parent.as_posix() for file in files))
        present = {file for file in files if file in self._copied and _has_size(root, file)}
        present |= intact_files(root, (listed & set(files)) - present)
        listed_by_path, published = group_by_path(listed), []
        for file in files:
            if file not in present:
                path = path_to_publish(root, file, listed_by_path.get(file.path, []))
                make_private_folder((root / path).parent)
                copy_durably(Path(self.path, file.path), root / path)
                published.append(path)
        sync_folders(root, published)
        self._copied.update(files)
        if self.shares_headers:
            publish_headers(Path(self.path), root)

    def clear(self) -> None:
        """Remove all files but the lock, precompiled headers, and finished buckets that have not been published."""
        kept = {LOCK, JOURNAL, *self._in_journal}
        for parent, _, names in os.walk(self.path, topdown=False):
            for path in (Path(parent, name) for name in names):
                relative = path.relative_to(self.path)
                if relative.as_posix() not in kept and relative.parts[0] != HEADERS_DIR:
                    path.unlink()
            if parent != self.path:  # keep the folder itself: a private copy has no lock file, so it may be empty now
                with contextlib.suppress(OSError):  # not empty
                    os.rmdir(parent)
        self._copied.clear()
        self._hashed.clear()
        self.deferred = ()
        self.bundle = None

    def remove(self) -> None:
        """Delete the folder, unless its journal has buckets that a later start can take over."""
        if self.is_usable and self.parent != self.cache_folder:
            shutil.rmtree(self.path if self.parent == worker_parent else self.parent, ignore_errors=True)
        elif self.is_usable and not Path(self.path, JOURNAL).exists():
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
    """In the cache folder, or in TMPDIR if other users can change the former. Raises TcdeployError and OSError."""
    global _parent_lock
    parent = worker_parent or root
    if parent == root and is_trusted and _others_can_change(root):
        problem = f"other users can change the cache folder {root}, and no private folder can be created for the files"
        parent, _parent_lock = _create_in_tmpdir("staging", f"{problem} that are loaded", is_trusted)
    with folder_lock(root):  # without it, another process could delete the new folder before its lock is taken
        path = tempfile.mkdtemp(prefix=HOST_PREFIX, dir=parent)
        lock = os.open(Path(path, LOCK), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
    return _register(StagingFolder(path, root, root, lock, is_trusted, parent))


def _others_can_change(root: str) -> bool:
    try:
        check_ownership(root)
    except TrustError:
        return True
    return False


def create_private_copy(root: str, is_trusted: bool = False) -> StagingFolder:
    """Create a staging folder in TMPDIR, for a cache folder that cannot be written. Raises TcdeployError."""
    problem = f"the cache folder {root} cannot be written, and no private copy can be made"
    path, lock = _create_in_tmpdir("cache", problem, is_trusted)
    return _register(StagingFolder(path, root, path, lock, is_trusted))


def _create_in_tmpdir(purpose: str, problem: str, is_trusted: bool) -> tuple[str, int]:
    """A private folder in TMPDIR, and the descriptor that locks it. Raises TcdeployError that begins with `problem`.

    Raises TrustError if other users could replace the folder. `is_trusted`: only log it. In a pod of Kubernetes, TMPDIR
    is a volume that every user of the pod can change, and there is no other folder.
    """
    try:
        path, lock = create_temporary_folder(purpose)
    except OSError as error:
        raise _tmpdir_error(problem, error) from error
    try:
        check_ownership(path)
    except TrustError as error:
        if not is_trusted:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
            raise
        log.warning(
            "other users can change %s, and so could replace files between their check and their use: %s; set TMPDIR "
            "to a folder that only this user can change", path.parent, error.message,
        )  # fmt: skip
    return str(path), lock


def _tmpdir_error(problem: str, error: OSError) -> TcdeployError:
    hint = "set TMPDIR to a writable folder, or choose another --cache-dir"
    return TcdeployError(f"{problem}: {error.strerror}", hint)


def _register(staging: StagingFolder) -> StagingFolder:
    if not _own_folders:
        atexit.register(remove_own_staging_folders)
    _own_folders[os.path.realpath(staging.cache_folder)] = staging
    return staging


def remove_own_staging_folders() -> None:
    """Remove the staging folders of this process. To be called before `os._exit`, which runs no exit handlers."""
    for staging in _own_folders.values():
        staging.remove()


def _copy_checked(folder: Path, file: FileRecord, target: Path) -> DamagedFile | None:
    path = target / file.path
    temporary = path.with_name(f".{secrets.token_hex(8)}.copy")  # path.name may be too long for an additional suffix
    with open_regular(temporary, "xb") as written:
        damage = read_checked(folder, file, written.write)
    if damage is None:
        os.replace(temporary, path)
    else:
        temporary.unlink()
    return damage


def _has_size(root: Path, file: FileRecord) -> bool:
    try:
        return os.lstat(root / stored_path(root, file)).st_size == file.bytes
    except OSError:
        return False
