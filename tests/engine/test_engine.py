"""Refused requests, released blocks and rows, repeatable seeds, and incremental detokenization."""

from __future__ import annotations

import dataclasses
import gc
import time
import weakref
from collections import Counter
from typing import Any

import pytest
import torch

from tcdeploy.engine import engine as engine_module
from tcdeploy.engine.check.inputs import timed_context
from tcdeploy.engine.engine import Engine
from tcdeploy.engine.schedule.sequence import SamplingParams, SchedulerOutput, Sequence
from tcdeploy.engine.schedule.step_batch import StepBatchBuilder
from tcdeploy.engine.schedule.step_costs import StepCosts
from tcdeploy.engine.step import rows, sampling
from tcdeploy.engine.step.batch import StepOutput
from tcdeploy.engine.step.in_flight import InFlightStep
from tcdeploy.engine.step.rows import RowAssignment
from tcdeploy.engine.step.runner import ModelRunner
from tcdeploy.engine.step.sampling import to_device
from tcdeploy.errors import RecompileError, UsageError
from tcdeploy.host.gc_policy import freeze_gc_after_startup
from tcdeploy.planning.plan import Bucket
from tcdeploy.start.deployment import release_memory
from tcdeploy.text.detokenizer import IncrementalDetokenizer
from tests.conftest import prepare_tiny, reset_programs
from tests.engine_loop import generate_tokens


def test_a_request_beyond_the_context_is_refused(tiny_deployment: Any) -> None:
    context = tiny_deployment.plan.context
    with pytest.raises(UsageError, match=f"exceed the context of {context}"):
        generate_tokens(tiny_deployment.engine, [[5] * (context - 3)], SamplingParams(max_tokens=4))
    answer = generate_tokens(tiny_deployment.engine, [[5] * (context - 4)], SamplingParams(max_tokens=4))[0]
    assert len(answer) == 4, "a request of exactly the context is served"


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(tiny_deployment: Any) -> None:
    params = SamplingParams(max_tokens=25, temperature=0.9, top_k=50, top_p=0.95, seed=11)
    engine = tiny_deployment.engine
    alone = generate_tokens(engine, [[40, 41, 42]], params)[0]
    assert generate_tokens(engine, [[40, 41, 42]], params)[0] == alone
    assert generate_tokens(engine, [[9] * 130, [40, 41, 42], [3]], params)[1] == alone
    other = SamplingParams(max_tokens=25, temperature=0.9, top_k=50, top_p=0.95, seed=12)
    assert generate_tokens(engine, [[40, 41, 42]], other)[0] != alone


def test_unused_rows_of_a_bucket_are_not_sampled(tiny_deployment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    num_outputs: list[int] = []
    sample = ModelRunner._sample

    def counting_sample(self: ModelRunner, output: StepOutput, *args: Any) -> torch.Tensor:
        num_outputs.append(len(output.logits))
        return sample(self, output, *args)

    monkeypatch.setattr(ModelRunner, "_sample", counting_sample)
    params = SamplingParams(max_tokens=3, temperature=1, logprobs=2)
    generate_tokens(tiny_deployment.engine, [[40, 41], [42, 43], [44, 45]], params)
    assert num_outputs == [3, 3, 3], "a prefill step has 8 outputs, and decode:4 has 4"


def test_a_stop_token_ends_a_sequence_and_is_its_last(tiny_deployment: Any) -> None:
    engine = tiny_deployment.engine
    unstopped = generate_tokens(engine, [[40, 41, 42]], SamplingParams(max_tokens=20))[0]
    stop = unstopped[6]
    stopped = generate_tokens(engine, [[40, 41, 42]], SamplingParams(max_tokens=20, stop_token_ids=(stop,)))[0]
    assert stopped == unstopped[: unstopped.index(stop) + 1]


def test_rows_of_earlier_steps_do_not_affect_later_ones(tiny_deployment: Any) -> None:
    """Four long rows, then two, then three in the same decode:4 buffers give the tokens of each prompt alone."""
    engine, params = tiny_deployment.engine, SamplingParams(max_tokens=6)
    for lengths in ((400, 390, 380, 370), (17, 5), (33, 16, 1)):
        prompts = [[3 + (position * 7 + row) % 900 for position in range(length)] for row, length in enumerate(lengths)]
        together = generate_tokens(engine, prompts, params)
        assert together == [generate_tokens(engine, [prompt], params)[0] for prompt in prompts]


def test_an_appended_sequence_moves_no_row(tiny_deployment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are emptied when the engine becomes idle, not when the next prompt arrives."""
    engine, moves = tiny_deployment.engine, []
    move = RowAssignment._gather_rows
    monkeypatch.setattr(RowAssignment, "_gather_rows", lambda *args: moves.append(args) or move(*args))
    for _ in range(2):
        engine.submit([5, 6, 7], SamplingParams(max_tokens=8))
        engine.step()
        assert not moves, "the only sequence"
        engine.submit([8, 9], SamplingParams(max_tokens=3))
        engine.step()
        assert not moves, "appended behind a running sequence"
        while engine.has_work:
            engine.step()
        assert len(moves) == 2, "after one finished, and after all had"
        moves.clear()


def test_the_parameters_of_all_new_sequences_are_uploaded_together(
    tiny_deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 prompts that arrive together delayed their first tokens by some 100 ms when each row was written alone."""
    runner, uploads = tiny_deployment.engine.runner, []
    monkeypatch.setattr(sampling, "to_device", lambda *args: uploads.append(args) or to_device(*args))
    values = [(0.5, 20, 0.25, 7), (0.0, 0, 1.0, 8), (1.5, 3, 0.75, -9), (0.7, 0, 1.0, 2**63 - 1)]
    sequences = [
        Sequence(number, [5, 6], 2, SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed))
        for number, (temperature, top_k, top_p, seed) in enumerate(values)
    ]
    batches = StepBatchBuilder()
    runner.row_assignment.apply(batches.build(SchedulerOutput(), sequences[:1]))
    alone = len(uploads)
    runner.row_assignment.apply(batches.build(SchedulerOutput(), sequences))
    assert (alone, len(uploads)) == (2, 4)
    state = runner.decode_rows.sampling
    written = zip(*(column[:4].tolist() for column in (state.temperature, state.top_k, state.top_p)), strict=True)
    assert [(round(t, 3), k, p) for t, k, p in written] == [value[:3] for value in values]
    assert state.seeds[[0, 2, 3]].tolist() == [7, -9, 2**63 - 1]
    runner.row_assignment.apply(batches.build(SchedulerOutput(), [sequences[3], sequences[0]]))
    assert state.seeds[:4].tolist() == [2**63 - 1, 7, 0, 0] and state.top_k[:4].tolist() == [0, 20, 0, 0]
    runner.row_assignment.clear()


def test_rows_are_empty_after_a_failed_assignment(tiny_deployment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_deployment.engine
    state = engine.runner.decode_rows
    monkeypatch.setattr(rows, "set_penalty_history", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
    penalising = SamplingParams(max_tokens=4, temperature=0.9, repetition_penalty=1.5)
    request = engine.submit([5, 6, 7], penalising)
    with pytest.raises(MemoryError):
        engine.step()
    engine.abort(request)
    assert not state.sampling.temperature.any() and (state.sampling.repetition == 1).all()


def test_after_a_failed_launch_the_request_gets_its_tokens(
    tiny_deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, params = tiny_deployment.engine, SamplingParams(max_tokens=5)
    expected = generate_tokens(engine, [[5, 6, 7]], params)[0]
    request = engine.submit([5, 6, 7], params)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="launch failed"):
        patch.setattr(engine.runner, "run", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("launch failed")))
        engine.step()
    tokens = []
    while engine.has_work:
        tokens += engine.step()
    assert [(token.request_id, token.token_id) for token in tokens] == [(request, token) for token in expected]


def test_prepare_leaves_the_garbage_collector_alone(cache_dir: str) -> None:
    before = gc.get_freeze_count(), gc.get_threshold(), gc.isenabled()
    prepare_tiny(cache_dir)
    assert (gc.get_freeze_count(), gc.get_threshold(), gc.isenabled()) == before


def test_a_frozen_deployment_is_not_collected_until_its_memory_is_released(cache_dir: str) -> None:
    reset_programs()
    deployment = prepare_tiny(cache_dir)
    freeze_gc_after_startup()
    assert gc.get_freeze_count() > 100_000, "objects of the compiler"
    assert not any(tracked is deployment.engine.runner for tracked in gc.get_objects())
    deployment.engine.runner.itself = deployment.engine.runner  # a cycle, which only the garbage collector frees
    runner = weakref.ref(deployment.engine.runner)
    del deployment
    gc.collect()
    assert runner() is not None, "frozen objects are not collected"
    reset_programs()
    release_memory()
    assert runner() is None


def test_an_incomplete_character_at_the_end_is_replaced(tiny_deployment: Any) -> None:
    tokenizer = tiny_deployment.tokenizer
    ids = tokenizer("na\u00efve \u65e5", add_special_tokens=False).input_ids[:-1]
    stream = IncrementalDetokenizer(tokenizer)
    pieces = [stream.push(token_id) for token_id in ids]
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)
    assert tokenizer.decode(ids).endswith("\ufffd"), "the test needs an incomplete last character"


def test_a_step_that_would_compile_raises_without_a_server(tiny_deployment: Any) -> None:
    """The engine forbids recompiles for library callers too: here, on a bucket that was not warmed."""
    engine = tiny_deployment.engine
    unwarmed = dataclasses.replace(tiny_deployment.plan, buckets=(Bucket("prefill", 57), Bucket("decode", 4)))
    warm = engine.runner
    runner = ModelRunner(warm.model, unwarmed, warm.step_holder, warm.split_counters, engine.vocab_size)
    with pytest.raises(RecompileError, match="after warm-up"):
        generate_tokens(Engine(runner), [[40, 41, 42]], SamplingParams(max_tokens=2))
    assert len(generate_tokens(engine, [[40, 41, 42]], SamplingParams(max_tokens=2))[0]) == 2


@pytest.mark.parametrize(
    "text", ["plain words, 123.", "naïve café", "日本語のテキスト", "👩‍👩‍👧‍👦 family 🏳️‍🌈", "e\u0301 combining"]
)  # noqa: RUF001
def test_streamed_text_is_the_decoded_text(tiny_deployment: Any, text: str) -> None:
    tokenizer = tiny_deployment.tokenizer
    ids = tokenizer(text, add_special_tokens=False).input_ids
    stream = IncrementalDetokenizer(tokenizer)
    assert "".join(stream.push(token_id) for token_id in ids) + stream.finish() == tokenizer.decode(
        ids, skip_special_tokens=True
    )


# Step times


def test_the_steps_of_every_bucket_are_timed_at_the_start(tiny_deployment: Any) -> None:
    engine, plan = tiny_deployment.engine, tiny_deployment.plan
    costs = engine.clock.predictor.costs
    assert [size for size, _ in costs.prefill_ms] == [bucket.size for bucket in plan.prefill_buckets]
    assert [rows for rows, _ in costs.decode_ms_by_rows] == [bucket.size for bucket in plan.decode_buckets]
    assert costs.timed_context == timed_context(plan, plan.decode_buckets[-1])
    assert engine.runner.row_assignment.is_empty


def test_the_scheduler_uses_the_timed_steps_and_the_sizes_that_are_captured_now(tiny_deployment: Any) -> None:
    engine = tiny_deployment.engine
    assert engine.scheduler.predictor is engine.clock.predictor
    assert engine.clock.predictor.step_sizes == engine.runner.step_sizes
    assert engine.scheduler.config.itl_target_ms is None, "the default follows the number of rows"


def test_an_itl_target_replaces_the_default(cache_dir: str) -> None:
    assert prepare_tiny(cache_dir, itl_target=25.0).engine.scheduler.config.itl_target_ms == 25.0


def test_steps_on_a_cpu_are_measured_without_those_that_compute_prompt_logprobs(tiny_deployment: Any) -> None:
    engine = tiny_deployment.engine

    def measured_by(prompts: list[list[int]], params: SamplingParams) -> dict[str, int]:
        engine.allocator.reset_prefix_cache()
        before = dict(engine.clock.totals)
        generate_tokens(engine, prompts, params)
        return {kind: totals.steps - before[kind].steps for kind, totals in engine.clock.totals.items()}

    assert measured_by([[5] * 20], SamplingParams(max_tokens=6)) == {"prefill": 1, "decode": 5, "mixed": 0}
    with_logprobs = SamplingParams(max_tokens=6, prompt_logprobs=1)
    assert measured_by([[5] * 20], with_logprobs) == {"prefill": 0, "decode": 5, "mixed": 0}
    assert measured_by([[5, 6]] * 5, SamplingParams(max_tokens=6))["mixed"] == 0
    assert all(0.5 <= correction <= 2 for correction in engine.clock.predictor.corrections.values())


class FakeEvent:
    """An event of the device that is complete, or completes when it is waited for."""

    def __init__(self, is_complete: bool) -> None:
        self.is_complete, self.num_waits = is_complete, 0

    def query(self) -> bool:
        return self.is_complete

    def synchronize(self) -> None:
        self.num_waits += 1


def test_on_a_device_each_step_is_waited_for_once_and_measured_if_the_host_was_not_late(tiny_deployment: Any) -> None:
    engine = Engine(tiny_deployment.engine.runner, tiny_deployment.engine.clock.predictor.costs)
    assert engine.clock is not None
    for is_complete, total in ((False, 0), (False, 1), (True, 1), (False, 1), (False, 2)):
        event: Any = FakeEvent(is_complete)
        step = InFlightStep((), torch.zeros(0), None, event, estimate=engine.clock.predictor.estimate(1, 1))
        engine._in_flight = step  # the next one, which is launched
        engine._wait_for(step)
        assert (event.num_waits, engine.clock.totals["decode"].steps) == (1, total)


def test_an_engine_without_costs_measures_nothing(tiny_deployment: Any) -> None:
    engine = Engine(tiny_deployment.engine.runner)
    assert generate_tokens(engine, [[5, 6]], SamplingParams(max_tokens=3)) == generate_tokens(
        tiny_deployment.engine, [[5, 6]], SamplingParams(max_tokens=3)
    )
    assert engine.clock is None and engine.scheduler.predictor is None and engine.launch_due is None


@pytest.mark.parametrize("graphs", ["step", "none"])
def test_the_launch_lock_is_held_while_a_captured_step_is_launched_and_not_while_its_tokens_are_read(
    tiny_deployment: Any, monkeypatch: pytest.MonkeyPatch, graphs: Any
) -> None:
    runner = tiny_deployment.engine.runner
    monkeypatch.setattr(runner, "plan", dataclasses.replace(runner.plan, graphs=graphs))
    engine, locked = Engine(runner), Counter[tuple[str, bool]]()

    def record(name: str, owner: Any, method: str) -> None:
        call = getattr(owner, method)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            locked[name, engine.launch_lock._lock.locked()] += 1
            return call(*args, **kwargs)

        monkeypatch.setattr(owner, method, recorded)

    record("launch", engine.scheduler, "schedule")
    record("launch", runner, "run")
    record("launch", engine, "_sample_and_copy")
    record("read", engine, "_collect")
    engine.submit([5, 6, 7], SamplingParams(max_tokens=3))
    while engine.has_work:
        engine.step()
    assert set(locked) == {("launch", graphs == "step"), ("read", False)}
    monkeypatch.setattr(engine.scheduler, "schedule", lambda: 1 / 0)
    engine.submit([5, 6, 7], SamplingParams(max_tokens=3))
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert not engine.launch_lock._lock.locked()


# When launches are due


class StepEvent:
    """A CUDA event of a step that completes when the host waits for it, or when a test says so."""

    def __init__(self) -> None:
        self.is_complete = False

    def query(self) -> bool:
        return self.is_complete

    def synchronize(self) -> None:
        self.is_complete = True


@pytest.fixture
def timed_engine(tiny_deployment: Any, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Prefill steps are predicted to take 50 s, and decode steps 40 s."""
    monkeypatch.setattr(engine_module, "record_event", lambda tensor: StepEvent())
    return Engine(tiny_deployment.engine.runner, StepCosts(((128, 50e3),), ((4, 40e3),)))


def seconds_until_due(engine: Engine) -> float:
    assert engine.launch_due is not None
    return engine.launch_due - time.perf_counter()


def test_a_launch_is_due_before_the_predicted_end_of_the_step_in_flight(timed_engine: Engine) -> None:
    assert timed_engine.launch_due is None
    timed_engine.submit([5, 6, 7], SamplingParams(max_tokens=4))
    timed_engine.step()
    assert 30 < seconds_until_due(timed_engine) < 40, "the first step has a large margin"
    timed_engine.step()
    assert 35 < seconds_until_due(timed_engine) < 39, "the device started the second step when it completed the first"
    while timed_engine.has_work:
        timed_engine.step()
    assert timed_engine.launch_due is None and timed_engine.launch_timer.late_launches == 0


def test_a_launch_is_due_earlier_once_a_prompt_is_pending(timed_engine: Engine) -> None:
    """A launch with chunks of prompts takes longer."""
    timed_engine.submit([5, 6, 7], SamplingParams(max_tokens=4))
    timed_engine.step()
    timed_engine.launch_timer.launch_ms = {False: 1e3, True: 7e3}
    due = timed_engine.launch_due
    timed_engine.submit([5, 6, 7], SamplingParams(max_tokens=4))
    assert due is not None and timed_engine.launch_due == pytest.approx(due - 6)
    timed_engine.step()
    assert timed_engine.launch_due is not None and not timed_engine.scheduler.has_prompts
    while timed_engine.has_work:
        timed_engine.step()


def test_after_a_late_launch_the_next_steps_are_launched_at_once(timed_engine: Engine) -> None:
    timed_engine.submit([5, 6, 7], SamplingParams(max_tokens=20))
    timed_engine.step()
    assert timed_engine._in_flight is not None
    timed_engine._in_flight.copy_done.is_complete = True  # type: ignore[union-attr]
    dues = []
    for _ in range(7):
        timed_engine.step()
        dues.append(timed_engine.launch_due is not None)
    assert timed_engine.launch_timer.late_launches == 1
    assert dues == [False] * 4 + [True] * 3
    while timed_engine.has_work:
        timed_engine.step()


def test_steps_that_are_not_predicted_or_that_fail_make_no_launch_due(
    timed_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed_engine.submit([5, 6, 7], SamplingParams(max_tokens=4, prompt_logprobs=1))
    timed_engine.step()
    assert timed_engine.launch_due is None, "a step with log-probabilities of prompts is not predicted"
    timed_engine.step()
    timed_engine.step()
    assert timed_engine.launch_due is not None
    with monkeypatch.context() as patch:
        patch.setattr(timed_engine.runner, "run", lambda batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            timed_engine.step()
    assert timed_engine.launch_due is None
    while timed_engine.has_work:
        timed_engine.step()
