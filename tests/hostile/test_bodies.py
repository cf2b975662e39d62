"""Sends 300 hostile bodies and heads to a server under load; `scripts/attack bodies` sends thousands."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile.bodies import attack_server, instrument
from tests.server.conftest import prepared_fork_server, serve, warm_cache  # noqa: F401 - fixtures


def test_hostile_bodies_and_heads_neither_block_the_event_loop_nor_leak_memory(
    serve: Callable[..., Any],  # noqa: F811
    tmp_path: Path,
) -> None:
    """Latencies are not asserted, because they depend on the load of the machine.

    The limit of the event loop's CPU time is higher than the campaign's. Other processes compete for the CPU's caches,
    and up to eight bodies arrive between two wake-ups (46 ms were seen). Without parsing in steps, it is 265 ms.
    """
    figures = tmp_path / "figures.json"
    with serve(script=instrument(figures)) as server:
        result = attack_server(server, figures, random.Random(19), 300, max_loop_cpu_ms=150)
        assert not result["succeeded"], result
        assert result["statuses"]["200"] > 10 and result["statuses"]["400"] > 100, result
        assert server.metric("recompiles_total") == 0
