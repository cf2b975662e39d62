"""Step costs from timed steps. The times of the fake steps are computed from their sizes and lengths."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tcdeploy.engine.schedule.blocks import BlockAllocator
from tcdeploy.engine.schedule.step_batch import StepBatch
from tcdeploy.engine.schedule.step_costs import StepCosts
from tcdeploy.engine.warm import timing
from tcdeploy.engine.warm.timing import BRIEF, SHORT_CONTEXT, TimingLimits, measure_step_costs
from tcdeploy.planning.environment import Environment
from tcdeploy.planning.plan import Bucket, make_plan
from tests.machines import H100, LAPTOP, LLAMA_8B, make_recipe

DECODE_CONTEXT_MS, PREFIX_PAIR_MS, PREFIX_TOKEN_MS = 0.01, 0.001, 0.05


class FakeRunner:
    """Counts how often its rows are cleared. Its steps take `step_ms` milliseconds."""

    def __init__(
        self, captured_sizes: tuple[int, ...] = (), context: int = 4096, machine: Environment = LAPTOP, **recipe: Any
    ) -> None:
        values = {"buckets": (32, 64), "batch_sizes": (1, 4), **recipe}
        self.plan = make_plan(make_recipe(context=context, **values), machine, LLAMA_8B)
        self.prefixes: set[int] = set()  # before the chunks
        self.vocab_size, self.captured_sizes, self.num_clears, self.noise = 100, captured_sizes, 0, 0.0
        self.graphs = SimpleNamespace(is_captured=lambda bucket: bool(self.captured_sizes))
        self.row_assignment = SimpleNamespace(clear=self.clear)
        self.batch_allocator = partial(BlockAllocator, self.plan.kv_blocks, self.plan.block_size)

    def clear(self) -> None:
        self.num_clears += 1

    def step_sizes(self, rows: int) -> tuple[int, ...]:
        assert rows == 0
        return self.captured_sizes

    def run(self, batch: StepBatch) -> float:
        """The milliseconds of the step, which the fake _median_ms returns."""
        [chunk] = batch.chunks
        start, tokens = chunk.start, len(chunk.token_ids)
        assert start >= 0 and tokens > 0 and chunk.stop <= self.plan.context
        assert chunk.stop <= len(chunk.blocks) * self.plan.block_size
        ms = step_ms(Bucket("prefill", tokens)) + (PREFIX_PAIR_MS * tokens + PREFIX_TOKEN_MS) * start
        self.prefixes.add(start)
        return ms + self.noise * (start <= self.plan.prefill_buckets[-1].size // 2)


def step_ms(bucket: Bucket, length: int | None = None) -> float:
    if bucket.is_prefill:
        return 2.0 + (length or bucket.size) / 16
    assert length is not None
    return 1.0 + bucket.size + DECODE_CONTEXT_MS * bucket.size * length


def measured_costs(monkeypatch: pytest.MonkeyPatch, runner: Any, noise: float = 0.0) -> StepCosts:
    """`noise`: ms added to decode steps of SHORT_CONTEXT tokens and to chunks after the shorter timed prefix."""

    def measure_step_ms(_: Any, bucket: Bucket, *, limits: TimingLimits, length: int) -> float:
        assert limits == BRIEF
        return step_ms(bucket, length) + noise * (length == SHORT_CONTEXT)

    runner.noise = noise
    monkeypatch.setattr(timing, "measure_step_ms", measure_step_ms)
    monkeypatch.setattr(timing, "_median_ms", lambda step, limits: step())
    return measure_step_costs(runner)


def test_costs_come_from_the_steps_of_all_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner()
    costs = measured_costs(monkeypatch, runner)
    assert costs.prefill_ms == ((32, 4.0), (64, 6.0))
    assert costs.timed_context == 512
    assert costs.decode_ms_by_rows == ((1, 2.0 + 5.12), (4, 5.0 + 20.48))
    assert runner.num_clears == 1


def test_context_costs_are_the_slopes_between_two_timed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = measured_costs(monkeypatch, FakeRunner())
    assert costs.decode_context_ms == pytest.approx(DECODE_CONTEXT_MS)
    assert costs.prefix_pair_ms == pytest.approx(PREFIX_PAIR_MS)
    assert costs.prefix_token_ms == pytest.approx(PREFIX_TOKEN_MS)


@pytest.mark.parametrize(("machine", "prefix"), [(LAPTOP, 64), (H100, 16_384)])
def test_a_prefix_is_timed_that_is_short_enough_for_reference_attention(
    monkeypatch: pytest.MonkeyPatch, machine: Environment, prefix: int
) -> None:
    runner = FakeRunner(context=32_768, machine=machine)
    measured_costs(monkeypatch, runner)
    assert runner.prefixes == {prefix // 2, prefix}


def test_context_costs_nothing_if_noise_made_the_shorter_steps_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = measured_costs(monkeypatch, FakeRunner(), noise=1e6)
    assert (costs.decode_context_ms, costs.prefix_pair_ms, costs.prefix_token_ms) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("context", "bucket", "slopes"), [(31, 16, (False, False)), (127, 64, (True, False)), (128, 64, (True, True))]
)
def test_context_costs_nothing_if_no_long_step_can_be_timed(
    monkeypatch: pytest.MonkeyPatch, context: int, bucket: int, slopes: tuple[bool, bool]
) -> None:
    """Timing needs a context of 32 tokens per row in decode, and a prefix as long as the chunk in prefill."""
    costs = measured_costs(monkeypatch, FakeRunner(context=context, buckets=(bucket,)))
    assert costs.timed_context == context
    assert (costs.decode_context_ms > 0, costs.prefix_pair_ms > 0) == slopes
    assert (costs.prefix_token_ms > 0) == slopes[1]


@pytest.mark.parametrize(
    ("seconds", "ms"), [([0.35, 0.006], 6.0), ([0.35, 0.4], 350.0), ([4.0], 4000.0), ([0.08, 0.03, 0.02, 0.04], 30.0)]
)
def test_a_slow_first_run_is_repeated_unless_an_interruption_would_hardly_matter(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], ms: float
) -> None:
    """In the last case the first run is not slow, and the median of three further runs counts."""
    left = list(seconds)
    batch = SimpleNamespace(run=lambda: None, sequences=[])
    monkeypatch.setattr(timing, "make_timing_batch", lambda *_: batch)
    monkeypatch.setattr(timing, "_seconds", lambda step: left.pop(0))
    runner: Any = SimpleNamespace(rerun=lambda bucket: None)
    assert timing.measure_step_ms(runner, Bucket("prefill", 64), limits=BRIEF) == pytest.approx(ms)
    assert not left


def test_a_dynamic_bucket_is_timed_at_each_captured_size(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner((16, 32, 40), buckets=(40,), shapes="dynamic")
    assert measured_costs(monkeypatch, runner).prefill_ms == ((16, 3.0), (32, 4.0), (40, 4.5))


def test_a_dynamic_bucket_without_graphs_is_timed_at_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner(buckets=(40,), shapes="dynamic")
    assert measured_costs(monkeypatch, runner).prefill_ms == ((40, 4.5),)


@pytest.mark.parametrize("min_size", [0, 2])
@pytest.mark.parametrize("is_captured", [True, False])
def test_uncompiled_steps_do_not_replay_the_graph(
    monkeypatch: pytest.MonkeyPatch, min_size: int, is_captured: bool
) -> None:
    """The first run of the batch, which fills the buffers, may replay it; the others may not."""
    bucket, runs = Bucket("prefill", 64, min_size), []
    batch = SimpleNamespace(run=lambda: runs.append("replay" if is_captured else "programs"), sequences=[])
    monkeypatch.setattr(timing, "make_timing_batch", lambda *_: batch)
    runner: Any = SimpleNamespace(
        graphs=SimpleNamespace(is_captured=lambda _: is_captured),
        rerun=lambda _: runs.append("replay" if is_captured else "programs"),
        rerun_uncaptured=lambda _: runs.append("programs"),
    )
    timing.measure_step_ms(runner, bucket, captured=False, limits=TimingLimits(1, 2, 2, 1.0))
    assert runs[1:] == ["programs"] * 3
    runs.clear()
    timing.measure_step_ms(runner, bucket, limits=TimingLimits(1, 2, 2, 1.0))
    assert runs[1:] == ["replay" if is_captured else "programs"] * 3
