"""Tunes Python's garbage collector for start-up. Does not import torch: it is the first thing that a command runs.

A start creates about two million long-lived objects, which the collector visits repeatedly while they are created:
1.5 s of the 6.7 s that importing torch, Inductor and transformers takes (docs/performance.md). A higher threshold
avoids that and uses no more memory. After start-up the objects are frozen, because a full collection would visit half a
million of them and delay tokens by 0.3 s.
"""

from __future__ import annotations

import gc

STARTUP_THRESHOLD = (
    50_000  # allocations before a collection of the youngest generation; Python's default is 700, or 2,000 from 3.13 on
)
_saved_threshold: tuple[int, int, int] | None = None  # thresholds before relax_gc_for_startup


def relax_gc_for_startup() -> None:
    """Collect rarely until `freeze_gc_after_startup`."""
    global _saved_threshold
    _saved_threshold = _saved_threshold or gc.get_threshold()
    gc.set_threshold(STARTUP_THRESHOLD, *_saved_threshold[1:])


def freeze_gc_after_startup() -> None:
    """Exclude all current objects from future collections, and restore the thresholds."""
    global _saved_threshold
    gc.collect()
    gc.freeze()
    if _saved_threshold is not None:
        gc.set_threshold(*_saved_threshold)
        _saved_threshold = None
