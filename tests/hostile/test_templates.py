"""Each template with each shape of conversation once; `scripts/attack templates` sends thousands of random ones."""

from __future__ import annotations

import random

from tests.hostile.template_forms import TEMPLATES
from tests.hostile.templates import SHAPES, run

# Shapes that a template with branches for system, user, assistant and tool must render.
COMMON_SHAPES = ("user parts", "developer", "later system", "refusal part", "think", "call", "two calls", "legacy call")


def test_each_message_is_in_the_prompt_or_is_refused_by_name() -> None:
    result = run(random.Random(11), (len(TEMPLATES) + 3) * len(SHAPES))
    assert result["succeeded"] == []
    assert result["templates"] >= len(TEMPLATES) + 3, "transformers' own templates were not found"
    for template in ("chatml", "branches", "items"):
        for shape in COMMON_SHAPES:
            assert f"{template}: {shape}" in result["rendered"]
    assert {"refused: messages", "rendered"} <= result["outcomes"].keys()
