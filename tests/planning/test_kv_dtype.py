"""`--kv-dtype fp8`: half the bytes per KV block, backends that read FP8, and errors that name what prevents it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tcdeploy.bench.floor import kv_read_bytes
from tcdeploy.errors import RecipeError, UsageError
from tcdeploy.planning.architecture import Architecture, NoState
from tcdeploy.planning.dry_run import plan_with_findings
from tcdeploy.planning.environment import Environment
from tcdeploy.planning.plan import Plan, make_plan
from tcdeploy.planning.recipe import build_recipe
from tests.machines import (
    A10G,
    GEMMA_2_9B,
    H100,
    LLAMA_8B,
    RTX_4080,
    changed_environment,
    decision_named,
    decisions_named,
    make_recipe,
)


def plan_for(environment: Environment = H100, architecture: Architecture = LLAMA_8B, **fields: Any) -> Plan:
    return make_plan(make_recipe(**{"kv_dtype": "fp8", **fields}), environment, architecture)


@pytest.mark.parametrize("architecture", [LLAMA_8B, GEMMA_2_9B], ids=["llama", "gemma"])
def test_the_same_memory_holds_twice_the_blocks(architecture: Architecture) -> None:
    plan, default = (plan_for(architecture=architecture, batch_sizes=(1, 64), kv_dtype=kv) for kv in ("fp8", "auto"))
    assert (default.kv_dtype, plan.kv_dtype) == ("bfloat16", "float8_e4m3fn")
    assert plan.kv_blocks in (2 * default.kv_blocks, 2 * default.kv_blocks + 1)
    assert plan.kv_bytes == plan.kv_blocks * plan.block_size * architecture.kv_elements_per_token
    assert (plan.weight_dtype, plan.compute_dtype) == ("bfloat16", "bfloat16")
    assert plan.key != default.key


def test_the_plan_gives_the_reason_and_is_silent_by_default() -> None:
    decision = decision_named(plan_for(), "KV dtype")
    assert (decision.value, decision.is_fallback) == ("float8_e4m3fn", False)
    assert decision.reason == "requested; K and V take half of their memory in bfloat16"
    in_float32 = decision_named(plan_for(dtype="float32"), "KV dtype")
    assert in_float32.reason == "requested; K and V take a quarter of their memory in float32"
    assert decisions_named(plan_for(kv_dtype="auto"), "KV dtype") == []


def test_each_token_of_the_context_is_read_in_half_the_bytes() -> None:
    bytes_read = [kv_read_bytes(LLAMA_8B, plan_for(kv_dtype=kv).kv_dtype, 1000) for kv in ("auto", "fp8")]
    assert bytes_read == [131_072_000, 65_536_000]


def test_backends_that_read_16_bits_are_neither_chosen_nor_timed() -> None:
    packages = replace(H100, flash_packages=(("flash-attn-2", "2.8.3"), ("flash-attn-4", "4.0.0")))
    assert plan_for(packages, kv_dtype="auto").alternative_attention == ("flash-attn-4",)
    plan = plan_for(packages)
    assert (plan.prefill_attention, plan.decode_attention, plan.alternative_attention) == ("triton", "triton", ())
    for requested in ("torch-flash", "flash-attn-2", "flash-attn-4"):
        with pytest.raises(
            UsageError, match=f"attention {requested} cannot be used: it reads K and V only in"
        ) as error:
            plan_for(packages, attention=requested)
        assert error.value.hint == "omit --attention to use the best supported backend"
    assert plan_for(packages, attention="reference").decode_attention == "reference"


def test_without_triton_the_reference_reads_fp8_and_the_plan_says_why() -> None:
    plan = plan_for(changed_environment(H100, triton=""))
    assert (plan.prefill_attention, plan.decode_attention) == ("reference", "reference")
    decision = decision_named(plan, "prefill attention")
    assert decision.is_fallback
    assert "not torch-flash: it reads K and V only in bfloat16 and float16, and --kv-dtype fp8" in decision.reason


def test_a_gpu_that_does_not_convert_fp8_is_refused_by_name() -> None:
    with pytest.raises(
        UsageError, match="--kv-dtype fp8 cannot be used: .*A10G has compute capability 8.6.* 8.9"
    ) as error:
        plan_for(A10G)
    assert error.value.hint == "omit --kv-dtype"
    assert plan_for(A10G, device="cpu", architecture=replace(LLAMA_8B, weight_bytes={"float32": 1 << 20}))
    assert plan_for(RTX_4080, context=4096, dtype="float16", architecture=replace(
        LLAMA_8B, weight_bytes={"float16": 1 << 30})).kv_dtype == "float8_e4m3fn"  # fmt: skip


def test_a_model_without_k_and_v_is_refused() -> None:
    architecture = replace(LLAMA_8B, model_type="mamba", layer_states=(NoState("model.layers.0.mixer"),))
    with pytest.raises(UsageError, match="--kv-dtype fp8 cannot be used: no layer of mamba keeps K and V"):
        plan_for(architecture=architecture)
    with pytest.raises(UsageError, match="no layer of mamba keeps K and V"):
        plan_with_findings(make_recipe(kv_dtype="fp8"), H100, architecture)


def test_recipe_file_variable_and_flag_set_it(tmp_path: Any) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model: m\nkv_dtype: fp8\n")
    assert build_recipe({}, str(path), {}).kv_dtype == "fp8"
    assert build_recipe({}, str(path), {"TCDEPLOY_KV_DTYPE": "auto"}).kv_dtype == "auto"
    assert build_recipe({"kv_dtype": "fp8"}, None, {"TCDEPLOY_MODEL": "m"}).kv_dtype == "fp8"
    with pytest.raises(RecipeError, match="TCDEPLOY_KV_DTYPE is 'int8'"):
        build_recipe({}, str(path), {"TCDEPLOY_KV_DTYPE": "int8"})


def test_a_dry_run_shows_it() -> None:
    plan, *_ = plan_with_findings(make_recipe(kv_dtype="fp8"), H100, LLAMA_8B)
    assert decision_named(plan, "KV dtype").value == "float8_e4m3fn"
