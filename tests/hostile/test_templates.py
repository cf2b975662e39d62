"""Each template with each shape of conversation once; `scripts/attack templates` sends thousands of random ones."""

from __future__ import annotations

import random

from tests.hostile.templates import SHAPES, attack
from tests.template_families import TEMPLATES, templates_of_transformers

# Shapes that a template with branches for system, user, assistant and tool must render.
COMMON_SHAPES = ("user parts", "developer", "later system", "refusal part", "think", "call", "two calls", "legacy call")


def test_each_message_is_in_the_prompt_or_is_refused_by_name() -> None:
    names = {*TEMPLATES, *templates_of_transformers()}
    outcomes, rendered, succeeded = attack(random.Random(11), len(names) * len(SHAPES))
    assert succeeded == []
    assert len(names) > len(TEMPLATES), "transformers' own templates were not found"
    assert {(name, shape) for name in ("chatml", "branches", "items") for shape in COMMON_SHAPES} <= rendered
    assert {name for name, _ in rendered} == names, "each template must render some conversations"
    assert outcomes["refused: messages"] and outcomes["rendered"] > outcomes.total() / 2
