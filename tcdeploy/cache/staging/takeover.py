"""What a start takes over from other starts: the buckets in their journals. Does not import torch."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import NamedTuple

from tcdeploy.cache.files.usage import untracked
from tcdeploy.cache.folder.layout import plan_keys
from tcdeploy.cache.folder.leases import folder_lock
from tcdeploy.cache.staging.folder import StagingFolder
from tcdeploy.cache.staging.journal import (
    HOST_PREFIX,
    abandoned_folders,
    read_journal,
    remove_abandoned_folders,
    unlocked_folders,
)
from tcdeploy.errors import TrustError

log = logging.getLogger("tcdeploy.cache")


class TakenOver(NamedTuple):
    """The number of folders that were deleted, and of journal entries that were copied: a bucket, or one package."""

    num_folders: int
    num_entries: int


def take_over_finished_buckets(staging: StagingFolder, plan_key: str) -> TakenOver:
    """Copy the files that the journals of unfinished starts list.

    Deletes each abandoned folder that has no finished bucket of another plan, unless that plan is complete.
    """
    if staging.is_private_copy:
        return TakenOver(0, 0)
    with folder_lock(staging.target):
        complete = plan_keys(staging.target) - {plan_key}  # its manifest may be of another version of tcdeploy
        num_folders = remove_abandoned_folders(abandoned_folders(staging.parent), complete)
        folders = unlocked_folders(staging.parent)
        entries = 0
        for folder in folders:
            try:
                entries += staging.take_over(folder, plan_key)
            except TrustError as error:
                log.warning("%s is not used: %s", folder, error.message)
        # Only folders listed above: if a process ended after that, its buckets have not been copied.
        abandoned = set(folders).intersection(abandoned_folders(staging.parent))
        num_folders += remove_abandoned_folders(abandoned, {plan_key, *complete})
    return TakenOver(num_folders, entries)


def copy_finished_buckets(staging: StagingFolder) -> None:
    """Copy the files in the journals of all starts that this start does not have, also of starts that still run.

    Files that do not match their records are not copied, and untrusted folders are skipped with a warning. Raises
    SpaceError and TcdeployError.
    """
    for folder in sorted(Path(staging.parent).glob(f"{HOST_PREFIX}*")):
        if folder.is_symlink() or os.path.realpath(folder) == staging.path:
            continue
        listed = {file for bucket in read_journal(folder) for file in bucket.files}
        missing = [file for file in listed if not Path(staging.path, file.path).exists()]
        if not missing:
            continue
        try:
            with untracked():
                staging.fill(missing, folder)
        except FileNotFoundError:  # another process has removed the folder
            log.debug("%s was removed while its files were copied", folder)
        except TrustError as error:
            log.warning("%s is not used: %s", folder, error.message)


def remove_published_folders(staging: StagingFolder) -> None:
    """Delete the staging folders of ended processes whose journals list only buckets of complete plans."""
    if not staging.is_private_copy:
        with folder_lock(staging.source):
            remove_abandoned_folders(abandoned_folders(staging.parent), plan_keys(staging.source))
