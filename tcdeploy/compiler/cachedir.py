"""One folder that holds every compiled thing: Inductor's files in it, Triton's and our manifests below it.

    ROOT/                 TORCHINDUCTOR_CACHE_DIR: graphs, generated code, .so files, autotune winners
    ROOT/triton/          TRITON_CACHE_DIR
    ROOT/manifests/       one JSON per plan (manifest.py)

`activate` must run before the first compile, because torch reads the variables once. It proves by writing that the
folder can be written, since torch would raise a bare OSError 30 from deep inside. A TRITON_CACHE_DIR that was set
gives way: a cache that travels must be one folder.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

from tcdeploy.errors import SpaceError, TcdeployError

MEBIBYTE = 1 << 20


def activate(root: str, buckets: int) -> None:
    """Make the folder, prove that it can be written, and point torch at it. Raises SpaceError or TcdeployError."""
    path = Path(root)
    try:
        for folder in ("triton", "manifests"):
            (path / folder).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".writable-") as probe:
            probe.write(b"x" * 4096)
            probe.flush()
    except OSError as error:
        raise _translated(root, error) from error
    _check_room(root, buckets)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(path.absolute())
    os.environ["TRITON_CACHE_DIR"] = str((path / "triton").absolute())


def bytes_needed(buckets: int) -> int:
    """Room that a cold warm-up may take, generous: four buckets of the tiny model on a CPU took 6 MiB."""
    return (4 + 4 * buckets) * MEBIBYTE


def _check_room(root: str, buckets: int) -> None:
    free = shutil.disk_usage(root).free
    if free < bytes_needed(buckets) and not any(Path(root).glob("fxgraph/*")):
        raise SpaceError(
            f"the cache folder {root} has {free / MEBIBYTE:.1f} MiB free, and {buckets} buckets may need "
            f"{bytes_needed(buckets) / MEBIBYTE:.0f} MiB",
            "free some room, or name another folder: --cache-dir",
        )


def _translated(root: str, error: OSError) -> TcdeployError:
    hint = "name a folder that can be written: --cache-dir, or TCDEPLOY_CACHE_DIR"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SpaceError(f"the disk of the cache folder {root} is full", "free some room, or name another --cache-dir")
    if error.errno == errno.EROFS:
        return TcdeployError(f"the cache folder {root} is on a read-only file system", hint)
    return TcdeployError(f"the cache folder {root} cannot be written: {error.strerror}", hint)
