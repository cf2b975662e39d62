"""Models start and generate with an FP8 KV cache, and the parity check compares them with a reference that rounds.

The checkpoints have scales that differ by layer, and with which some K saturate, so each fault changes the tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tcdeploy.engine.check import rounded_attention
from tcdeploy.engine.check.parity_check import FAILED, ParityChecker
from tcdeploy.engine.engine import Engine
from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.errors import CompileError
from tcdeploy.kernels.attention import reference
from tcdeploy.models.location import BUILTIN_MODELS
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.programs.packages import PackagedForward
from tcdeploy.start.eager import check_eager_steps
from tcdeploy.start.model_code import load_uncompiled
from tcdeploy.start.prepare import prepare
from tests.block_checks import assert_idle
from tests.conftest import TINY
from tests.engine.test_canary import recorded_canary, run_round
from tests.engine_loop import generate_tokens, new_tokens
from tests.exported_programs import exported_programs
from tests.scaled_kv import RoundingReference, layer_scales, save_with_tensors
from tests.start.test_packaged_families import save_model

FP8 = torch.float8_e4m3fn
BUCKETS: dict[str, Any] = {"buckets": (64,), "batch_sizes": (4,), "kv_dtype": "fp8"}
SCARCE_BLOCKS = 16  # of 16 tokens: the prompts of four requests take 14 of 15, so their answers preempt some
TOKENS = 40


def prompts() -> list[list[int]]:
    """Longer than the bucket, of one token, and two with a common prefix."""
    source = random.Random(11)
    long, *others = [[source.randrange(3, 900) for _ in range(length)] for length in (90, 1, 40, 60)]
    return [long, *others, [*long[:70], 7, 8, 9]]


def recipe(folder: Path | str, cache_dir: Path | str, **flags: Any) -> Any:
    return build_recipe({"model": str(folder), "cache_dir": str(cache_dir), **BUCKETS, **flags}, environ={})


def outcomes(deployment: Any) -> list[tuple[str, int]]:
    return [(record.outcome, record.compiles) for record in deployment.records]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = BUILTIN_MODELS[TINY]
    layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    return save_with_tensors(source, tmp_path_factory.mktemp("tiny") / "model", layer_scales(layers, 0.008, 0.005))


@pytest.fixture(scope="module")
def rounding(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> RoundingReference:
    return RoundingReference(tiny, tmp_path_factory.mktemp("reference"), buckets=(64,), batch_sizes=(4,))


def assert_greedy(engine: Engine, rounding: RoundingReference) -> list[list[int]]:
    """The engine generates the greedy tokens of the reference. Returns them."""
    tokens = generate_tokens(engine, prompts(), SamplingParams(max_tokens=TOKENS))
    for prompt, answer in zip(prompts(), tokens, strict=True):
        assert answer == rounding.likeliest(prompt, answer)
    assert max(len(set(answer)) for answer in tokens) > 5, "the tokens depend on what was computed"
    return tokens


def test_the_engine_generates_the_tokens_of_the_reference(
    tiny: Path, rounding: RoundingReference, cache_dir: str
) -> None:
    """In mixed steps, with preemption and a prefix that two prompts share. A later start compiles nothing."""
    first = prepare(recipe(tiny, cache_dir, kv_blocks=SCARCE_BLOCKS, context=224))
    assert outcomes(first) == [("miss", 1)] * 2, "all layers share one program"
    tokens = assert_greedy(first.engine, rounding)
    assert first.engine.scheduler.preemptions > 0
    assert_idle(first.engine.allocator)
    canary = recorded_canary(first.engine)
    assert not canary.unrepeatable and run_round(canary) == []
    again = prepare(recipe(tiny, cache_dir, context=224), needs_model=True)
    assert outcomes(again) == [("reused", 0)] * 2
    caches = [module.tcdeploy.state for module in again.engine.runner.model.modules() if hasattr(module, "kv_scales")]
    assert {cache.dtype for layer in caches for cache in layer} == {FP8}
    assert assert_greedy(again.engine, rounding) == tokens
    assert assert_greedy(again.engine, rounding) == tokens, "with K and V of the prompts in the prefix cache"


def test_without_rounding_the_tokens_differ_so_they_show_what_was_read(
    tiny: Path, rounding: RoundingReference, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError):
        assert_greedy(eager_engine(tiny, tmp_path, kv_dtype="auto"), rounding)


def test_log_probabilities_are_those_of_the_reference(tiny: Path, rounding: RoundingReference, tmp_path: Path) -> None:
    """Of the prompt, whose chunks are computed once more for them, and of new tokens."""
    engine, prompt = eager_engine(tiny, tmp_path), prompts()[0]
    [received] = new_tokens(engine, [prompt], SamplingParams(max_tokens=3, prompt_logprobs=0, logprobs=0))
    token_ids = prompt + [token.token_id for token in received]
    expected = rounding.logits(token_ids).log_softmax(-1)[:-1].gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
    entries = [*(received[0].prompt_logprobs or ()), *(token.logprobs for token in received)]
    difference = (torch.tensor([entry.chosen for entry in entries]) - expected).abs()
    assert len(difference) == len(prompt) + 2
    # A rounding error of float32 may lead to the next FP8 value.
    assert difference.median() < 1e-4 and difference.max() < 5e-2


def eager_engine(folder: Path, cache_dir: Path, **flags: Any) -> Engine:
    """An engine of uncompiled steps that have passed their check."""
    planned, runner = load_uncompiled(recipe(folder, cache_dir, **flags))
    for bucket in planned.plan.buckets:
        runner.run_eagerly(bucket)
    check_eager_steps(runner, ParityChecker(runner, planned.architecture, planned.config))
    return Engine(runner)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_models_pass_their_check(dtype: str, tiny: Path, tmp_path: Path) -> None:
    eager_engine(tiny, tmp_path, dtype=dtype)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "gpt2"])
def test_families_with_their_own_eager_attention_pass_their_check(family: str, tmp_path: Path) -> None:
    """With soft-capping, sinks and windows, and with random scales."""
    save_model(family, tmp_path / "model")
    eager_engine(tmp_path / "model", tmp_path / "cache", load_format="dummy")


def test_packages_have_the_scales(tiny: Path, rounding: RoundingReference, tmp_path: Path) -> None:
    with exported_programs():
        first = prepare(recipe(tiny, tmp_path, programs="aot"))
        assert first.engine.runner.has_model
        again = prepare(recipe(tiny, tmp_path, programs="aot"))
        runner = again.engine.runner
        assert not runner.has_model and outcomes(again) == [("hit", 0)] * 2
        constants = cast(PackagedForward, runner.forward).constants
        scales = constants["weight/model.layers.1.self_attn.kv_scales"]
        assert scales.dtype == torch.float32 and scales.tolist() == [pytest.approx(x * 1.1) for x in (0.008, 0.005)]
        assert_greedy(again.engine, rounding)


def values_beyond_the_largest_are_nan(to_fp8: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As torch casts them in some versions."""

    def cast(x: Tensor, scale: Tensor) -> Tensor:
        is_beyond = (x / scale).abs() > reference.FP8_MAX
        return to_fp8(x, scale).float().masked_fill(is_beyond, float("nan")).to(FP8)

    return cast


def two_bits_of_mantissa(to_fp8: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, scale: to_fp8(x, scale).float().to(torch.float8_e5m2).to(FP8)


def with_scales(k: float | None, v: float | None) -> Callable[..., Callable[..., Any]]:
    """The function, whose last argument is the scales, with other ones. None: the given one."""

    def change(scales: Tensor) -> Tensor:
        return torch.where(torch.tensor([k is None, v is None]), scales, torch.tensor([k or 1.0, v or 1.0]))

    return lambda function: lambda *args: function(*args[:-1], change(args[-1]))


def with_swapped_scales(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: function(*args[:-1], args[-1].flip(0))


FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {  # a function of the CPU backend, and what replaces it
    "scale of K dropped on read": ("_read_sequence", with_scales(1.0, None)),
    "scale of V dropped on read": ("_read_sequence", with_scales(None, 1.0)),
    "scales dropped on write": ("write_kv", with_scales(1.0, 1.0)),
    "scales swapped on write": ("write_kv", with_swapped_scales),
    "scales swapped on read": ("_read_sequence", with_swapped_scales),
    "no clamp": ("to_fp8", values_beyond_the_largest_are_nan),
    "fewer bits": ("to_fp8", two_bits_of_mantissa),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_the_check(
    fault: str, dtype: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, plant = FAULTS[fault]
    monkeypatch.setattr(reference, name, plant(getattr(reference, name)))
    if name == "write_kv":
        from tcdeploy.kernels.attention import backends

        changed = backends.IMPLEMENTATIONS["reference"]._replace(write_kv=reference.write_kv)
        monkeypatch.setitem(backends.IMPLEMENTATIONS, "reference", changed)
    with pytest.raises(CompileError, match=FAILED):
        eager_engine(tiny, tmp_path, dtype=dtype)


def test_a_reference_that_does_not_round_fails_the_check(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounded_attention, "_round", lambda module, key, value: (key, value))
    with pytest.raises(CompileError, match=FAILED):
        eager_engine(tiny, tmp_path)
