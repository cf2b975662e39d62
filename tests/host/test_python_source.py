"""A garbage collection cannot fail the parsing of Python source, on Pythons with python/cpython#106905."""

from __future__ import annotations

import ast
import gc

import pytest

from tcdeploy.host.python_source import parse_source

SOURCE = "\n".join(f"def function_{number}(x):\n    return [x + {number}, (x, x * 2)]" for number in range(200))


class ParsesWhenCollected:
    """Parses another source in its finalizer, from a deeper stack than that of the call it interrupts."""

    finalized = 0

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        type(self).finalized += 1
        self.parse_below(frames=5)

    def parse_below(self, frames: int) -> None:
        if frames:
            self.parse_below(frames - 1)
        else:
            ast.parse("x = 1")


def test_a_finalizer_that_parses_does_not_interrupt() -> None:
    threshold = gc.get_threshold()
    gc.collect()
    ParsesWhenCollected.finalized = 0
    ParsesWhenCollected()
    gc.set_threshold(100, 1, 1)  # the first hundred nodes start a collection
    try:
        tree = parse_source(SOURCE)
        finalized = ParsesWhenCollected.finalized
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert (finalized, ParsesWhenCollected.finalized) == (0, 1)
    assert len(tree.body) == 200


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("source", ["x = 1", "x ="], ids=["valid", "invalid"])
def test_the_collector_is_left_as_it_was(source: str, enabled: bool) -> None:
    if not enabled:
        gc.disable()
    try:
        if source == "x =":
            with pytest.raises(SyntaxError):
                parse_source(source)
        else:
            parse_source(source)
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
