"""Opens 1,200 idle connections to servers with at most 400 open files; `scripts/attack idle` opens thousands."""

from __future__ import annotations

import random

from tests.hostile.idle import ROUND, run


def test_idle_connections_do_not_keep_new_clients_out() -> None:
    result = run(random.Random(20), 2 * ROUND)
    assert not result["succeeded"], result["succeeded"][:5]
