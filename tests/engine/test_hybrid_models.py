"""Models with recurrent layers and short convolutions, from the probe to tokens.

Requests get the tokens of transformers' `generate`, whatever else is in the batch. Programs are traced by Dynamo, and
compiled by Inductor only with scripts/test --long.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.bamba.modeling_bamba import BambaMixer

from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.errors import UnsupportedModelError, UsageError
from tcdeploy.kernels.state.mechanisms import MECHANISMS
from tcdeploy.models.probe import probe_model
from tcdeploy.planning.architecture import AttentionSpec, SlotState
from tcdeploy.planning.decision import Decisions
from tcdeploy.planning.recipe import Recipe
from tcdeploy.planning.sizes import decide_context
from tcdeploy.start.deployment import Deployment
from tests.conftest import reset_programs
from tests.engine.test_canary import recorded_canary, run_round
from tests.engine.test_continuous_batching import SCARCE_BLOCKS, check_random_traffic, next_tokens
from tests.engine.test_slot_state import assert_idle, deploy, deploy_traced
from tests.engine_loop import generate_tokens, new_tokens
from tests.hybrid_models import FAMILIES, VOCAB_SIZE, answers, load_reference, prompt_logprobs, save_model

TOKENS = 24
LENGTHS = (300, 3, 129, 64, 1, 250, 31, 17)  # some exceed the largest bucket, and are computed in chunks
GENERATED = 4
BUCKET = 64
BORDERS = (2, 63, 64, 65, 66, 129)  # tokens: the last chunk has 1, 2, 63 or 64 of them
LONG_PROMPT = 4096
# By default, one family with each set of mechanisms; others with scripts/test --long.
QUICK = (
    "qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear", "bamba", "nemotron_h", "falcon_h1", "jamba", "minimax",
    "lfm2",
)  # fmt: skip
QUICK_TRAFFIC = ("qwen3_5_text", "kimi_linear", "bamba", "falcon_h1", "jamba", "lfm2")
# To save time, these have one prefill and one decode bucket. qwen3_5_text and bamba cover the same mechanisms with two.
ONE_BUCKET = ("qwen3_next", "olmo_hybrid", "nemotron_h")


def families(quick: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=() if name in quick else pytest.mark.long) for name in FAMILIES]


def random_prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    source = random.Random(46)
    return [[source.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


class Served:
    """A model of a family, and its deployment with few KV blocks."""

    def __init__(self, family: str, folder: Any) -> None:
        reset_programs()
        self.family, self.model = family, save_model(family, folder / "model")
        sizes = {"buckets": (BUCKET,), "batch_sizes": (4,)} if family in ONE_BUCKET else {"buckets": (32, BUCKET)}
        self.deployment: Deployment = deploy_traced(
            self.model, str(folder / "cache"), kv_blocks=SCARCE_BLOCKS, mixed_steps="on", **sizes
        )
        self.engine = self.deployment.engine


@pytest.fixture(scope="module", params=families(QUICK))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield Served(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(
    ("family", "states"),
    [
        ("qwen3_next", {"conv": (3, 192), "delta": (4, 16, 32)}),
        ("qwen3_5_text", {"conv": (3, 192), "delta": (4, 16, 32)}),
        ("lfm2", {"conv": (2, 64)}),
    ],
)
def test_the_probe_describes_what_a_layer_keeps(family: str, states: dict[str, tuple[int, ...]]) -> None:
    config = AutoConfig.for_model(family, **FAMILIES[family])
    architecture = probe_model(config, mechanisms=MECHANISMS.values()).architecture
    kinds = [isinstance(state, SlotState) for state in architecture.layer_states]
    assert kinds == [name in ("linear_attention", "conv") for name in config.layer_types]
    [first, *_] = architecture.layer_states
    assert isinstance(first, SlotState) and {tensor.name: tensor.shape for tensor in first.tensors} == states
    assert [tensor.dtype for tensor in first.tensors] == ["", "float32"][: len(states)]
    assert all(isinstance(state, AttentionSpec) for state in architecture.attention_layers)


@pytest.mark.parametrize(("requested", "context"), [(None, 32768), (1 << 20, 1 << 20)])
def test_without_attention_and_a_limit_the_context_is_a_default_or_what_is_requested(
    requested: int | None, context: int
) -> None:
    architecture = probe_model(
        AutoConfig.for_model("mamba2", **FAMILIES["mamba2"]), mechanisms=MECHANISMS.values()
    ).architecture
    recipe = Recipe(model="m", context=requested)
    assert architecture.context == 0 and decide_context(recipe, architecture, Decisions()) == context
    with pytest.raises(UsageError, match="between 2 and 1048576"):
        decide_context(Recipe(model="m", context=(1 << 20) + 1), architecture, Decisions())


@pytest.mark.parametrize(
    ("family", "sizes", "problem"),
    [
        ("qwen3_5_text", {"linear_num_key_heads": 3}, "4 heads of values are not a multiple of 3 heads of keys"),
        ("qwen3_5_text", {"linear_num_key_heads": 8}, "4 heads of values are not a multiple of 8 heads of keys"),
        ("mamba2", {"state_size": 0}, "ZeroDivisionError"),
    ],
)
def test_the_probe_refuses_heads_that_do_not_fit_together(family: str, sizes: dict[str, int], problem: str) -> None:
    """Before any weight is read."""
    config = AutoConfig.for_model(family, **{**FAMILIES.get(family, {"max_position_embeddings": 64}), **sizes})
    with pytest.raises(UnsupportedModelError, match=problem):
        probe_model(config, mechanisms=MECHANISMS.values())


def test_a_module_with_another_shape_of_decays_is_refused() -> None:
    """It has all attributes of a Mamba-2 mixer, and decays for each column of the state, as Mamba 1."""
    config = AutoConfig.for_model("bamba", **FAMILIES["bamba"])
    init = BambaMixer.__init__

    def with_wide_decays(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.A_log = torch.nn.Parameter(self.A_log[:, None].repeat(1, self.ssm_state_size))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BambaMixer, "__init__", with_wide_decays)
        with pytest.raises(UnsupportedModelError, match="the state has 8 heads"):
            probe_model(config, mechanisms=MECHANISMS.values())


def test_a_config_with_which_transformers_cannot_compute_the_model_is_refused(tmp_path: Any) -> None:
    """Steps do not read the chunk size, so the reference of the parity check is the first to fail."""
    model = save_model("bamba", tmp_path / "model", mamba_chunk_size=0)
    with pytest.raises(UnsupportedModelError, match=r"ZeroDivisionError: .* \(modeling_bamba.py, line") as refusal:
        deploy_traced(model, str(tmp_path / "cache"))
    assert model in refusal.value.message and "config.json" in (refusal.value.hint or "")


def test_tokens_equal_those_of_generate(served: Served) -> None:
    """Chunked prompts, mixed steps and moving rows; requests end at different steps.

    One pass of transformers for each of the later prompts takes less time than `generate`.
    """
    assert all(record.parity.passed and not record.graph_breaks for record in served.deployment.records)
    prompts = random_prompts(LENGTHS)
    tokens = generate_tokens(served.engine, prompts, SamplingParams(max_tokens=TOKENS))
    assert tokens[:GENERATED] == answers(served.model, prompts[:GENERATED], TOKENS)
    reference, others = load_reference(served.model), zip(prompts[GENERATED:], tokens[GENERATED:], strict=True)
    assert tokens[GENERATED:] == [next_tokens(reference, prompt, answer) for prompt, answer in others]
    assert all(len(answer) == TOKENS for answer in tokens)
    assert len({*map(tuple, tokens)}) == len(tokens), "the answers depend on the prompt"
    assert_idle(served.engine)


@pytest.mark.parametrize("served", families(QUICK_TRAFFIC), indirect=True)
def test_random_traffic_with_preemption_and_aborts_changes_no_token(served: Served) -> None:
    preempted = served.engine.scheduler.preemptions
    check_random_traffic(served.engine, 40, reference=load_reference(served.model))
    assert served.engine.scheduler.preemptions > preempted, "the test needs preemptions"
    assert_idle(served.engine)


def test_a_new_sequence_ignores_what_its_slot_contains(served: Served) -> None:
    served.engine.allocator.reset_prefix_cache()
    for tensor in served.engine.runner.slot_states.tensors:
        tensor.fill_(float("nan"))
    prompts = random_prompts(LENGTHS[:GENERATED])
    tokens = generate_tokens(served.engine, prompts, SamplingParams(max_tokens=TOKENS))
    assert tokens == answers(served.model, prompts, TOKENS)


def assert_logprobs(served: Served, prompt: list[int]) -> None:
    [[first, *_]] = new_tokens(served.engine, [prompt], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert first.prompt_logprobs is not None
    chosen = [each.chosen for each in first.prompt_logprobs]
    assert chosen == pytest.approx(prompt_logprobs(served.model, prompt), abs=1e-4)


def test_log_probabilities_at_the_borders_of_chunks(served: Served) -> None:
    for prompt in random_prompts(BORDERS):
        assert_logprobs(served, prompt)
    assert_idle(served.engine)


def test_log_probabilities_of_a_repeated_token(served: Served) -> None:
    """Its keys are alike, which makes the system that is solved for a chunk the most sensitive."""
    assert_logprobs(served, [7] * 200)


def test_the_canary_finds_damaged_state(served: Served) -> None:
    canary = recorded_canary(served.engine)
    assert run_round(canary) == []
    two_chunks = next(number for number, case in enumerate(canary.cases) if "two chunks" in case.name)
    check = canary.check(two_chunks)
    next(check)
    for tensor in served.engine.runner.slot_states.tensors:
        tensor.add_(0.5)  # between the chunks
    with pytest.raises(StopIteration) as end:
        while True:
            next(check)
    assert end.value.value is not None
    assert_idle(served.engine)


def test_a_long_prompt(tmp_path: Any) -> None:
    model = save_model("qwen3_next", tmp_path / "model")
    engine = deploy_traced(model, str(tmp_path / "cache"), buckets=(256,), batch_sizes=(1,)).engine
    [prompt] = random_prompts((LONG_PROMPT,))
    [[first]] = new_tokens(engine, [prompt], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert first.prompt_logprobs is not None
    chosen = [each.chosen for each in first.prompt_logprobs]
    assert chosen == pytest.approx(prompt_logprobs(model, prompt), abs=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("flags", [{}, {"region": "blocks"}, {"shapes": "dynamic", "buckets": (128,)}], ids=str)
def test_compiled_programs(family: str, flags: dict[str, Any], tmp_path: Any, cache_dir: str) -> None:
    reset_programs()
    model = save_model(family, tmp_path / "model")
    prepared = deploy(model, cache_dir, **flags)
    assert all(record.parity.passed and not record.graph_breaks for record in prepared.records)
    prompts = random_prompts(LENGTHS)
    assert generate_tokens(prepared.engine, prompts, SamplingParams(max_tokens=TOKENS)) == answers(
        model, prompts, TOKENS
    )


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_passes_the_parity_check(family: str, tmp_path: Any, cache_dir: str) -> None:
    reset_programs()
    model = save_model(family, tmp_path / "model")
    prepared = deploy(model, cache_dir, dtype="bfloat16")
    assert all(record.parity.passed for record in prepared.records)
    if family != "kimi_linear":  # rounding changes a token with three of six seeds; see float32 above
        check_random_traffic(prepared.engine, 20)


def test_state_has_the_dtypes_of_the_description(served: Served) -> None:
    dtypes = {tensor.dtype for tensor in served.engine.runner.slot_states.tensors}
    assert dtypes == {torch.float32}
