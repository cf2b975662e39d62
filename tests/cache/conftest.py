"""Fixtures of the bundle tests that the tests of garbage collection use too: signing keys and a small packed cache."""

from __future__ import annotations

from tests.bundle.conftest import keys, packed, small

__all__ = ["keys", "packed", "small"]
