"""Refuses a cache folder that another user could change, because torch unpickles and executes the files in it.

Every folder and symbolic link that a lookup of the path passes through must belong to this user or to root, and only
their owner may write to these folders. Another user may write to a sticky one such as /tmp, where only the owner of an
entry may rename or remove it. A group may write if it is the owner's private group, as on most Linux distributions.

Links in the path are checked instead of being resolved once: a path whose folders and links have passed the check leads
to the same folder later, so the commands can go on using the path that the user gave. `--trust-cache-dir` skips the
check of owners and modes. Symbolic links inside the folder are always refused, because tcdeploy would write through
them. Does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tcdeploy.errors import TrustError

FOLDER_MODE = 0o700  # of every folder that tcdeploy creates
MAX_LINKS = 40  # in one path, as in Linux


def make_private_folder(path: str | Path) -> None:
    """Create the folder and its missing parents with mode 0700. Raises OSError."""
    folder = Path(path)
    if not folder.is_dir():
        if not folder.parent.exists():
            make_private_folder(folder.parent)
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)


def check_ownership(path: str | Path, must_exist: bool = False) -> None:
    """Raise TrustError if a user other than this one and root could change what the folder contains.

    Follows the path as the kernel does. Each folder is checked before an entry is looked up in it, so no other user can
    replace an entry after it was checked. Folders that do not exist yet are skipped, unless `must_exist`. Raises
    OSError if the path cannot be followed.
    """
    folder, names, links = Path("/"), list(reversed(Path(os.getcwd(), path).parts)), 0
    while names:
        if (name := names.pop()) == "..":
            folder = folder.parent
            continue
        entry = folder / name
        try:
            status = entry.lstat()
        except (FileNotFoundError, NotADirectoryError):
            folder = entry
            continue
        is_link = stat.S_ISLNK(status.st_mode)
        if reason := _ownership_problem(status, may_be_shared=is_link or bool(status.st_mode & stat.S_ISVTX)):
            raise _trust_error(path, entry, reason)
        if not is_link:
            folder = entry
        elif (links := links + 1) > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        else:
            names += reversed(Path(os.readlink(entry)).parts)
    _check_last_folder(path, folder, must_exist)


def _check_last_folder(path: str | Path, folder: Path, must_exist: bool) -> None:
    """Unlike the folders above it, the cache folder itself must not be shared, even if it is sticky."""
    try:
        reason = _ownership_problem(folder.lstat(), may_be_shared=False)
    except (FileNotFoundError, NotADirectoryError):
        reason = "was removed by another process" if must_exist else ""
    if reason:
        raise _trust_error(path, folder, reason)


def check_no_links(folder: str | Path, paths: Iterable[str]) -> None:
    """Raise TrustError if one of these paths relative to `folder`, or a folder between, is a symbolic link."""
    for path in _with_parents(folder, paths):
        if path.is_symlink():
            raise TrustError(
                f"{path} is a symbolic link; a cache folder must not contain links, because they can lead out of it",
                "replace the link with a real file or folder, or choose another folder: --cache-dir DIR",
            )


def check_contents(folder: str | Path, paths: Iterable[str]) -> None:
    """Raise TrustError if another user could change one of these files, or a folder between it and `folder`.

    If `folder` belongs to this user and has mode 0700, only owners are checked: other users cannot reach the files by
    their paths, whatever their modes are, but the owner of a file may have it open, or have another link to it.
    """
    status = Path(folder).stat()
    is_private = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IXGRP | stat.S_IXOTH)
    for path in _with_parents(folder, paths):
        with contextlib.suppress(FileNotFoundError):
            if reason := _ownership_problem(path.lstat(), may_be_shared=is_private):
                raise _trust_error(folder, path, reason)


def _with_parents(folder: str | Path, paths: Iterable[str]) -> list[Path]:
    """The paths and all folders between them and `folder`, outermost first."""
    names = {Path(path) for path in paths}
    names |= {parent for path in names for parent in path.parents} - {Path(".")}
    return [Path(folder, name) for name in sorted(names)]


def _ownership_problem(status: os.stat_result, may_be_shared: bool) -> str:
    """Why another user could change a file or folder; empty if none could. `may_be_shared`: only the owner matters."""
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to the user {_name(pwd.getpwuid, status.st_uid)}"
    if status.st_mode & stat.S_IWOTH and not may_be_shared:
        return "can be changed by every user"
    if status.st_mode & stat.S_IWGRP and not may_be_shared and not _is_private_group(status):
        return f"can be changed by the group {_name(grp.getgrgid, status.st_gid)}"
    return ""


def _is_private_group(status: os.stat_result) -> bool:
    """Whether the group has the owner's name and no other member."""
    try:
        owner, group = pwd.getpwuid(status.st_uid).pw_name, grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    return group.gr_name == owner and not set(group.gr_mem) - {owner}


def _trust_error(path: str | Path, entry: Path, reason: str) -> TrustError:
    """The error for the cache folder `path`, of which `entry` is the folder, a part of the path, or a file in it."""
    target, owner = Path(os.path.realpath(path)), _name(pwd.getpwuid, os.geteuid())
    hint = f"use a folder that only {owner} can change: --cache-dir DIR; "
    if entry == target or target in entry.parents or Path(path) in entry.parents:
        subject = f"the cache folder {target}" if entry == target else f"{entry} in the cache folder"
        hint += (
            f"or move this one away and warm again: mv {target} {target}.untrusted (another owner or mode would not "
            "make files safe that another user has put there); "
        )
    elif entry in target.parents:
        subject = f"the cache folder {target} is in {entry}, which"
    else:
        subject = f"the path of the cache folder {path} leads through {entry}, which"
    return TrustError(
        f"{subject} {reason}, and a start executes the files of a cache folder",
        f"{hint}to use it as it is: --trust-cache-dir",
    )


def _name(look_up: Callable[[int], Sequence[Any]], number: int) -> str:
    """The name in the entry of a user or a group, which is its first field; the number if there is no entry."""
    with contextlib.suppress(KeyError):
        return str(look_up(number)[0])
    return str(number)
