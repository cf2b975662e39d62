"""Damaged and rewritten caches and bundles, each kind three times; `scripts/attack damage` makes thousands."""

from __future__ import annotations

import random

from tests.hostile.damage import BUNDLE_KINDS, NEED_REQUIRE_SIGNED, PROTECTED, run


def test_no_damaged_or_rewritten_cache_is_used_or_accepted_by_verify() -> None:
    kinds = len(PROTECTED) + len(NEED_REQUIRE_SIGNED) + len(BUNDLE_KINDS)
    result = run(random.Random(19), 3 * kinds)
    assert result["succeeded"] == []
    assert len(result["kinds"]) == kinds and set(result["kinds"].values()) == {3}
