"""Series with known labels exist from the start, because `rate()` misses the first increment of a new series."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import ServerProcess


def test_every_series_with_a_known_label_starts_at_zero(serve: Callable[..., Any]) -> None:
    def samples(server: ServerProcess) -> dict[tuple[str, ...], float]:
        families = text_string_to_metric_families(httpx.get(f"{server.address}/metrics").text)
        counters = [sample for family in families if family.type == "counter" for sample in family.samples]
        return {
            (sample.name, *sample.labels.values()): sample.value
            for sample in counters
            if sample.name.endswith("_total")
        }

    with serve() as server:
        before = samples(server)
        server.client.completions.create(model="builtin:tiny", prompt="A list is a", max_tokens=3)
        after = samples(server)
    assert set(before) == set(after)
    assert before["tcdeploy:eager_fallbacks_total",] == 0
    for reason in ("loading", "queue_full", "draining", "dead"):
        assert before["tcdeploy:admission_rejections_total", reason] == 0
    for reason, count in {"stop": 0, "length": 1}.items():
        assert before["tcdeploy:request_success_total", reason] == 0
        assert after["tcdeploy:request_success_total", reason] == count
    assert {key[1] for key in before if key[0] == "tcdeploy:bucket_hits_total"} == {
        "prefill:32", "prefill:128", "decode:1", "decode:4",
    }  # fmt: skip
