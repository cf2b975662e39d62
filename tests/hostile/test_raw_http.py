"""Sends 120 attacks of raw HTTP; `scripts/attack raw_http` sends thousands."""

from __future__ import annotations

import random

from tests.hostile.raw_http import run


def test_requests_in_any_framing_get_their_responses() -> None:
    result = run(random.Random(17), 120)
    assert not result["succeeded"], result["succeeded"][:5]
    assert {"content", "400", "413", "415", "501", "disconnect"} <= set(result["responses"]), result
