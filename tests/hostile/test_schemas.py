"""Random schemas and outputs, a hundred; `scripts/attack schemas` makes thousands."""

from __future__ import annotations

import random

from tests.hostile.schemas import run


def test_random_outputs_of_random_schemas_are_valid_and_exact() -> None:
    result = run(random.Random(42), 100)
    assert result["succeeded"] == []
    outcomes = result["outcomes"]
    assert outcomes["valid"] > 50 and outcomes["refused"] > 10, "each outcome must occur, or the attacks test nothing"
