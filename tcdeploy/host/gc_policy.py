"""Tunes Python's garbage collector for start-up. Does not import torch: it is the first thing that a command runs.

A start creates about two million long-lived objects, which the collector visits repeatedly while they are created:
1.5 s of the 6.7 s that importing torch, Inductor and transformers takes (docs/performance-log.md). A higher threshold
avoids that and uses no more memory. After start-up the objects are frozen, because a full collection would delay tokens
by 0.3 s; those created by imports right after the imports. Less than 1 MB of them is garbage, which is not freed.
"""

from __future__ import annotations

import gc

STARTUP_THRESHOLD = 50_000  # allocations before a collection of the youngest generation; Python's default is 700
_saved_threshold: tuple[int, int, int] | None = None  # thresholds before relax_gc_for_startup


def relax_gc_for_startup() -> None:
    """Collect rarely until `freeze_gc_after_startup`."""
    global _saved_threshold
    _saved_threshold = _saved_threshold or gc.get_threshold()
    gc.set_threshold(STARTUP_THRESHOLD, *_saved_threshold[1:])


def freeze_imported_objects() -> None:
    """Exclude all current objects from future collections, without a collection, if `relax_gc_for_startup` was called.

    Call it after large imports. Does nothing in programs that did not call that function, such as users of the library.
    """
    if _saved_threshold is not None:
        gc.freeze()


def freeze_gc_after_startup() -> None:
    """Collect what is garbage, exclude all other objects from future collections, and restore the thresholds."""
    global _saved_threshold
    gc.collect()
    gc.freeze()
    if _saved_threshold is not None:
        gc.set_threshold(*_saved_threshold)
        _saved_threshold = None
