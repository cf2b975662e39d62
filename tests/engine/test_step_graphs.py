"""Which CUDA graphs are captured, when, and which sizes steps are padded to.

Runs on a CPU: a captured step is a function that runs the programs again, and its capture runs nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tcdeploy.engine.engine import Engine
from tcdeploy.engine.schedule.sequence import Chunk, SamplingParams, Sequence
from tcdeploy.engine.schedule.step_batch import StepBatch, prompt_batch
from tcdeploy.engine.schedule.step_costs import StepCosts
from tcdeploy.engine.step import step_graphs
from tcdeploy.engine.step.batch import GraphKey, PrefillBuffers, StepBuffers, StepOutput
from tcdeploy.engine.step.runner import ModelRunner
from tcdeploy.engine.step.step_graphs import EARLY_SIZES, StepGraphs
from tcdeploy.engine.warm import timing, warmup
from tcdeploy.kernels.attention.ops import HOST_SCALARS
from tcdeploy.planning.plan import Bucket, Plan, make_plan
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.programs.compile_stats import measure_compiles
from tcdeploy.start.prepare import prepare
from tests.conftest import TINY, TINY_BATCH_SIZES, prepare_tiny
from tests.engine.test_canary import recorded_canary
from tests.engine_loop import generate_tokens
from tests.machines import H100, LLAMA_8B, make_recipe

PARAMS = SamplingParams(max_tokens=6)
SHORT = 20  # tokens of a prompt; padded to 32, a size that is not captured during start-up
EARLY = (64, 128, 256, 320)  # early sizes of the engine below


class FakeGraph:
    def __init__(self, step: Callable[[], StepOutput]) -> None:
        self.step = step
        self.replays = 0

    def replay(self) -> StepOutput:
        self.replays += 1
        return self.step()


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeGraph]]:
    """The graphs that are captured, in order. Prefill steps of a dynamic bucket are captured."""
    made: list[FakeGraph] = []

    def capture_graph(step: Callable[[], StepOutput], pool: Any, is_abandonable: bool = False) -> Any:
        made.append(FakeGraph(step))
        return made[-1]

    monkeypatch.setattr(step_graphs, "capture_graph", capture_graph)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: "pool")
    monkeypatch.setattr(Plan, "uses_cuda_graph", lambda plan, bucket, *_: bucket.is_prefill)
    monkeypatch.setattr(StepCosts, "slow_sizes", frozenset())  # times of this machine vary
    yield made


@pytest.fixture
def engine(cache_dir: str, captured: list[FakeGraph]) -> Iterator[Engine]:
    """Its dynamic bucket is captured at the sizes that a start captures."""
    engine = prepare_tiny(cache_dir, shapes="dynamic", buckets=(320,), kv_blocks=100).engine
    [bucket] = engine.plan.prefill_buckets
    engine.allocator.reset_prefix_cache()
    engine.runner.set_variant(bucket, engine.runner.variants[bucket])  # drops graphs of its own start
    captured.clear()
    engine.runner.graphs.capture(bucket)
    engine.runner.graphs.late_captures = 0
    assert engine.clock is not None
    costs = engine.clock.predictor.costs
    engine._timed_sizes.update(EARLY)  # so that the next graph is captured at once
    yield engine
    engine.clock.predictor.costs = costs
    engine._timed_sizes.clear()
    engine.runner.graphs.skip_sizes(frozenset())
    engine.runner.set_variant(bucket, engine.runner.variants[bucket])  # drops the fake graphs
    engine.runner._prefill_buffers.clear()
    engine.runner.graphs._captures_late, engine.runner.graphs._needs_first_run = True, False


def fail_captures(monkeypatch: pytest.MonkeyPatch, error: Exception, times: int = 1000) -> list[Any]:
    """Let the next `times` captures raise `error`. Returns a list that receives the pools of these captures."""
    capture_graph, pools = step_graphs.capture_graph, []

    def fail(step: Any, pool: Any, is_abandonable: bool = False) -> Any:
        if len(pools) == times:
            return capture_graph(step, pool)
        pools.append(pool)
        raise error

    monkeypatch.setattr(step_graphs, "capture_graph", fail)
    return pools


def count_forward_passes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[GraphKey]:
    """Returns a list that receives the key of each forward pass from now on, those of replays included."""
    keys: list[GraphKey] = []
    forward = engine.runner.graphs._forward

    def counted(buffers: StepBuffers, before_program: Callable[[], None]) -> StepOutput:
        keys.append(buffers.key)
        return forward(buffers, before_program)

    monkeypatch.setattr(engine.runner.graphs, "_forward", counted)
    return keys


def make_prompts(count: int, longest: int = 300) -> list[list[int]]:
    source = random.Random(3)
    return [[source.randrange(3, 900) for _ in range(source.randint(1, longest))] for _ in range(count)]


def generate_short(engine: Engine, params: SamplingParams = SamplingParams(max_tokens=1)) -> list[list[int]]:  # noqa: B008
    """Generate from a prompt whose step fits the size 32."""
    engine.allocator.reset_prefix_cache()
    return generate_tokens(engine, [list(range(3, 3 + SHORT))], params)


def key_of(engine: Engine, tokens: int, row_slots: int = 0) -> GraphKey:
    return GraphKey(engine.plan.prefill_buckets[0], tokens, row_slots)


def test_a_start_without_graphs_runs_small_steps_with_and_without_decode_rows(
    cache_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention has other kernels for them, which must not be compiled for the first small step of a request."""
    prepare_tiny(cache_dir, shapes="dynamic", buckets=(320,), kv_blocks=100)
    small_steps, original = [], warmup.make_small_batch

    def make_small_batch(runner: ModelRunner, bucket: Bucket) -> Any:
        batch, run = original(runner, bucket), runner.run

        def noted_run(step: StepBatch) -> StepOutput:
            small_steps.append((step.num_tokens, step.num_decoding))
            return run(step)

        def run_in_two_chunks() -> StepOutput:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(runner, "run", noted_run)
                return batch.run_in_two_chunks()

        return SimpleNamespace(run_in_two_chunks=run_in_two_chunks)

    monkeypatch.setattr(warmup, "make_small_batch", make_small_batch)
    recipe = {"model": TINY, "shapes": "dynamic", "buckets": (320,), "batch_sizes": TINY_BATCH_SIZES, "kv_blocks": 100}
    prepare(build_recipe({**recipe, "cache_dir": cache_dir}, environ={}))
    assert small_steps == [(9, 0), (9, 1)]


def test_a_start_captures_a_few_sizes_with_each_number_of_rows(engine: Engine, captured: list[FakeGraph]) -> None:
    assert tuple(size for size in EARLY_SIZES if size < 320) == EARLY[:-1]
    graphs = engine.runner.graphs
    assert len(captured) == len(graphs) == len(EARLY) * 2, "for 0 and 4 decode rows"
    assert all(key_of(engine, size, row_slots) in graphs for size in EARLY for row_slots in (0, 4))
    assert graphs.late_captures == 0


def test_a_start_captures_no_size_that_warm_up_happens_to_use(cache_dir: str, captured: list[FakeGraph]) -> None:
    """Warm-up fills the KV cache by uncompiled steps of other sizes, some of them twice."""
    engine = prepare_tiny(cache_dir, shapes="dynamic", buckets=(320,), kv_blocks=101).engine
    graphs = engine.runner.graphs
    assert len(captured) == len(graphs) == 2 * len(EARLY)
    assert all(key_of(engine, size, row_slots) in graphs for size in EARLY for row_slots in (0, 4))
    assert not graphs.wanted
    graphs.drop(engine.plan.prefill_buckets[0])


def test_a_capture_runs_nothing(engine: Engine, captured: list[FakeGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    passes = count_forward_passes(engine, monkeypatch)
    [bucket] = engine.plan.prefill_buckets
    engine.runner.graphs.drop(bucket)
    engine.runner.graphs.capture(bucket)
    assert engine.capture_next_graph() and not passes
    assert len(captured) == 4 * len(EARLY) + 1


def test_graphs_that_no_step_can_use_are_left_out() -> None:
    """256 row slots are for more than 128 decode rows, and a step has at least one token of a prompt."""
    plan = make_plan(make_recipe(shapes="dynamic", buckets=(2048,), mixed_steps="on"), H100, LLAMA_8B)
    [bucket] = plan.prefill_buckets
    smallest = {row_slots: size for size, row_slots in reversed(plan.graph_shapes(bucket))}
    assert smallest == {0: 32, 32: 32, 128: 64, 256: 160}


def test_a_start_leaves_them_out_too(captured: list[FakeGraph]) -> None:
    plan = make_plan(make_recipe(shapes="dynamic", buckets=(2048,), mixed_steps="on"), H100, LLAMA_8B)
    [bucket] = plan.prefill_buckets
    graphs = StepGraphs(plan, forward=print, make_buffers=print)  # type: ignore[arg-type]
    graphs.capture(bucket)
    assert len(graphs) == len(captured) == 6 + 6 + 6 + 4
    assert GraphKey(bucket, 256, 256) in graphs and GraphKey(bucket, 64, 128) in graphs
    assert GraphKey(bucket, 128, 256) not in graphs
    graphs.end_warmup()
    assert graphs.sizes(bucket, 0) == graphs.sizes(bucket, 128) == (*EARLY_SIZES, 2048)
    assert graphs.sizes(bucket, 256) == (*EARLY_SIZES[2:], 2048)


def test_a_step_is_padded_to_a_captured_size_until_its_own_is_captured(
    engine: Engine, captured: list[FakeGraph]
) -> None:
    [bucket] = engine.plan.prefill_buckets
    before, graphs = len(captured), engine.runner.graphs
    uncaptured, computed = engine.runner.graphs.uncaptured_runs, engine.runner.computed_tokens[bucket]
    for times in (1, 2, 3):
        generate_short(engine)
        assert graphs.wanted == {key_of(engine, 32): times}
    assert engine.runner.computed_tokens[bucket] - computed == 3 * 64
    assert len(captured) == before, "no step captures"
    engine.capture_wanted_graph()
    assert len(captured) == before + 1 and key_of(engine, 32) in graphs and graphs.late_captures == 1
    generate_short(engine)
    assert engine.runner.computed_tokens[bucket] - computed == 3 * 64 + 32
    assert captured[-1].replays == 1 and not graphs.wanted
    assert engine.runner.graphs.uncaptured_runs == uncaptured


def test_a_mixed_step_has_the_fewest_row_slots_that_hold_its_rows(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[int, int]] = []
    runner, buffers = engine.runner, PrefillBuffers.buffers

    def recorded(prefill: PrefillBuffers, row_slots: int) -> StepBuffers:
        num_decoding = int(prefill._prefill.host_scalars[HOST_SCALARS.index("decoding")])
        steps.append((num_decoding, row_slots))
        return buffers(prefill, row_slots)

    monkeypatch.setattr(PrefillBuffers, "buffers", recorded)
    monkeypatch.setattr(runner, "_row_slots", (0, 2, 4))
    for prompt in make_prompts(4, longest=40):
        engine.submit(prompt, PARAMS)
        engine.step()
    while engine.has_work:
        engine.step()
    assert set(steps) == {(0, 0), (1, 2), (2, 2), (3, 4)}


def test_the_step_sizes_follow_the_captures(engine: Engine) -> None:
    runner = engine.runner
    assert runner.step_sizes(0) == runner.step_sizes(1) == runner.step_sizes(4) == EARLY
    generate_short(engine)
    engine.capture_wanted_graph()
    assert runner.step_sizes(0) == (32, *EARLY)
    assert runner.step_sizes(1) == EARLY, "with decode rows it is another graph"
    runner.graphs.wanted[key_of(engine, 96, 4)] += 1
    engine.capture_wanted_graph()
    assert runner.step_sizes(3) == (64, 96, *EARLY[1:]) and runner.step_sizes(0) == (32, *EARLY)
    while engine.capture_next_graph():
        pass
    assert runner.step_sizes(0) == runner.step_sizes(2) == engine.plan.step_sizes(engine.plan.prefill_buckets[0])
    runner.graphs.drop(engine.plan.prefill_buckets[0])
    assert runner.step_sizes(0)[:3] == (32, 64, 96), "without graphs any size runs"


def test_the_step_sizes_without_graphs(cache_dir: str) -> None:
    static = prepare_tiny(cache_dir).engine.runner
    assert static.step_sizes(0) == static.step_sizes(4) == tuple(b.size for b in static.plan.prefill_buckets)
    dynamic = prepare_tiny(cache_dir, shapes="dynamic", buckets=(40,)).engine.runner
    assert dynamic.step_sizes(0) == dynamic.step_sizes(3) == (16, 32, 40)


def test_an_idle_engine_captures_the_most_wanted_graph_first_and_then_the_rest(
    engine: Engine, captured: list[FakeGraph]
) -> None:
    """The captures compile nothing, and overwrite no cached keys and values."""
    graphs = engine.runner.graphs
    prompts = make_prompts(6)
    expected = generate_tokens(engine, prompts, PARAMS)
    graphs.wanted[key_of(engine, 224, 4)] += 100
    with measure_compiles() as captures:
        assert engine.capture_next_graph()
        assert key_of(engine, 224, 4) in graphs and key_of(engine, 224, 4) not in graphs.wanted
        while engine.capture_next_graph():
            pass
    assert captures.counts.compiles == 0
    [bucket] = engine.plan.prefill_buckets
    assert len(graphs) == len(captured) == 2 * len(engine.plan.step_sizes(bucket))
    assert not graphs.wanted and not engine.wants_graph and not engine.capture_next_graph()
    computed, uncaptured = engine.runner.computed_tokens[bucket], engine.runner.graphs.uncaptured_runs
    assert generate_tokens(engine, prompts, PARAMS) == expected, (
        "from the prefix cache, which no capture has overwritten"
    )
    engine.allocator.reset_prefix_cache()
    assert generate_tokens(engine, prompts, PARAMS) == expected
    assert engine.runner.graphs.uncaptured_runs == uncaptured, "every step has a graph"
    assert engine.runner.computed_tokens[bucket] > computed
    assert not graphs.wanted


def test_a_graph_is_captured_while_requests_run(engine: Engine, captured: list[FakeGraph]) -> None:
    """The sizes of steps depend on measured times, so the same requests may have to come again to use the graph."""
    prompts = make_prompts(8)
    expected = generate_tokens(engine, prompts, PARAMS)
    before, attempts = engine.runner.graphs.late_captures, 0
    while not any(graph.replays for graph in captured[2 * len(EARLY) :]):
        assert (attempts := attempts + 1) <= 5, "no graph is used that was captured meanwhile"
        engine.allocator.reset_prefix_cache()
        ids, tokens = [engine.submit(prompt, PARAMS) for prompt in prompts], []
        while engine.has_work:
            tokens += engine.step()
            if engine.wants_graph:
                engine.capture_wanted_graph()
        answers = [[token.token_id for token in tokens if token.request_id == request_id] for request_id in ids]
        assert answers == expected
    assert engine.runner.graphs.late_captures > before


def test_prompt_logprobs_run_at_a_captured_size_and_are_counted(engine: Engine) -> None:
    before = engine.runner.graphs.uncaptured_runs
    generate_short(engine, SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert engine.runner.graphs.uncaptured_runs == before + 1
    assert engine.runner.graphs.wanted == {key_of(engine, 32): 1}
    assert {tokens for _, tokens in engine.runner._prefill_buffers} <= set(EARLY)


def test_a_canary_step_has_the_same_size_before_and_after_a_capture(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another size may round differently. Canary steps do not count as wanted either."""
    graphs = engine.runner.graphs
    keys: list[GraphKey] = []
    run = graphs.run
    monkeypatch.setattr(graphs, "run", lambda buffers: keys.append(buffers.key) or run(buffers))
    canary = recorded_canary(engine)
    recorded = [*keys]
    assert {key.tokens for key in recorded if key.bucket.is_prefill} <= set(EARLY) and not graphs.wanted
    while engine.capture_next_graph():
        pass
    keys.clear()
    for number in range(len(canary.cases)):
        for _ in canary.check(number):
            pass
    assert set(keys) == set(recorded) and len(keys) == len(recorded) // 2, "each case is recorded twice"


def test_an_idle_engine_times_each_size_that_it_has_captured(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each size once, also those of the start, on KV blocks that no cached prefix uses.

    The timed steps are not counted as served.
    """
    assert engine.clock is not None
    engine._timed_sizes.clear()
    predictor, runner, [bucket] = engine.clock.predictor, engine.runner, engine.plan.prefill_buckets
    generate_tokens(engine, make_prompts(2), PARAMS)
    used = {block for block in range(1, 100) if block in engine.allocator._nodes}
    timed: list[int] = []
    measure = timing._measure_prefill_ms

    def measure_and_check(runner: Any, bucket: Bucket, size: int, *rest: Any) -> float | None:
        timed.append(size)
        assert GraphKey(bucket, size, 0) in runner.graphs
        return measure(runner, bucket, size, *rest)

    written: set[int] = set()
    fill = PrefillBuffers.fill

    def fill_and_record(buffers: PrefillBuffers, batch: StepBatch) -> None:
        written.update(block for chunk in batch.chunks for block in chunk.blocks)
        fill(buffers, batch)

    monkeypatch.setattr(timing, "_measure_prefill_ms", measure_and_check)
    monkeypatch.setattr(PrefillBuffers, "fill", fill_and_record)
    before = [runner.computed_tokens[bucket], engine.allocator.num_allocatable]
    while engine.capture_next_graph():
        pass
    sizes = engine.plan.step_sizes(bucket)
    assert sorted(timed) == [size for size, _ in predictor.costs.prefill_ms] == list(sizes)
    assert before == [runner.computed_tokens[bucket], engine.allocator.num_allocatable]
    assert used and written and not used & written


def test_steps_are_not_padded_to_a_size_that_takes_longer_than_a_larger_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest size of a bucket is always used."""
    graphs, [bucket] = engine.runner.graphs, engine.plan.prefill_buckets
    monkeypatch.setattr(StepCosts, "slow_sizes", frozenset({96, 128, 320}))
    engine._timed_sizes.discard(64)
    assert engine.capture_next_graph() and 128 not in engine.runner.step_sizes(0)
    generate_short(engine)
    graphs.wanted.clear()
    engine.allocator.reset_prefix_cache()
    generate_tokens(engine, [list(range(3, 83))], SamplingParams(max_tokens=1))
    assert list(graphs.wanted) == [key_of(engine, 160)], "96 tokens are not wanted"
    while engine.capture_next_graph():
        pass
    sizes = tuple(size for size in engine.plan.step_sizes(bucket) if size not in (96, 128))
    assert key_of(engine, 96) in graphs and key_of(engine, 96, 4) not in graphs, "it was captured to be timed"
    assert engine.runner.step_sizes(0) == engine.runner.step_sizes(4) == sizes
    before = engine.runner.computed_tokens[bucket]
    engine.allocator.reset_prefix_cache()
    generate_tokens(engine, [list(range(3, 83))], SamplingParams(max_tokens=1))
    assert engine.runner.computed_tokens[bucket] - before == 160 and not graphs.wanted
    graphs.wanted[key_of(engine, 96, 4)] += 1
    graphs.skip_sizes(frozenset({96}))
    assert not graphs.wanted and 128 in engine.runner.step_sizes(0)
    graphs.skip_sizes(frozenset())
    assert engine.runner.step_sizes(0) == engine.plan.step_sizes(bucket)


def test_padded_sizes_change_no_token(engine: Engine, cache_dir: str) -> None:
    prompts = make_prompts(12)
    static = prepare_tiny(cache_dir).engine
    with measure_compiles() as serving:
        assert generate_tokens(engine, prompts, PARAMS) == generate_tokens(static, prompts, PARAMS)
    assert serving.counts.compiles == 0
    [bucket] = engine.plan.prefill_buckets
    assert engine.runner.padding_tokens[bucket] > 0


def test_without_memory_for_another_graph_steps_stay_padded(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail_captures(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))
    before, expected = len(engine.runner.graphs), generate_short(engine, PARAMS)
    assert engine.wants_graph
    engine.capture_wanted_graph()
    assert not engine.wants_graph and not engine.capture_next_graph()
    assert generate_short(engine, PARAMS) == expected
    assert not engine.runner.graphs.wanted and not engine.wants_graph
    assert len(engine.runner.graphs) == before and engine.runner.graphs.late_captures == 0
    assert caplog.text.count("no memory for another CUDA graph") == 1


def test_after_a_failure_under_load_graphs_are_captured_when_idle_after_a_first_run(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    passes, before = count_forward_passes(engine, monkeypatch), len(engine.runner.graphs)
    expected = generate_short(engine, PARAMS)
    passes.clear()
    fail_captures(monkeypatch, RuntimeError("operation not permitted when stream is capturing"), times=1)
    engine.capture_wanted_graph()
    graphs = engine.runner.graphs
    assert not passes and key_of(engine, 32) not in graphs
    assert graphs.wanted and not engine.wants_graph, "it is still wanted"
    assert engine.capture_next_graph()
    assert passes == [key_of(engine, 32)] and key_of(engine, 32) in graphs
    passes.clear()
    while len(graphs) == before + 1:
        assert engine.capture_next_graph()
    [other] = {key for key in passes if key.tokens != 32}  # 32 is timed before the next capture
    assert other in graphs and passes.count(other) == 1, "the others run first too"
    assert generate_short(engine, PARAMS) == expected
    assert caplog.text.count("could not be captured") == 1 and "not permitted" in caplog.text


def test_a_failed_capture_of_an_idle_engine_is_repeated_after_a_first_run(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    passes, before = count_forward_passes(engine, monkeypatch), len(engine.runner.graphs)
    fail_captures(monkeypatch, RuntimeError("invalid"), times=1)
    assert engine.capture_next_graph()
    assert len(passes) == 1 and passes[0] in engine.runner.graphs
    assert len(engine.runner.graphs) == before + 1 == before + engine.runner.graphs.late_captures
    assert caplog.text.count("could not be captured") == 1


@pytest.mark.parametrize("error", [RuntimeError("invalid"), TypeError("of a Triton kernel")])
def test_a_capture_that_fails_twice_ends_late_captures(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    before, expected = len(engine.runner.graphs), generate_short(engine, PARAMS)
    fail_captures(monkeypatch, error)
    assert not engine.capture_next_graph() and not engine.capture_next_graph()
    assert generate_short(engine, PARAMS) == expected
    assert not engine.wants_graph and len(engine.runner.graphs) == before
    assert caplog.text.count("no further CUDA graph is captured") == 1


def test_a_capture_that_would_compile_does_not_end_the_server(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_something(step: Any, pool: Any, is_abandonable: bool) -> Any:
        return torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))

    monkeypatch.setattr(step_graphs, "capture_graph", compile_something)
    generate_short(engine)
    engine.capture_wanted_graph()
    assert not engine.wants_graph and not engine.capture_next_graph()
    assert "fail_on_recompile" in caplog.text


def test_at_a_start_a_failed_capture_is_repeated_after_a_first_run(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graphs, [bucket] = engine.runner.graphs, engine.plan.prefill_buckets
    graphs.drop(bucket)
    passes = count_forward_passes(engine, monkeypatch)
    fail_captures(monkeypatch, RuntimeError("kernel loading"), times=1)
    graphs.capture(bucket)
    assert len(graphs) == 2 * len(EARLY) == len(passes), "all others run first too"
    assert caplog.text.count("a capture failed, so steps now run once") == 1
    assert not graphs._needs_first_run, "another variant may be selected"


def test_at_a_start_a_second_failure_is_raised(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, [bucket] = engine.runner.graphs, engine.plan.prefill_buckets
    graphs.drop(bucket)
    failed = fail_captures(monkeypatch, RuntimeError("kernel loading"), times=2)
    with pytest.raises(RuntimeError, match="kernel loading"):
        graphs.capture(bucket)
    assert len(failed) == 2


def test_at_a_start_too_little_memory_is_raised_at_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, [bucket] = engine.runner.graphs, engine.plan.prefill_buckets
    graphs.drop(bucket)
    failed = fail_captures(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        graphs.capture(bucket)
    assert len(failed) == 1


def test_a_failed_capture_leaves_its_pool(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = iter(range(10))
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: next(pools))
    monkeypatch.setattr(engine.runner.graphs, "_pools", [])
    used: list[Any] = []
    capture_graph = step_graphs.capture_graph

    def capture(step: Any, pool: Any, is_abandonable: bool) -> Any:
        used.append(pool)
        if len(used) == 2:
            raise RuntimeError("invalid")
        return capture_graph(step, pool)

    monkeypatch.setattr(step_graphs, "capture_graph", capture)
    while len(used) < 4:  # other calls time a size
        assert engine.capture_next_graph()
    assert used == [0, 0, 1, 1]


def test_the_graphs_of_another_variant_are_dropped(engine: Engine) -> None:
    [bucket] = engine.plan.prefill_buckets
    generate_short(engine)
    assert engine.runner.graphs.is_captured(bucket) and engine.runner.graphs.wanted
    engine.runner.set_variant(bucket, engine.runner.variants[bucket])
    assert not engine.runner.graphs.is_captured(bucket) and len(engine.runner.graphs) == 0
    assert not engine.runner.graphs.wanted and not engine.capture_next_graph()
    assert not engine.runner.graphs.is_captured(Bucket("decode", 1))


def test_a_bucket_without_graphs_runs_and_wants_none(engine: Engine) -> None:
    """A variant with an attention backend that cannot be captured."""
    [bucket] = engine.plan.prefill_buckets
    expected = generate_short(engine, PARAMS)
    engine.runner.set_variant(bucket, engine.runner.variants[bucket])
    computed = engine.runner.computed_tokens[bucket]
    assert generate_short(engine, PARAMS) == expected
    assert engine.runner.computed_tokens[bucket] - computed == 32, "padded to its own size"
    assert not engine.runner.graphs.wanted


def test_a_step_that_does_not_replay_its_graph_is_counted(engine: Engine) -> None:
    runner, [bucket] = engine.runner, engine.plan.prefill_buckets
    sequence = Sequence(0, [5] * SHORT, SHORT, PARAMS)
    sequence.blocks = engine.allocator.allocate(2)
    before = runner.graphs.uncaptured_runs
    runner.run(prompt_batch([Chunk(sequence, 0, SHORT)]))
    assert runner.graphs.uncaptured_runs == before
    runner.graphs.run(runner._buffers_of(GraphKey(bucket, 32, 0)))
    assert runner.graphs.uncaptured_runs == before + 1
    engine.allocator.release(sequence.blocks)


def test_the_canary_runs_its_steps_at_sizes_that_do_not_change_while_graphs_are_captured(engine: Engine) -> None:
    [bucket] = engine.plan.prefill_buckets
    ran: list[GraphKey] = []
    run = engine.runner.graphs.run
    engine.runner.graphs.run = lambda buffers: ran.append(buffers.key) or run(buffers)  # type: ignore[method-assign, func-returns-value]

    def sizes_of_prefill_steps() -> list[int]:
        ran.clear()
        for number in range(len(canary.cases)):
            for _ in canary.check(number):
                pass
        return [key.tokens for key in ran if key.bucket == bucket and key.row_slots == 0]

    canary = recorded_canary(engine)
    sizes = sizes_of_prefill_steps()
    assert sizes[:4] == [128, 320, 64, 64], "the prompt, at the largest size, and in two chunks"
    while engine.capture_next_graph():
        pass
    assert engine.runner.step_sizes(0) == engine.plan.step_sizes(bucket)
    assert sizes_of_prefill_steps() == sizes
