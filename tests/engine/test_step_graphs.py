"""Which CUDA graphs are captured, and when. On a CPU: a captured step is a function that runs the programs again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tcdeploy.compiler.compile_stats import measure_compiles
from tcdeploy.engine import step_graphs
from tcdeploy.engine.engine import Engine
from tcdeploy.engine.graphs import StepKey, StepOutput
from tcdeploy.engine.sequence import SamplingParams
from tcdeploy.engine.step_graphs import EARLY_SIZES
from tcdeploy.planning.plan import Bucket, Plan
from tests.conftest import prepare_tiny

PARAMS = SamplingParams(max_new_tokens=6)


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

    def capture_graph(step: Callable[[], StepOutput], pool: Any) -> Any:
        made.append(FakeGraph(step))
        return made[-1]

    monkeypatch.setattr(step_graphs, "capture_graph", capture_graph)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: "pool")
    monkeypatch.setattr(Plan, "uses_cuda_graph", lambda plan, bucket, *_: bucket.is_prefill)
    yield made


@pytest.fixture
def engine(cache_dir: str, captured: list[FakeGraph]) -> Iterator[Engine]:
    """Its dynamic bucket is captured at the sizes that a start captures."""
    engine = prepare_tiny(cache_dir, shapes="dynamic", buckets=(320,), kv_blocks=100).engine
    [bucket] = engine.plan.prefill_buckets
    engine.allocator.reset_prefix_cache()
    engine.runner.set_variant(bucket, engine.runner._variants[bucket])  # drops graphs of its own start
    captured.clear()
    engine.runner.graphs.capture(bucket)
    engine.runner.graphs.late_captures = 0
    yield engine
    engine.runner.set_variant(bucket, engine.runner._variants[bucket])  # drops the fake graphs
    engine.runner._prefill_buffers.clear()
    engine.runner.graphs._out_of_memory = False


def make_prompts(count: int, longest: int = 300) -> list[list[int]]:
    source = random.Random(3)
    return [[source.randrange(3, 900) for _ in range(source.randint(1, longest))] for _ in range(count)]


def test_a_start_captures_a_few_sizes_with_each_number_of_rows(engine: Engine, captured: list[FakeGraph]) -> None:
    sizes = [*(size for size in EARLY_SIZES if size < 320), 320]
    assert len(captured) == len(engine.runner.graphs) == len(sizes) * 3, "for 0, 1 and 4 decode rows"
    [bucket] = engine.plan.prefill_buckets
    assert all(StepKey(bucket, size, rows) in engine.runner.graphs for size in sizes for rows in (0, 1, 4))
    assert engine.runner.graphs.late_captures == 0


def test_a_start_captures_no_size_that_warm_up_happens_to_use(cache_dir: str, captured: list[FakeGraph]) -> None:
    """Warm-up fills the KV cache by uncompiled steps of other sizes, some of them twice."""
    engine = prepare_tiny(cache_dir, shapes="dynamic", buckets=(320,), kv_blocks=101).engine
    [bucket] = engine.plan.prefill_buckets
    sizes = [*(size for size in EARLY_SIZES if size < 320), 320]
    graphs = engine.runner.graphs
    assert len(captured) == len(graphs) == 3 * len(sizes)
    assert all(StepKey(bucket, size, rows) in graphs for size in sizes for rows in (0, 1, 4))
    graphs.drop(bucket)


def test_a_new_size_runs_without_a_graph_once_and_is_then_captured(engine: Engine, captured: list[FakeGraph]) -> None:
    before, prompt = len(captured), make_prompts(1)[0][:20]
    uncaptured_before = engine.runner.uncaptured_runs
    for late, uncaptured in ((0, 1), (1, 1), (1, 1)):
        engine.allocator.reset_prefix_cache()
        engine.generate([prompt], SamplingParams(max_new_tokens=1))
        assert len(captured) - before == late
        assert engine.runner.uncaptured_runs - uncaptured_before == uncaptured
    assert captured[-1].replays == 2
    assert engine.runner.graphs.late_captures == 1


def test_an_idle_engine_captures_the_rest_without_compiling_or_touching_a_key(
    engine: Engine, captured: list[FakeGraph]
) -> None:
    prompts = make_prompts(6)
    expected = engine.generate(prompts, PARAMS)
    [bucket] = engine.plan.prefill_buckets
    with measure_compiles() as captures:
        while engine.capture_next_graph():
            pass
    assert captures.counts.compiles == 0
    assert len(engine.runner.graphs) == 3 * len(engine.plan.step_sizes(bucket))
    assert not engine.capture_next_graph()
    computed, uncaptured = engine.runner.computed_tokens[bucket], engine.runner.uncaptured_runs
    assert engine.generate(prompts, PARAMS) == expected, "from the prefix cache, which no capture has overwritten"
    engine.allocator.reset_prefix_cache()
    assert engine.generate(prompts, PARAMS) == expected
    assert engine.runner.uncaptured_runs == uncaptured, "every step has a graph"
    assert engine.runner.computed_tokens[bucket] > computed


def test_padded_sizes_change_no_token(engine: Engine, cache_dir: str) -> None:
    prompts = make_prompts(12)
    static = prepare_tiny(cache_dir).engine
    with measure_compiles() as serving:
        assert engine.generate(prompts, PARAMS) == static.generate(prompts, PARAMS)
    assert serving.counts.compiles == 0
    [bucket] = engine.plan.prefill_buckets
    padding, computed = engine.runner.padding_tokens[bucket], engine.runner.computed_tokens[bucket]
    assert 0 < padding < 0.15 * computed


def test_without_memory_for_another_graph_steps_run_without_one(
    engine: Engine, captured: list[FakeGraph], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(step: Any, pool: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(step_graphs, "capture_graph", fail)
    before, prompt = len(engine.runner.graphs), make_prompts(1)[0][:20]
    expected = None
    for _ in range(3):
        engine.allocator.reset_prefix_cache()
        tokens = engine.generate([prompt], PARAMS)
        expected = expected or tokens
        assert tokens == expected
    assert not engine.capture_next_graph()
    assert len(engine.runner.graphs) == before
    assert caplog.text.count("no memory for another CUDA graph") == 1


def test_the_graphs_of_another_variant_are_dropped(engine: Engine) -> None:
    [bucket] = engine.plan.prefill_buckets
    assert engine.runner.graphs.is_captured(bucket)
    engine.runner.set_variant(bucket, engine.runner._variants[bucket])
    assert not engine.runner.graphs.is_captured(bucket) and len(engine.runner.graphs) == 0
    assert not engine.runner.graphs.is_captured(Bucket("decode", 1))
