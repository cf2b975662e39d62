"""Python's garbage collector while a deployment starts, and from then on. No torch: it is the command's first line.

A start makes two million objects that stay. Python looks at all of them again and again while they are made: of the
6.7 s that importing torch, Inductor and transformers took on two cores, 1.5 were that, and memory was the same without.
A full collection visits what torch made while it compiled, half a million objects: 0.3 s in which no token comes.
"""

from __future__ import annotations

import gc

STARTING = 50_000  # new objects before the young ones are looked at; Python's own are 700, from 3.12 on 2,000
_usual = gc.get_threshold()


def expect_a_start() -> None:
    """Look seldom, until `spare_what_stands`."""
    gc.set_threshold(STARTING, *_usual[1:])


def spare_what_stands() -> None:
    """What stands now is to stay, so it is never visited again; what comes is looked at as usual."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_usual)
