"""The journal of a cold start, from which a later start takes over the buckets that it finished.

A staging folder keeps its journal when its process is killed or fails, and loses it when the plan has been published.
The journal has one JSON line per finished bucket, with the plan's key and the records of the files. Does not import
torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tcdeploy.cache.files.records import FileRecord, is_cache_file, is_plain_record
from tcdeploy.cache.folder.leases import is_locked
from tcdeploy.host.regular_file import open_regular, read_regular
from tcdeploy.host.temporary_files import HOST
from tcdeploy.host.typed_json import from_json
from tcdeploy.planning.environment import STAGING_PREFIX

JOURNAL, LOCK = "finished.jsonl", "lock"
HOST_PREFIX = f"{STAGING_PREFIX}{HOST}-"  # of the names of this host's staging folders
LONGEST_START_S = 24 * 3600.0  # no start compiles longer; once a server is ready, it does not need its staging folder


@dataclass(frozen=True)
class FinishedBucket:
    plan: str  # its key
    files: tuple[FileRecord, ...]


def append_to_journal(folder: Path, bucket: FinishedBucket) -> None:
    """Append a bucket and flush the journal. The caller has flushed the files. Raises OSError."""
    with open_regular(folder / JOURNAL, "ab", must_own=True) as journal:
        journal.write(json.dumps(asdict(bucket)).encode() + b"\n")
        journal.flush()
        os.fsync(journal.fileno())


def read_journal(folder: Path) -> list[FinishedBucket]:
    """The buckets in a folder's journal. Lines that are incomplete or damaged are skipped."""
    buckets: list[FinishedBucket] = []
    with contextlib.suppress(OSError):
        for document in _read_documents(folder):
            with contextlib.suppress(ValueError, RecursionError):
                bucket = from_json(FinishedBucket, document)
                if all(is_plain_record(file) and is_cache_file(file.path) for file in bucket.files):
                    buckets.append(bucket)
    return buckets


def _read_documents(folder: Path) -> list[Any]:
    """The JSON of each line of the journal, without lines that are incomplete or damaged. Raises OSError."""
    documents = []
    for line in read_regular(folder / JOURNAL).decode("utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            documents.append(json.loads(line))
    return documents


def unlocked_folders(root: str | Path) -> list[Path]:
    """Staging folders whose lock is free. On a network file system, locks of other hosts may be invisible."""
    folders = sorted(Path(root).glob(f"{STAGING_PREFIX}*"))
    return [folder for folder in folders if not folder.is_symlink() and not _is_locked(folder)]


def abandoned_folders(root: str | Path) -> list[Path]:
    """Those whose process has ended; of other hosts only old ones. The caller holds the cache folder's lock."""
    return [folder for folder in unlocked_folders(root) if folder.name.startswith(HOST_PREFIX) or _is_old(folder)]


def remove_abandoned_folders(folders: Iterable[Path], plan_keys: Collection[str] | None = None) -> int:
    """Delete the given abandoned staging folders, and return how many.

    With `plan_keys`, keeps folders with buckets of other plans, for the next start that has to compile. The caller has
    held the cache folder's lock since it listed the folders.
    """
    removed = [folder for folder in folders if plan_keys is None or not _has_other_plans(folder, plan_keys)]
    for folder in removed:
        shutil.rmtree(folder, ignore_errors=True)
    return len(removed)


def _has_other_plans(folder: Path, plan_keys: Collection[str]) -> bool:
    """Whether the journal has buckets of other plans, also in a format of another version of tcdeploy."""
    try:
        documents = _read_documents(folder)
    except FileNotFoundError:
        return False
    except OSError:  # it may have some
        return True
    return any(isinstance(item, dict) and item.get("plan") not in plan_keys for item in documents)


def _is_locked(folder: Path) -> bool:
    """Whether a start may still use the folder. One without a lock file was killed before it created the file."""
    return is_locked(folder / LOCK, fcntl.LOCK_EX, if_unknown=True) and not _is_old(folder)


def _is_old(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return time.time() - folder.lstat().st_mtime > LONGEST_START_S
    return False
