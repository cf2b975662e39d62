"""Goodput by hand: which requests meet their limits."""

from __future__ import annotations

import pytest

from tcdeploy.bench.goodput import Goodput, measure_goodput, parse_slo
from tcdeploy.bench.serve_settings import ServeSettings
from tcdeploy.bench.traffic import RequestTiming
from tcdeploy.errors import UsageError

QUICK = RequestTiming(1.0, [1.1, 1.12, 1.14])  # TTFT 100 ms, gaps of 20 ms
STALLED = RequestTiming(1.0, [1.1, 1.101, 1.16])  # mean gap 30 ms, longest 59 ms
SINGLE = RequestTiming(1.0, [1.3])


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        ({"ttft": 150.0}, 2),
        ({"tpot": 31.0}, 3),
        ({"itl": 31.0}, 2),
        ({"itl": 60.0}, 3),
        ({"e2e": 150.0}, 1),
        ({"ttft": 150.0, "itl": 31.0}, 1),
        ({"ttft": 1.0}, 0),
    ],
)
def test_a_request_is_good_if_it_meets_all_limits(slo: dict[str, float], good: int) -> None:
    measured = measure_goodput([QUICK, STALLED, SINGLE], slo, num_requests=4, seconds=2.0)
    assert measured == Goodput(good, good / 4, good / 2)


def test_limits_are_parsed_and_checked() -> None:
    assert parse_slo("ttft=200, itl=50") == {"ttft": 200.0, "itl": 50.0}
    for text in ("ttft", "ttft=fast", ""):
        with pytest.raises(UsageError, match="expected METRIC=MILLISECONDS"):
            parse_slo(text)
    with pytest.raises(UsageError, match="unknown metric 'e2el'") as raised:
        ServeSettings(url="http://x", slo=parse_slo("e2el=9"))
    assert raised.value.hint == "use ttft, itl, tpot, e2e"
    with pytest.raises(UsageError, match="limit of ttft is 0.0"):
        ServeSettings(url="http://x", slo=parse_slo("ttft=0"))
