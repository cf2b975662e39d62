"""Translates an OSError of writing to a cache folder into an error of this package."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from tcdeploy.errors import SpaceError, TcdeployError


def folder_error(root: str, error: OSError) -> TcdeployError:
    """The error to raise for an OSError of writing to the cache folder `root`."""
    hint = "choose a writable folder: --cache-dir DIR, or TCDEPLOY_CACHE_DIR=DIR"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
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
