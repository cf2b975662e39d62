"""Creates and checks a cache folder, and translates the OSErrors of writing to it. Does not import torch."""

from __future__ import annotations

import contextlib
import errno
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tcdeploy.cache.folder.layout import AOT_DIR, BUNDLES_DIR, HEADER_SUFFIX, MANIFESTS_DIR, OWN_NAMES, TEST_FILE_PREFIX
from tcdeploy.cache.trust.ownership import check_contents, check_no_links, check_ownership, make_private_folder
from tcdeploy.errors import SpaceError, TcdeployError
from tcdeploy.host.regular_file import DISK_FULL


def create_folder(root: str | Path, is_trusted: bool = False) -> None:
    """Create the cache folder if it is missing. Checks it as `check_folder` does. Raises TrustError and OSError.

    The second check is for a folder that another user creates after the first one. That folder may also disappear, and
    come back after the check, so the folder must exist by then.
    """
    check_folder(root, is_trusted)
    make_private_folder(root)
    check_folder(root, is_trusted, must_exist=True)


def check_folder(root: str | Path, is_trusted: bool = False, must_exist: bool = False) -> None:
    """Raise TrustError if another user could change the folder, or if one of OWN_NAMES in it is a symbolic link.

    `is_trusted` skips the first check. `must_exist` refuses a missing folder, which another user could create after the
    check. Raises TcdeployError if the path cannot be followed.
    """
    with translate_os_errors(str(root)):
        check_no_links(root, (*OWN_NAMES, *_documents(root)))
        if not is_trusted:
            check_ownership(root, must_exist)
            if Path(root).is_dir():
                check_contents(root, [MANIFESTS_DIR, *_documents(root)])


def _documents(root: str | Path) -> Iterator[str]:
    """The files that a start parses before it copies its plan, relative to the folder."""
    for pattern in (f"{MANIFESTS_DIR}/*.json", f"{BUNDLES_DIR}/*{HEADER_SUFFIX}", f"{AOT_DIR}/start-*.json"):
        yield from (path.relative_to(root).as_posix() for path in Path(root).glob(pattern))


def write_test_file(folder: str | Path) -> None:
    """Write a file, which has no name on most disks. Raises OSError."""
    with tempfile.TemporaryFile(dir=folder, prefix=TEST_FILE_PREFIX) as file:
        file.write(b"x" * 4096)
        file.flush()


def folder_error(root: str, error: OSError) -> TcdeployError:
    """The error to raise for an OSError of writing to the cache folder `root`."""
    hint = "choose a writable folder: --cache-dir DIR, or TCDEPLOY_CACHE_DIR=DIR"
    if error.errno in DISK_FULL:
        return SpaceError(f"the disk of the cache folder {root} is full", "free space, or choose another --cache-dir")
    if error.errno == errno.EROFS:
        return TcdeployError(f"the cache folder {root} is on a read-only file system", hint)
    return TcdeployError(f"the cache folder {root} cannot be written: {error.strerror}", hint)


@contextlib.contextmanager
def translate_os_errors(root: str) -> Iterator[None]:
    """Raise `folder_error` for an OSError that is raised in the block."""
    try:
        yield
    except OSError as error:
        raise folder_error(root, error) from error
