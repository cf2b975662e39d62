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

CHUNK_BYTES = 16 << 20
PROBE_BYTES = 4096
THREADS = 4
MAX_MEMORY_SHARE = 0.5  # of the machine's memory that the files may take
log = logging.getLogger("tcdeploy.start")


def start_read_ahead(paths: Iterable[Path]) -> list[threading.Thread]:
    """Read the files in daemon threads, in order. The start need not wait for the returned threads.

    Errors are only logged, because the start reads the files again and reports them. Files that are too large for the
    page cache are not read: their beginning would be evicted before it is loaded. Nothing is read outside Linux.
    """
    if not hasattr(os, "RWF_NOWAIT"):
        return []
    tasks: queue.SimpleQueue[tuple[Path, int]] = queue.SimpleQueue()
    total = 0
    for path in paths:
        size = path.stat().st_size if path.is_file() else 0
        total += size
        for begin in range(0, size, CHUNK_BYTES):
            tasks.put((path, begin))
    if not total or total > MAX_MEMORY_SHARE * _memory_bytes():
        return []
    threads = [threading.Thread(target=_read, args=(tasks,), name="read-ahead", daemon=True) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    return threads


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read(tasks: queue.SimpleQueue[tuple[Path, int]]) -> None:
    buffer, descriptors = bytearray(CHUNK_BYTES), dict[Path, int]()
    try:
        while True:
            path, begin = tasks.get_nowait()
            if path not in descriptors:
                descriptors[path] = os.open(path, os.O_RDONLY)
            if not is_cached(descriptors[path], begin):
                os.preadv(descriptors[path], [buffer], begin)
    except queue.Empty:
        pass
    except OSError as error:
        log.debug("a weight file cannot be read ahead: %s", error)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def is_cached(descriptor: int, offset: int) -> bool:
    """Whether the page at `offset` of a file is in the page cache. False if the file system cannot be asked."""
    try:
        os.preadv(descriptor, [bytearray(PROBE_BYTES)], offset, os.RWF_NOWAIT)
    except OSError:  # EAGAIN: it would have to be read; EOPNOTSUPP
        return False
    return True
