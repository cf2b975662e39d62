"""Python's garbage collector while a command starts, and from then on. No torch: it is the command's first line.

A start makes two million objects that stay, and Python looks at all of them again and again while they are made: of the
6.7 s in which torch 2.13, Inductor and transformers were imported (two cores, Python 3.11, 2026-11), 1.5 were that, and
looking seldom took no more memory. A full collection visits what torch made while it compiled, half a million objects:
0.3 s in which no token comes.
"""

from __future__ import annotations

import gc

STARTUP_THRESHOLD = 50_000  # new objects before the young ones are looked at; Python's own are 700, from 3.13 on 2,000
_saved_threshold: tuple[int, int, int] | None = None  # what was set when a start was expected


def relax_gc_for_startup() -> None:
    """Look seldom, until `freeze_gc_after_startup`."""
    global _saved_threshold
    _saved_threshold = _saved_threshold or gc.get_threshold()
    gc.set_threshold(STARTUP_THRESHOLD, *_saved_threshold[1:])


def freeze_gc_after_startup() -> None:
    """What stands now is to stay, so it is never visited again; what comes is looked at as it was before."""
    global _saved_threshold
    gc.collect()
    gc.freeze()
    if _saved_threshold is not None:
        gc.set_threshold(*_saved_threshold)
        _saved_threshold = None
