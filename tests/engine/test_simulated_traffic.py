"""The real scheduler under simulated traffic: scripts/simulate-traffic, with the step times of an 8B on an H100."""

from __future__ import annotations

from typing import Any

import pytest

from tcdeploy.planning.sizes import GPU_BATCH_SIZES
from tests.test_scripts import load_script, run_script


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("simulate-traffic")


def simulate(script: Any, **options: Any) -> Any:
    return script.Simulation(script.LLAMA_8B_ON_H100, script.Load(requests=240, seed=4), **options).run()


def test_mixed_steps_with_a_target_keep_gaps_short_at_12_requests_per_second(script: Any) -> None:
    """Coarse limits: the simulated values were 15 ms, 8.1 ms, 107 ms and 5 %."""
    bounded = simulate(script)
    assert bounded.gap_p99 <= 25 and bounded.per_token_mean <= 9
    assert bounded.first_token_p99 <= 200 and bounded.padding <= 0.15


def test_the_target_and_mixed_steps_both_shorten_gaps(script: Any) -> None:
    separate, mixed, bounded = (
        simulate(script, **options) for options in ({"mixed_steps": False}, {"itl_target_ms": 1e9}, {})
    )
    assert separate.gap_p99 > mixed.gap_p99 > bounded.gap_p99
    assert separate.per_token_mean > mixed.per_token_mean > bounded.per_token_mean


def test_the_target_is_met_if_steps_take_half_as_long_again_as_measured(script: Any) -> None:
    slow = script.Simulation(script.LLAMA_8B_ON_H100, script.Load(seed=4), itl_target_ms=20.0, slowdown=1.5).run()
    assert slow.gap_p99 <= 22


def test_a_delayed_launch_shortens_first_tokens_and_nothing_else(script: Any) -> None:
    late, at_once = simulate(script), simulate(script, delays_launch=False)
    assert late.first_token_median < at_once.first_token_median - 2
    assert late.per_token_mean == pytest.approx(at_once.per_token_mean, rel=0.03)


@pytest.mark.parametrize(
    ("load", "used", "further"),
    [
        ({"rate": 12}, 32, (24,)),
        ({"rate": 20}, 64, (48,)),
        ({"rate": 30, "prompt": 256, "answer": 256}, 128, (96, 192)),
    ],
)
def test_a_default_batch_size_saves_more_than_a_further_one_would(
    script: Any, load: dict[str, int], used: int, further: tuple[int, ...]
) -> None:
    """The share of time lost to padding, in loads that use the size (docs/performance-log.md, "Padding")."""

    def lost(sizes: tuple[int, ...]) -> float:
        costs = script.with_batch_sizes(script.LLAMA_8B_ON_H100, sizes)
        figures = script.Simulation(costs, script.Load(requests=400, seed=4, **load)).run()
        return float(figures.lost)

    default = lost(GPU_BATCH_SIZES)
    saved = lost(tuple(size for size in GPU_BATCH_SIZES if size != used)) - default
    would_save = default - lost(tuple(sorted((*GPU_BATCH_SIZES, *further))))
    assert saved > 0.015 > would_save > 0


def test_costs_of_other_batch_sizes_lie_between_those_measured(script: Any) -> None:
    costs = script.with_batch_sizes(script.LLAMA_8B_ON_H100, (64, 96, 128))
    assert costs.decode_ms_by_rows == ((64, 7.6), (96, pytest.approx(8.67)), (128, 9.74))


def test_a_simulation_is_deterministic(script: Any) -> None:
    assert simulate(script, noise=0.2) == simulate(script, noise=0.2)


def test_the_script_prints_a_row_for_each_way_to_form_steps() -> None:
    lines = run_script("simulate-traffic", "--requests", "20", "--target", "20", "40").splitlines()
    assert [line[:24].strip() for line in lines] == [
        "", "separate steps", "mixed, no target", "mixed", "mixed, launched at once", "mixed, at most 20 ms",
        "mixed, at most 40 ms",
    ]  # fmt: skip
