"""Whether inputs of products with FP8 weights are quantised: what the checkpoint, the GPU and the user must allow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tcdeploy.errors import RecipeError
from tcdeploy.planning import activations
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.dry_run import plan_with_findings
from tcdeploy.planning.environment import Environment
from tcdeploy.planning.plan import Plan, make_plan
from tcdeploy.planning.recipe import build_recipe
from tests.machines import (
    A10G,
    H100,
    LLAMA_1B,
    LLAMA_8B,
    RTX_4080,
    changed_environment,
    decision_named,
    decisions_named,
    make_recipe,
)

BLACKWELL = changed_environment(H100, gpu="NVIDIA B200", gpu_capability=(10, 0))
GEFORCE_BLACKWELL = changed_environment(H100, gpu="NVIDIA GeForce RTX 5090", gpu_capability=(12, 0))


def fp8_model(*schemes: str, fp8_inputs: bool = True, quantisation: str = "fp8") -> Architecture:
    counts = dict.fromkeys(schemes or ("fp8_channel",), 112)
    return replace(LLAMA_1B, quantisation=quantisation, schemes=counts, fp8_inputs=fp8_inputs)


def plan_for(architecture: Architecture, environment: Environment = H100, **fields: Any) -> Plan:
    return make_plan(make_recipe(**fields), environment, architecture)


@pytest.mark.parametrize("scheme", ["fp8_channel", "fp8_block"])
def test_a_checkpoint_that_asks_for_fp8_inputs_gets_them(scheme: str) -> None:
    plan = plan_for(fp8_model(scheme))
    decision = decision_named(plan, "activations")
    assert plan.fp8_min_rows == activations.MIN_ROWS[scheme]
    assert (
        decision.value == f"fp8 (prefill steps, and decode steps of {plan.fp8_min_rows} rows and more)"
        and not decision.is_fallback
    )
    assert decision.reason == "fp8 quantises them too; scales are computed for each token"


def test_the_plan_says_that_experts_keep_their_inputs() -> None:
    mixture = replace(fp8_model(), expert_schemes={"fp8_channel": 32})
    reason = "fp8 quantises them too; scales are computed for each token; inputs of experts keep 16 bits"
    assert decision_named(plan_for(mixture), "activations").reason == reason
    others = replace(fp8_model(), expert_schemes={"int8": 32})
    assert "experts" not in decision_named(plan_for(others), "activations").reason


def test_several_schemes_have_the_largest_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(activations.MIN_ROWS, "fp8_block", 512)
    assert plan_for(fp8_model("fp8_channel", "int8", "fp8_block")).fp8_min_rows == 512
    assert plan_for(fp8_model("fp8_channel", "int8")).fp8_min_rows == activations.MIN_ROWS["fp8_channel"]


@pytest.mark.parametrize(
    ("architecture", "environment", "fields", "reason"),
    [
        (fp8_model(), H100, {"fp8_activations": "off"}, "requested"),
        (
            fp8_model(fp8_inputs=False, quantisation="torchao"), H100, {},
            "torchao quantises the weights only",
        ),
        (
            fp8_model(), H100, {"dtype": "float16"},
            "products of FP8 inputs are computed in bfloat16 only, and the dtype is float16",
        ),
        (
            fp8_model(), A10G, {},
            "NVIDIA A10G has compute capability 8.6; products of FP8 inputs require 8.9",
        ),
        (
            fp8_model("fp8_block"), RTX_4080, {},
            "NVIDIA GeForce RTX 4080 has compute capability 8.9; products with scales of blocks require 9.0",
        ),
        (
            fp8_model("fp8_block"), BLACKWELL, {},
            "NVIDIA B200 has compute capability 10.0; products with scales of blocks require 9.0",
        ),
        (
            fp8_model("fp8_block"), replace(H100, cuda="12.8"), {},
            "products with scales of blocks require CUDA 12.9, and torch was built with 12.8",
        ),
        (fp8_model(), replace(H100, triton=""), {}, "Triton is not installed, and its kernel quantises them"),
    ],
)  # fmt: skip
def test_inputs_keep_16_bits_for_a_reason(
    architecture: Architecture, environment: Environment, fields: dict[str, Any], reason: str
) -> None:
    plan = plan_for(architecture, environment, **fields)
    decision = decision_named(plan, "activations")
    assert (plan.fp8_min_rows, decision.value, decision.reason) == (0, "16-bit", reason)


@pytest.mark.parametrize("environment", [H100, RTX_4080, BLACKWELL, GEFORCE_BLACKWELL, replace(H100, cuda="12.6")])
def test_scales_of_rows_need_no_hopper_gpu(environment: Environment) -> None:
    assert plan_for(fp8_model(), environment).fp8_min_rows == activations.MIN_ROWS["fp8_channel"]


@pytest.mark.parametrize("fields", [{}, {"fp8_activations": "off"}])
def test_models_without_fp8_weights_and_cpus_have_no_line_activations(fields: dict[str, Any]) -> None:
    int8 = replace(LLAMA_8B, quantisation="gptq", schemes={"int8": 7})
    for plan in (plan_for(LLAMA_8B, **fields), plan_for(int8, **fields), plan_for(fp8_model(), device="cpu", **fields)):
        assert plan.fp8_min_rows == 0 and decisions_named(plan, "activations") == []


def test_every_prefill_step_quantises_and_decode_steps_of_many_rows_do() -> None:
    plan = plan_for(fp8_model(), batch_sizes=(1, 16, 17, 64))
    assert [bucket.name for bucket in plan.buckets if plan.quantises_inputs(bucket)][-2:] == ["decode:17", "decode:64"]
    assert all(map(plan.quantises_inputs, plan.prefill_buckets)) and plan.prefill_buckets[0].min_size
    static = plan_for(fp8_model(), buckets=(8, 512), batch_sizes=(4, 8))
    assert static.fp8_min_rows == 8 and all(map(static.quantises_inputs, static.prefill_buckets))
    assert [static.quantises_inputs(bucket) for bucket in static.decode_buckets] == [False, True]
    off = plan_for(fp8_model(), fp8_activations="off")
    assert not any(map(off.quantises_inputs, off.buckets))


def test_the_plan_key_depends_on_fp8_activations() -> None:
    keys = {plan_for(fp8_model(), fp8_activations=choice).key for choice in ("auto", "off")}
    assert len(keys) == 2


def test_a_recipe_file_and_a_variable_set_fp8_activations(tmp_path: Any) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model: m\nfp8_activations: 'off'\n")
    assert build_recipe({}, str(path), {}).fp8_activations == "off"
    assert build_recipe({}, str(path), {"TCDEPLOY_FP8_ACTIVATIONS": "auto"}).fp8_activations == "auto"
    with pytest.raises(RecipeError, match="TCDEPLOY_FP8_ACTIVATIONS is 'on'"):
        build_recipe({}, str(path), {"TCDEPLOY_FP8_ACTIVATIONS": "on"})


def test_a_dry_run_shows_the_line_activations() -> None:
    plan, *_ = plan_with_findings(make_recipe(), H100, fp8_model())
    assert decision_named(plan, "activations").value.startswith("fp8 (prefill steps")
