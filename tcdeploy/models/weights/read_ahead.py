"""Reads weight files into the page cache while Python imports torch, so that the weights are loaded from memory.

Chunks that are in the page cache already are skipped; `is_cached` finds out without reading from the disk. Rejected:
posix_fadvise. The kernel limits how much one call reads, and a thread that makes a call for every 128 KiB waits for the
GIL after each. Imports neither torch nor a model library.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Iterable
from pathlib import Path

from tcdeploy.host.resources import host_memory_bytes

CHUNK_BYTES = 16 << 20
PROBE_BYTES = 4096
THREADS = 4
MAX_MEMORY_SHARE = 0.5  # of the memory that this process may use
log = logging.getLogger("tcdeploy.models")


def start_read_ahead(paths: Iterable[Path]) -> list[threading.Thread]:
    """Read the files in daemon threads, in order. The start need not wait for the returned threads.

    Errors are only logged, because the start reads the files again and reports them. Files that are too large for the
    page cache are not read: their beginning would be evicted before it is loaded. Nothing is read outside Linux.
    """
    if not hasattr(os, "RWF_NOWAIT"):
        return []
    sizes = {path: path.stat().st_size for path in paths if path.is_file()}
    if not sum(sizes.values()) or sum(sizes.values()) > MAX_MEMORY_SHARE * host_memory_bytes():
        return []
    tasks: queue.SimpleQueue[tuple[Path, int]] = queue.SimpleQueue()
    for path, size in sizes.items():
        for begin in range(0, size, CHUNK_BYTES):
            tasks.put((path, begin))
    threads = [threading.Thread(target=_read, args=(tasks,), name="read-ahead", daemon=True) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    return threads


def _read(tasks: queue.SimpleQueue[tuple[Path, int]]) -> None:
    buffer = bytearray(CHUNK_BYTES)
    try:
        while True:
            path, begin = tasks.get_nowait()
            with path.open("rb", buffering=0) as file:
                if not is_cached(file.fileno(), begin):
                    os.preadv(file.fileno(), [buffer], begin)
    except queue.Empty:
        pass
    except OSError as error:
        log.debug("a weight file cannot be read ahead: %s", error)


def is_cached(descriptor: int, offset: int) -> bool:
    """Whether the page at `offset` of a file is in the page cache. False if the file system cannot be asked."""
    try:
        os.preadv(descriptor, [bytearray(PROBE_BYTES)], offset, os.RWF_NOWAIT)
    except OSError:  # EAGAIN: it would have to be read; EOPNOTSUPP
        return False
    return True
