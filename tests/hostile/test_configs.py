"""Hostile model folders, each kind some times; `scripts/attack configs` makes thousands."""

from __future__ import annotations

import random

import pytest

from tests.hostile.configs import ATTACKS, run


@pytest.mark.parametrize("count", [3, pytest.param(8, marks=pytest.mark.long)])
def test_a_hostile_model_folder_is_planned_for_or_refused_with_a_hint(count: int) -> None:
    result = run(random.Random(23), count * len(ATTACKS))
    assert result["succeeded"] == []
    kinds = {name.partition(": ")[2] for name in result["outcomes"]}
    assert kinds == {"planned", "loaded", "refused"}, "each outcome must occur, or the attacks test nothing"
