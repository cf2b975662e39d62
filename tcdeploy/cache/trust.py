"""Refuses a cache folder that another user could change, because torch unpickles and executes the files in it.

The folder and each folder above it, up to a sticky one such as /tmp, must belong to this user or to root, and only
their owner may write to them. A group may write if it is the owner's private group, as on most Linux distributions.
`--trust-cache-dir` skips the check of owners and modes. Symbolic links inside the folder are always refused, because
tcdeploy would write through them. Does not import torch.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from collections.abc import Iterable
from pathlib import Path

from tcdeploy.errors import TrustError

FOLDER_MODE = 0o700  # of every folder that tcdeploy creates


def make_private_folder(path: str | Path) -> None:
    """Create the folder and its missing parents with mode 0700. Raises OSError."""
    folder = Path(path)
    if not folder.is_dir():
        if not folder.parent.exists():
            make_private_folder(folder.parent)
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)


def check_ownership(path: str | Path) -> None:
    """Raise TrustError if a user other than this one and root could add or replace files in the folder.

    Symbolic links in the path are resolved first. Folders that do not exist yet are skipped.
    """
    target = Path(os.path.realpath(path))
    for folder in (target, *target.parents):
        try:
            status = folder.stat()
        except FileNotFoundError:
            continue
        is_sticky = bool(status.st_mode & stat.S_ISVTX)
        if reason := _ownership_problem(status, may_be_shared=is_sticky and folder != target):
            raise _trust_error(target, folder, reason)
        if is_sticky and folder != target:
            return  # in a sticky folder, only the owner of an entry may rename or remove it


def check_no_links(folder: str | Path, paths: Iterable[str]) -> None:
    """Raise TrustError if one of these files, or a folder between it and `folder`, is a symbolic link.

    `paths` are relative to `folder`; those that do not exist are skipped.
    """
    for path in _with_parents(folder, paths):
        if path.is_symlink():
            raise TrustError(
                f"{path} is a symbolic link; a cache folder must not contain links, because they can lead out of it",
                "replace the link with a real file or folder, or choose another folder: --cache-dir DIR",
            )


def check_contents(folder: str | Path, paths: Iterable[str]) -> None:
    """Raise TrustError if another user could change one of these files, or a folder between it and `folder`.

    If `folder` has mode 0700, nothing is checked: other users cannot access the files in it, whatever their modes are.
    """
    if not Path(folder).stat().st_mode & (stat.S_IXGRP | stat.S_IXOTH):
        return
    for path in _with_parents(folder, paths):
        with contextlib.suppress(FileNotFoundError):
            if reason := _ownership_problem(path.lstat(), may_be_shared=False):
                raise _trust_error(Path(folder), path, reason)


def _with_parents(folder: str | Path, paths: Iterable[str]) -> list[Path]:
    """The paths and all folders between them and `folder`, outermost first."""
    names = {Path(path) for path in paths}
    names |= {parent for path in names for parent in path.parents} - {Path(".")}
    return [Path(folder, name) for name in sorted(names)]


def _ownership_problem(status: os.stat_result, may_be_shared: bool) -> str:
    """Why another user could change the file or folder; empty if none could.

    `may_be_shared`: it is a sticky folder, so its group and all users may write to it.
    """
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to the user {_user_name(status.st_uid)}"
    if status.st_mode & stat.S_IWOTH and not may_be_shared:
        return "can be changed by every user"
    if status.st_mode & stat.S_IWGRP and not may_be_shared and not _is_private_group(status):
        return f"can be changed by the group {_group_name(status.st_gid)}"
    return ""


def _is_private_group(status: os.stat_result) -> bool:
    """Whether the group has the owner's name and no other member."""
    try:
        owner, group = pwd.getpwuid(status.st_uid).pw_name, grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    return group.gr_name == owner and not set(group.gr_mem) - {owner}


def _trust_error(target: Path, folder: Path, reason: str) -> TrustError:
    if folder == target:
        subject = f"the cache folder {target}"
    elif folder in target.parents:
        subject = f"the cache folder {target} is in {folder}, which"
    else:
        subject = f"{folder} in the cache folder"
    owner = _user_name(os.geteuid())
    return TrustError(
        f"{subject} {reason}, and a start executes the files of a cache folder",
        f"choose a folder that only {owner} can change: --cache-dir DIR; or give this one to {owner}: "
        f"chown -R {owner} {folder} && chmod go-w {folder}; to use it as it is: --trust-cache-dir",
    )


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
