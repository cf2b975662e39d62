"""Layers that keep state in slots, from the probe to tokens: the model of tests/running_sum.py.

Requests get the tokens of transformers' `generate`, whatever else is in the batch, and whatever runs between steps.
Inductor compiles the programs of one plan, and those of random traffic. The programs of the other plans are traced by
Dynamo, and their graphs run without a compiler; scripts/test --long compiles them too.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tcdeploy.bench import decode
from tcdeploy.bench.engine_driver import Prompts, decode_step, placed_sequences, prompt_logits
from tcdeploy.bench.floor import Rates, kv_read_bytes
from tcdeploy.bench.session import Session
from tcdeploy.bench.settings import DecodeSettings
from tcdeploy.engine.check.inputs import make_timing_batch
from tcdeploy.engine.engine import Engine
from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.engine.schedule.slots import SCRATCH_SLOT, SlotAllocator
from tcdeploy.engine.step import runner as runner_module
from tcdeploy.engine.step.step_graphs import GraphKey
from tcdeploy.errors import SpaceError, UnsupportedModelError
from tcdeploy.host.progress import NullProgress
from tcdeploy.kernels.state.mechanism import Mechanism
from tcdeploy.kernels.state.mechanisms import MECHANISMS
from tcdeploy.models.probe import probe_model
from tcdeploy.planning.architecture import Architecture, AttentionSpec, NoState, SlotState, StateTensor
from tcdeploy.planning.plan import make_plan
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.programs.compile_stats import measure_compiles
from tcdeploy.start.deployment import Deployment
from tcdeploy.start.prepare import prepare
from tests.conftest import prepare_tiny, reset_programs
from tests.coverage.campaign import traced_only
from tests.engine.test_canary import recorded_canary, run_round
from tests.engine.test_continuous_batching import SCARCE_BLOCKS, check_random_traffic
from tests.engine_loop import generate_despite_failures, generate_tokens, new_tokens
from tests.hybrid_models import load_reference
from tests.machines import H100, LLAMA_8B, changed_environment, decisions_named, make_recipe
from tests.running_sum import (
    HYBRID,
    SUM_LAYER,
    SUMS_ONLY,
    VOCAB_SIZE,
    make_config,
    register,
    save_model,
    sum_chunks,
    sum_mixed,
    sum_rows,
    unregister,
)

TOKENS = 24
MODELS = {"hybrid": HYBRID, "sums only": SUMS_ONLY}
LENGTHS = (300, 3, 129, 64, 1, 250, 31, 17)  # some are longer than the largest bucket, and computed in chunks


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    register()
    yield
    unregister()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: save_model(tmp_path_factory.mktemp("model"), layers) for name, layers in MODELS.items()}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    source = random.Random(46)
    return [[source.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def answers(model: str, prompts: list[list[int]]) -> list[list[int]]:
    """Transformers' greedy continuation of each prompt alone."""
    return [list(tokens) for tokens in _answers(model, tuple(map(tuple, prompts)))]


@functools.cache
def _answers(model: str, prompts: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    reference = load_reference(model)
    outputs = [
        reference.generate(
            torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, use_cache=False, eos_token_id=None,
            pad_token_id=0,
        )
        for prompt in prompts
    ]  # fmt: skip
    return [output[0, len(prompt) :].tolist() for output, prompt in zip(outputs, prompts, strict=True)]


FLAGS: dict[str, Any] = {"buckets": (32, 128), "batch_sizes": (1, 4), "programs": "jit"}


def deploy(model: str, cache_dir: str, **flags: Any) -> Deployment:
    deployment: Deployment = prepare_tiny(cache_dir, **{"model": model, **FLAGS, **flags})
    return deployment


def deploy_traced(model: str, cache_dir: str, **flags: Any) -> Deployment:
    """Dynamo traces the programs, and Inductor compiles none."""
    with traced_only():
        recipe = build_recipe({"model": model, **FLAGS, "cache_dir": cache_dir, **flags}, environ={})
        return prepare(recipe, needs_model=True)


@pytest.fixture
def deployment(models: dict[str, str], cache_dir: str) -> Deployment:
    return deploy(models["hybrid"], cache_dir)


def slot_contents(engine: Engine) -> list[torch.Tensor]:
    """The tensors of all slots but the scratch slot."""
    return [tensor[1:].clone() for tensor in engine.runner.slot_states.tensors]


def assert_idle(engine: Engine) -> None:
    assert engine.scheduler.slots.num_free == engine.scheduler.slots.capacity == engine.plan.slots - 1
    assert engine.scheduler.stats.used_blocks == 0


def test_the_probe_describes_what_each_layer_keeps() -> None:
    architecture = probe_model(make_config(), mechanisms=MECHANISMS.values()).architecture
    first, second, third, *_ = architecture.layer_states
    sums = StateTensor("sums", (128,), "float32")
    assert first == SlotState("model.layers.0.self_attn", "running_sum", (sums,))
    assert isinstance(second, AttentionSpec) and third == NoState("model.layers.2.self_attn")
    assert architecture.slot_tensors == (sums, sums) and len(architecture.attention_layers) == 2
    packed = {tuple(path.removeprefix("model.layers.") for path in group) for group in architecture.packed_linears}
    assert ("0.self_attn.value", "0.self_attn.gate") in packed and ("1.mlp.gate_proj", "1.mlp.up_proj") in packed


class CountingMechanism(Mechanism):
    """Uses positions of its own, which are wrong for packed prompts."""

    name, layer_types = "counting", frozenset({SUM_LAYER})

    def claims(self, module: Any) -> bool:
        return type(module).__name__ == "RunningSum"

    def state(self, module: Any) -> tuple[StateTensor, ...]:
        return MECHANISMS["running_sum"].state(module)

    def forward(self, module: Any, state: Any, metadata: Any, hidden_states: torch.Tensor, **_: Any) -> Any:
        return hidden_states * torch.arange(hidden_states.shape[1])[:, None], None


@pytest.mark.parametrize(
    ("mechanisms", "reason"),
    [
        ((), f"has layers of type {SUM_LAYER}, which a KV cache cannot serve"),
        (("counting",), "computes token positions of its own"),
        (("unused",), f"has layers of type {SUM_LAYER}, which a KV cache cannot serve"),
    ],
)
def test_a_layer_without_a_mechanism_is_refused(mechanisms: tuple[str, ...], reason: str) -> None:
    class Unused(CountingMechanism):
        def claims(self, module: Any) -> bool:
            return False

    known = {**MECHANISMS, "counting": CountingMechanism(), "unused": Unused()}
    with pytest.raises(UnsupportedModelError, match=reason):
        probe_model(make_config(), mechanisms=[known[name] for name in mechanisms])


def stateful(architecture: Architecture = LLAMA_8B, mebibytes: int = 100) -> Architecture:
    state = SlotState("model.layers.0.mixer", "running_sum", (StateTensor("sums", (mebibytes << 19,), ""),))
    return dataclasses.replace(architecture, layer_states=(state, *architecture.layer_states[1:]))


def test_the_plan_counts_slots_and_lowers_rows() -> None:
    plan, plain = (make_plan(make_recipe(), H100, architecture) for architecture in (stateful(mebibytes=1), LLAMA_8B))
    assert (plan.slots, plan.snapshots, plan.slot_bytes) == (257, 1024, 1281 << 20)
    assert plan.state_bytes == plan.kv_bytes + plan.slot_bytes
    assert (plain.slots, plain.snapshots, plain.slot_bytes) == (0, 0, 0) and plain.reuses_prefixes
    assert [decision.value for decision in decisions_named(plan, "state slots")] == ["257 (257.0 MiB)"]
    assert not decisions_named(plain, "state slots") and not decisions_named(plain, "prefix reuse")
    large = make_plan(make_recipe(), H100, stateful(mebibytes=1000))
    assert large.decode_buckets[-1].size < 64, "256 slots of 1,000 MiB do not fit"
    assert large.weight_bytes + large.state_bytes + large.workspace_bytes < 0.9 * H100.gpu_memory_bytes
    with pytest.raises(SpaceError, match="weights and .* of state slots leave no memory"):
        make_plan(make_recipe(batch_sizes=(256,)), H100, stateful(mebibytes=1000))


def snapshots(mebibytes: int, **flags: Any) -> tuple[int, str]:
    """The number of snapshots of a plan on an H100, and the value that it prints."""
    plan = make_plan(make_recipe(**flags), H100, stateful(mebibytes=mebibytes))
    assert plan.reuses_prefixes == (plan.snapshots > 0)
    assert plan.slot_bytes == (plan.slots + plan.snapshots) * mebibytes << 20
    assert plan.weight_bytes + plan.state_bytes + plan.workspace_bytes <= 0.9 * H100.gpu_memory_bytes
    [decision] = decisions_named(plan, "prefix reuse")
    return plan.snapshots, decision.value


def test_the_plan_budgets_snapshots() -> None:
    assert snapshots(1) == (1024, "1024 snapshots (1.00 GiB)"), "four for each sequence of the largest batch"
    assert snapshots(144) == (66, "66 snapshots (9.28 GiB)"), "a quarter of the memory for KV blocks and snapshots"
    assert snapshots(1000) == (6, "6 snapshots (5.86 GiB)")
    assert snapshots(1, context=512) == (0, "off") != snapshots(1, context=513)
    assert snapshots(1, kv_blocks=200)[0] == 6, "200 blocks hold 3,200 tokens, a snapshot is for 512"
    assert snapshots(20, kv_blocks=200)[0] == 6 and snapshots(25, kv_blocks=200)[0] == 5, "a third of 380 MiB"
    assert snapshots(200, kv_blocks=200) == (0, "off")


def test_snapshots_neither_lower_rows_nor_shorten_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    for mebibytes in (20, 144, 500, 1000, 3000):
        plans = []
        for fraction in (0.25, 0.0):
            monkeypatch.setattr("tcdeploy.planning.memory.SNAPSHOT_FRACTION", fraction)
            plans.append(make_plan(make_recipe(), H100, stateful(mebibytes=mebibytes)))
        kept, plain = plans
        assert not plain.snapshots and kept.buckets == plain.buckets and kept.context == plain.context
        assert kept.kv_blocks * 16 >= 1024 * kept.decode_buckets[-1].size or not kept.snapshots


def test_a_model_without_attention_has_blocks_that_only_count_tokens() -> None:
    recipe, states = make_recipe(context=4096), stateful(mebibytes=1).layer_states[:1]
    plan = make_plan(recipe, H100, dataclasses.replace(LLAMA_8B, layer_states=states))
    assert plan.kv_bytes == 0 and plan.kv_blocks == plan.decode_buckets[-1].size * plan.blocks_per_sequence + 1
    [decision] = decisions_named(plan, "KV blocks")
    assert "blocks only count tokens" in decision.reason
    small = changed_environment(H100, gpu_memory_bytes=16 << 30)
    with pytest.raises(SpaceError):
        make_plan(make_recipe(), small, dataclasses.replace(LLAMA_8B, layer_states=states))


def test_the_number_of_slots_is_not_part_of_the_plans_key() -> None:
    architecture = stateful(mebibytes=1)
    plan = make_plan(make_recipe(kv_blocks=500), H100, architecture)
    assert plan.key == make_plan(make_recipe(kv_blocks=600), H100, architecture).key
    assert plan.key != make_plan(make_recipe(kv_blocks=500), H100, stateful(mebibytes=2)).key


def test_slots_are_not_those_of_the_rows() -> None:
    slots = SlotAllocator(5)
    assert [slots.allocate() for _ in range(4)] == [4, 3, 2, 1]
    with pytest.raises(IndexError):
        slots.allocate()  # two sequences never share a slot
    slots.release(3)
    slots.release(SCRATCH_SLOT)
    assert (slots.allocate(), slots.num_free) == (3, 0)
    assert SlotAllocator(0).allocate() == SCRATCH_SLOT


START_FLAGS: list[tuple[str, dict[str, Any]]] = [
    ("hybrid", {}),
    ("hybrid", {"mixed_steps": "off"}),
    ("hybrid", {"shapes": "dynamic", "buckets": (128,)}),
    ("hybrid", {"region": "blocks"}),
    ("sums only", {}),
    ("sums only", {"batch_sizes": (1,), "buckets": (32,)}),  # packed prompts of a check share the one slot
]


def starts() -> Iterator[Any]:
    """Name, flags, and whether Inductor compiles the programs: of the first start, and with --long of all."""
    for number, (name, flags) in enumerate(START_FLAGS):
        test_id = " ".join((name, *(f"{flag}={value}" for flag, value in flags.items())))
        yield pytest.param(name, flags, True, id=f"{test_id}, compiled", marks=[pytest.mark.long] * (number > 0))
        if number > 0:
            yield pytest.param(name, flags, False, id=test_id)


@pytest.mark.parametrize(("name", "flags", "compiles"), [*starts()])
def test_tokens_equal_those_of_generate(
    models: dict[str, str], prompts: list[list[int]], cache_dir: str, name: str, flags: dict[str, Any], compiles: bool
) -> None:
    """Chunked prompts, mixed steps and moving rows; requests end at different steps."""
    prepared = (deploy if compiles else deploy_traced)(models[name], cache_dir, **flags)
    assert all(record.parity.passed and not record.graph_breaks for record in prepared.records)
    engine = prepared.engine
    with measure_compiles() as serving:
        assert generate_tokens(engine, prompts, SamplingParams(max_tokens=TOKENS)) == answers(models[name], prompts)
    assert serving.counts.compiles == 0
    assert_idle(engine)


def test_a_second_start_has_hits_and_a_program_for_each_kind_of_layer(models: dict[str, str], cache_dir: str) -> None:
    first = deploy(models["hybrid"], cache_dir).records
    reset_programs()
    second = deploy(models["hybrid"], cache_dir).records
    assert [(record.outcome, record.programs) for record in second] == [("hit", 3)] * 4
    assert [record.greedy_tokens for record in second] == [record.greedy_tokens for record in first]


@pytest.mark.parametrize("name", MODELS)
def test_random_traffic_with_preemption_and_aborts_changes_no_token(
    models: dict[str, str], cache_dir: str, name: str
) -> None:
    """Prompts share prefixes, which a context of 512 tokens does not reuse; test_snapshot_models.py tests reuse."""
    engine = deploy(models[name], cache_dir, kv_blocks=SCARCE_BLOCKS).engine
    preempted = engine.scheduler.preemptions
    check_random_traffic(engine, 60, reference=load_reference(models[name]))
    assert engine.scheduler.preemptions > preempted, "the test needs preemptions"
    assert_idle(engine)


def test_no_prefix_is_reused(deployment: Deployment, prompts: list[list[int]]) -> None:
    engine = deployment.engine
    for _ in range(2):
        [[first, *_]] = new_tokens(engine, prompts[:1], SamplingParams(max_tokens=2))
        assert first.cached_tokens == 0
    assert engine.allocator.match(prompts[0]) == []


def test_a_new_sequence_ignores_what_its_slot_contains(
    deployment: Deployment, models: dict[str, str], prompts: list[list[int]]
) -> None:
    for tensor in deployment.engine.runner.slot_states.tensors:
        tensor.fill_(float("nan"))
    tokens = generate_tokens(deployment.engine, prompts[:4], SamplingParams(max_tokens=TOKENS))
    assert tokens == answers(models["hybrid"], prompts[:4])


def test_a_timed_step_moves_the_state_of_each_row(deployment: Deployment) -> None:
    engine, plan = deployment.engine, deployment.plan
    with placed_sequences(engine, Prompts(VOCAB_SIZE, seed=1), 4, 40) as sequences:
        restore, step = decode_step(engine, sequences)
        restore()
        before = slot_contents(engine)
        step()
        changed = [(old != new).flatten(1).any(1) for old, new in zip(before, slot_contents(engine), strict=True)]
        assert (
            sorted(sequence.slot for sequence in sequences)
            == (torch.stack(changed).any(0).nonzero()[:, 0] + 1).tolist()
        )
    assert_idle(engine)
    rates = Rates(1e10, 1, 1e9, 1, "float32")
    session = Session(
        deployment.planned.recipe, DecodeSettings(repeats=1, steps=2), NullProgress(), deployment.planned, rates
    )
    slot_bytes = sum(tensor[0].nbytes for tensor in engine.runner.slot_states.tensors)
    single, *_, largest = decode.measure("tcdeploy", deployment, session)
    kv_bytes = kv_read_bytes(deployment.planned.architecture, plan.kv_dtype, single.context)
    assert (single.context, slot_bytes) == (largest.context, plan.bytes_per_slot)
    assert largest.bytes_moved - single.bytes_moved == (largest.batch - 1) * (kv_bytes + 2 * slot_bytes)


@pytest.mark.parametrize("piece", [512, 20])
def test_log_probabilities_of_a_prompt_leave_its_state_as_it_was(
    deployment: Deployment,
    models: dict[str, str],
    prompts: list[list[int]],
    piece: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each chunk is computed again, once for each piece of its log-probabilities."""
    monkeypatch.setattr(runner_module, "PROMPT_LOGPROBS_CHUNK", piece)
    params = SamplingParams(max_tokens=TOKENS, prompt_logprobs=0)
    received = new_tokens(deployment.engine, prompts[:4], params)
    assert [[token.token_id for token in tokens] for tokens in received] == answers(models["hybrid"], prompts[:4])
    reference = load_reference(models["hybrid"])
    for prompt, tokens in zip(prompts, received, strict=False):
        with torch.no_grad():
            expected = reference(torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
        chosen = [expected[position, token].item() for position, token in enumerate(prompt[1:])]
        assert tokens[0].prompt_logprobs is not None
        assert [each.chosen for each in tokens[0].prompt_logprobs] == pytest.approx(chosen, abs=1e-4)
        pieces = prompt_logits(deployment.engine, prompt)  # as `bench quality` scores a text
        scored = [logits.log_softmax(-1).gather(1, ids[:, None])[:, 0] for _, logits, ids in pieces]
        assert torch.cat(scored).tolist() == pytest.approx(chosen, abs=1e-4)
    assert deployment.engine.scheduler.slots.num_free == deployment.engine.plan.slots - 1


def test_steps_that_run_twice_or_besides_change_no_live_sequence(
    deployment: Deployment, models: dict[str, str], prompts: list[list[int]]
) -> None:
    """Each kind of step that is not a request's, between steps of requests in every state."""
    engine, runner = deployment.engine, deployment.engine.runner
    expected = answers(models["hybrid"], prompts)
    received: dict[int, list[int]] = {
        engine.submit(prompt, SamplingParams(max_tokens=TOKENS)): [] for prompt in prompts
    }
    number = 0
    while engine.has_work:
        for token in engine.step():
            received[token.request_id].append(token.token_id)
        before = slot_contents(engine)
        for bucket in engine.plan.prefill_buckets:  # as before a capture
            for row_slots in engine.plan.row_slots(bucket):
                runner.run_uncaptured(GraphKey(bucket, bucket.size, row_slots))
        assert all(map(torch.equal, slot_contents(engine), before)), "padding writes to the scratch slot"
        number += 1
        if number % 7 == 0:  # as when a bucket is warmed, timed or checked while a server runs
            with engine.paused(engine.allocator.blocks_for(512)):
                assert engine.scheduler.slots.num_free == engine.plan.slots - 1
                for bucket in engine.plan.buckets:
                    batch = make_timing_batch(runner, bucket, 20)
                    batch.run()
                    for _ in range(2):
                        runner.rerun(bucket)
                        runner.rerun_uncaptured(bucket)
    assert list(received.values()) == expected
    assert_idle(engine)


def test_a_step_after_the_stop_token_does_not_reach_the_next_owner_of_its_slot(
    deployment: Deployment, models: dict[str, str], prompts: list[list[int]]
) -> None:
    """The row of an ended request decodes once more, while its slot is given to a request that waits."""
    engine, expected = deployment.engine, answers(models["hybrid"], prompts)
    stops = [tokens[3] for tokens in expected]
    ids = [
        engine.submit(prompt, SamplingParams(max_tokens=TOKENS, stop_token_ids=[stop] if number % 2 else []))
        for number, (prompt, stop) in enumerate(zip(prompts * 2, stops * 2, strict=True))
    ]
    received: dict[int, list[int]] = {request_id: [] for request_id in ids}
    while engine.has_work:
        for token in engine.step():
            received[token.request_id].append(token.token_id)
    for number, tokens in enumerate(received.values()):
        answer, stop = expected[number % len(expected)], stops[number % len(stops)]
        assert tokens == (answer[: answer.index(stop) + 1] if number % 2 else answer)
    assert_idle(engine)


def test_a_failed_step_is_computed_again_from_the_first_token(
    deployment: Deployment, models: dict[str, str], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, run, calls = deployment.engine, deployment.engine.runner.run, 0

    def failing(batch: Any) -> Any:
        nonlocal calls
        calls += 1
        output = run(batch)  # the state is updated
        if calls % 6 == 0:
            raise RuntimeError("planted")
        return output

    monkeypatch.setattr(engine.runner, "run", failing)
    tokens = generate_despite_failures(engine, prompts, SamplingParams(max_tokens=TOKENS))
    assert tokens == answers(models["hybrid"], prompts) and calls > 6
    assert_idle(engine)


def test_the_canary_uses_slots_and_finds_damaged_state(deployment: Deployment) -> None:
    engine = deployment.engine
    canary = recorded_canary(engine)
    assert len(canary.cases) == len(engine.plan.buckets) + 1 and not canary.unrepeatable
    assert run_round(canary) == []
    assert_idle(engine)
    two_chunks = next(number for number, case in enumerate(canary.cases) if "two chunks" in case.name)
    check = canary.check(two_chunks)
    next(check)
    for tensor in engine.runner.slot_states.tensors:
        tensor.add_(0.5)  # between the chunks
    with pytest.raises(StopIteration) as end:
        while True:
            next(check)
    assert end.value.value is not None
    assert_idle(engine)


def run_alone(x: torch.Tensor, initial: torch.Tensor) -> torch.Tensor:
    return initial + x.cumsum(0)


def test_all_forms_of_the_op_agree() -> None:
    torch.manual_seed(3)
    state = torch.randn(6, 4)
    before, x = state.clone(), torch.randn(12, 4)
    # Two rows; then a chunk of 3 tokens after 5, a new sequence of 4, and padding.
    starts = torch.tensor([0, 2, 5, 9, 9], dtype=torch.int32)
    lengths, slots = torch.tensor([0, 8, 4, 0]).int(), torch.tensor([0, 3, 1, 0]).int()
    row_lengths, row_slots = torch.tensor([7, 1, 9]).int(), torch.tensor([5, 2, 4]).int()
    out = sum_mixed(x, state, starts, lengths, slots, row_lengths, row_slots)
    torch.testing.assert_close(out[:1], before[5:6] + x[:1])
    torch.testing.assert_close(out[1:2], x[1:2])
    torch.testing.assert_close(out[2:5], run_alone(x[2:5], before[3]))
    torch.testing.assert_close(out[5:9], run_alone(x[5:9], torch.zeros(4)))
    torch.testing.assert_close(state[[5, 2, 3, 1]], out[[0, 1, 4, 8]])
    assert torch.equal(state[4], before[4]), "the third row does not decode in this step"
    for op, arguments in (
        (sum_chunks, (x, state, starts, lengths, slots)),
        (sum_rows, (x[:3], state, row_lengths, row_slots)),
        (sum_mixed, (x, state, starts, lengths, slots, row_lengths, row_slots)),
    ):
        torch.library.opcheck(op, arguments)  # type: ignore[arg-type]
