"""Planning: every automatic choice and its reason, contradictory requests, and the key."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tcdeploy.errors import SpaceError, UsageError
from tcdeploy.planning import sizes as sizes_module
from tcdeploy.planning.architecture import Architecture, digest_config
from tcdeploy.planning.backends import BACKENDS
from tcdeploy.planning.environment import AOT_PACKAGES, DYNAMIC_SIZES, Environment
from tcdeploy.planning.memory import Workspace
from tcdeploy.planning.plan import Bucket, Plan, _plan_key, make_plan
from tcdeploy.planning.sizes import GPU_BATCH_SIZES, graph_shapes, graph_sizes, mixed_row_slots
from tcdeploy.planning.variants import DEFAULT, untimed_variants
from tests.machines import (
    A10G,
    ALL_FLASH,
    DEEPSEEK_LITE,
    GEMMA_2_9B,
    GIB,
    GPT_OSS_20B,
    H100,
    LAPTOP,
    LLAMA_1B,
    LLAMA_8B,
    QWEN3_32B,
    RTX_4080,
    changed_environment,
    decision_named,
    decisions_named,
    make_recipe,
)


def plan_for(environment: Environment = H100, architecture: Architecture = LLAMA_8B, **options: Any) -> Plan:
    return make_plan(make_recipe(**options), environment, architecture)


def with_packages(*backends: str) -> Environment:
    return replace(H100, flash_packages=tuple(item for item in ALL_FLASH if item[0] in backends))


def usage_error(environment: Environment = H100, architecture: Architecture = LLAMA_8B, **options: Any) -> UsageError:
    """The UsageError that planning raises."""
    with pytest.raises(UsageError) as caught:
        plan_for(environment, architecture, **options)
    assert caught.value.exit_code == 2
    return caught.value


# The plan as a whole


@pytest.mark.parametrize("environment", [H100, LAPTOP], ids=["H100", "laptop"])
def test_every_decision_has_a_value_and_a_reason(environment: Environment) -> None:
    plan = plan_for(environment, context=4096)
    names = [decision.name for decision in plan.decisions]
    by_device = ["workspace"] if environment.gpus else []
    assert sorted(names) == sorted(
        ["device", "dtype", "prefill attention", "decode attention", "graphs", "context", "decode buckets",
         "prefill buckets", "block size", "KV blocks", "region", "mode", "mixed steps", "ITL target",
         "cache folder", *by_device]
    )  # fmt: skip
    assert all(decision.value and decision.reason for decision in plan.decisions)
    assert not any(decision.is_fallback for decision in plan.decisions)


def test_a_dynamic_bucket_is_captured_at_many_sizes_and_padded_little() -> None:
    plan = plan_for(shapes="dynamic", buckets=(2048,))
    [bucket] = plan.prefill_buckets
    assert plan.uses_cuda_graph(bucket)
    sizes = plan.step_sizes(bucket)
    assert sizes[:3] == (32, 64, 96) and sizes[-2:] == (1984, 2048) and len(sizes) == 40
    for tokens in range(1, 2049):
        padding = next(size for size in sizes if size >= tokens) - tokens
        assert padding < 32 or padding / tokens < 0.25
    mean = sum(next(size for size in sizes if size >= tokens) - tokens for tokens in range(512, 1537)) / 1025
    assert mean / 1024 < 0.05
    laptop = plan_for(LAPTOP, shapes="dynamic", buckets=(2048,))
    assert laptop.step_sizes(laptop.prefill_buckets[0]) == (), "without CUDA graphs no size is fixed"
    [static] = plan_for(buckets=(512,)).prefill_buckets
    assert plan_for(buckets=(512,)).step_sizes(static) == (512,)


def test_graph_sizes_end_at_the_largest_bucket() -> None:
    assert graph_sizes(100) == (32, 64, 96, 100)
    assert graph_sizes(32) == (32,) and graph_sizes(3) == (3,)
    assert graph_sizes(10_000)[-3:] == (8192, 9216, 10_000)


@pytest.mark.parametrize(
    ("batch_sizes", "row_slots"),
    [
        (GPU_BATCH_SIZES, (0, 32, 128, 256)),
        ((1, 4), (0, 4)),
        ((1, 4, 16, 32, 64), (0, 32, 64)),
        ((1, 2, 200), (0, 200)),
        ((31, 33, 131, 132, 133), (0, 33, 132, 133)),
        ((7,), (0, 7)),
        ((64,), (0, 64)),
    ],
)
def test_mixed_steps_have_few_numbers_of_row_slots(batch_sizes: tuple[int, ...], row_slots: tuple[int, ...]) -> None:
    plan = plan_for(batch_sizes=batch_sizes, context=4096)
    assert plan.row_slots(plan.prefill_buckets[0]) == row_slots
    assert plan.row_slots(plan.decode_buckets[-1]) == (0,)
    separate = plan_for(mixed_steps="off", batch_sizes=batch_sizes, context=4096)
    assert separate.row_slots(separate.prefill_buckets[0]) == (0,)


@given(
    batch_sizes=st.sets(st.integers(1, 300), min_size=1, max_size=8).map(lambda sizes: tuple(sorted(sizes))),
    sizes=st.sets(st.integers(1, 400), min_size=1, max_size=8).map(lambda sizes: tuple(sorted(sizes))),
)
def test_graphs_are_planned_for_exactly_the_steps_that_can_occur(
    batch_sizes: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    row_slots = mixed_row_slots(batch_sizes)
    sizes_of_tokens = [next(size for size in sizes if size >= tokens) for tokens in range(sizes[-1] + 1)]
    used = set()
    for decoding in range(batch_sizes[-1] + 1):
        slots = next(slots for slots in row_slots if slots >= decoding)
        used |= {(size, slots) for size in set(sizes_of_tokens[decoding + 1 :])}
    planned = graph_shapes(sizes, row_slots)
    assert list(planned) == sorted(used)


@pytest.mark.parametrize("shapes", ["bucket", "dynamic"])
@pytest.mark.parametrize("mixed_steps", ["on", "off"])
@pytest.mark.parametrize("attention", ["triton", "torch-flash"])
def test_the_workspace_counts_the_graphs_of_the_plan(
    shapes: str, mixed_steps: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    predict = sizes_module.predict_workspace

    def recorded(*args: Any) -> Workspace:
        counts.append(args[-1])
        return predict(*args)

    monkeypatch.setattr(sizes_module, "predict_workspace", recorded)
    plan = plan_for(shapes=shapes, mixed_steps=mixed_steps, attention=attention)
    planned = sum(len(plan.graph_shapes(bucket)) for bucket in plan.buckets if plan.uses_cuda_graph(bucket))
    assert counts[-1] == planned > 0
    assert plan_for(graphs="none").workspace_bytes < plan_for().workspace_bytes


@pytest.mark.parametrize("environment", [H100, LAPTOP], ids=["H100", "laptop"])
def test_steps_are_mixed_by_default(environment: Environment) -> None:
    mixed, separate = plan_for(environment), plan_for(environment, mixed_steps="off")
    assert mixed.mixed_steps and not separate.mixed_steps
    assert mixed.key != separate.key, "mixed steps have programs of their own"


def test_prefill_shapes_are_dynamic_by_default_where_steps_are_graphs_and_no_bucket_is_requested() -> None:
    def is_dynamic(environment: Environment = H100, **options: Any) -> bool:
        return bool(plan_for(environment, **options).prefill_buckets[-1].min_size)

    assert is_dynamic() and not is_dynamic(LAPTOP)
    assert not is_dynamic(buckets=(512, 2048)) and is_dynamic(buckets=(2048,), shapes="dynamic")
    assert not is_dynamic(shapes="bucket") and is_dynamic(LAPTOP, shapes="dynamic")
    assert not is_dynamic(graphs="none") and not is_dynamic(graphs="region") and not is_dynamic(mode="default")
    assert not is_dynamic(context=2) and is_dynamic(context=3)


def test_prefill_attention_that_is_not_captured_has_buckets_and_separate_steps_by_default() -> None:
    """Otherwise sequences would decode without a CUDA graph while prompts are computed."""
    plan = plan_for(attention="torch-flash")
    assert (plan.graphs, plan.mixed_steps) == ("step", False) and len(plan.prefill_buckets) == 3
    assert "without one" in decision_named(plan, "mixed steps").reason
    assert plan_for(attention="torch-flash", mixed_steps="on").mixed_steps
    assert plan_for(graphs="none").mixed_steps, "no step is captured"


def test_the_itl_target_is_no_input_of_a_program() -> None:
    plan = plan_for(LAPTOP, itl_target=20.0)
    assert plan.itl_target == 20.0 and plan.key == plan_for(LAPTOP).key and plan_for(LAPTOP).itl_target is None
    assert decision_named(plan, "ITL target").value == "20 ms"
    assert decision_named(plan_for(LAPTOP), "ITL target").value == "3 decode steps"


def test_an_itl_target_without_mixed_steps_is_reported_as_unused() -> None:
    decision = decision_named(plan_for(itl_target=20.0, mixed_steps="off"), "ITL target")
    assert decision.is_fallback and "not mixed" in decision.reason
    assert not decisions_named(plan_for(mixed_steps="off"), "ITL target")


@pytest.mark.parametrize("target", [0.0, -1.0, float("nan"), float("inf")])
def test_an_itl_target_must_be_positive_and_finite(target: float) -> None:
    assert "itl_target" in usage_error(itl_target=target).message


def test_steps_are_not_mixed_with_one_graph_per_region() -> None:
    assert not plan_for(graphs="region").mixed_steps
    with pytest.raises(UsageError, match="graph for each number of rows"):
        plan_for(graphs="region", mixed_steps="on")


def test_the_plan_of_an_h100() -> None:
    plan = plan_for(context=16384)
    assert (plan.device, plan.compute_dtype, plan.graphs) == ("cuda", "bfloat16", "step")
    assert (plan.prefill_attention, plan.decode_attention) == ("triton", "triton")
    assert [bucket.name for bucket in plan.buckets] == [
        "prefill:2-2048",
        "decode:1", "decode:4", "decode:16", "decode:32", "decode:64", "decode:128", "decode:256",
    ]  # fmt: skip
    assert (plan.mode, plan.tune_seconds) == ("auto", 0.0)
    assert (plan.max_prefill_sequences, plan.block_size, plan.blocks_per_sequence) == (8, 16, 1024)


def test_the_plan_of_a_laptop() -> None:
    plan = plan_for(LAPTOP)
    assert (plan.device, plan.compute_dtype, plan.graphs) == ("cpu", "float32", "none")
    assert (plan.prefill_attention, plan.decode_attention) == ("reference", "reference")
    assert [bucket.name for bucket in plan.decode_buckets] == ["decode:1", "decode:4"]


def test_a_plan_contains_the_model_options_of_the_recipe() -> None:
    plan = plan_for(model="a/b", revision="v2", load_format="dummy", trust_remote_code=True, region="blocks")
    assert (plan.model, plan.revision, plan.load_format, plan.trust_remote_code) == ("a/b", "v2", "dummy", True)
    assert (plan.region, decision_named(plan, "region").value) == ("blocks", "blocks")


def test_a_plan_is_frozen_all_the_way_down() -> None:
    plan = plan_for()
    with pytest.raises(FrozenInstanceError):
        plan.context = 1  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        plan.buckets[0].size = 1  # type: ignore[misc]
    hash(plan)


def test_a_plan_depends_on_its_arguments_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = plan_for()
    monkeypatch.setenv("TCDEPLOY_CONTEXT", "64")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert plan_for() == before


# Device and dtype


def test_the_default_device_is_the_gpu_if_present() -> None:
    assert decision_named(plan_for(), "device").reason == "the GPU is NVIDIA H100 80GB HBM3"
    assert decision_named(plan_for(LAPTOP), "device").reason == "torch sees no GPU"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_requested_device_is_used(device: str) -> None:
    plan = plan_for(device=device)
    assert (plan.device, decision_named(plan, "device").reason) == (device, "requested")


def test_requesting_an_absent_gpu_is_an_error() -> None:
    error = usage_error(LAPTOP, device="cuda")
    assert "torch sees no GPU" in error.message
    assert "--device cpu" in error.hint


@pytest.mark.parametrize(
    ("environment", "checkpoint", "dtype", "reason"),
    [
        (H100, "bfloat16", "bfloat16", "the checkpoint's dtype"),
        (H100, "float16", "float16", "the checkpoint's dtype"),
        (H100, "float32", "bfloat16", "the checkpoint is float32; bfloat16 halves the bytes read per token"),
        (LAPTOP, "bfloat16", "float32", "default on a CPU; generates the same text as transformers"),
    ],
)
def test_the_dtype_follows_device_and_checkpoint(
    environment: Environment, checkpoint: str, dtype: str, reason: str
) -> None:
    plan = plan_for(environment, replace(LLAMA_8B, dtype=checkpoint))
    assert (plan.compute_dtype, decision_named(plan, "dtype").reason) == (dtype, reason)


@pytest.mark.parametrize("environment", [H100, LAPTOP], ids=["H100", "laptop"])
def test_a_requested_dtype_is_used(environment: Environment) -> None:
    plan = plan_for(environment, dtype="float16")
    assert (plan.compute_dtype, decision_named(plan, "dtype").reason) == ("float16", "requested")


# Attention


@pytest.mark.parametrize(
    ("packages", "chosen"),
    [
        (("flash-attn-2", "flash-attn-4"), "triton"),
        ((), "triton"),
    ],
)
def test_prefill_attention_is_chosen_in_the_order_of_preference(packages: tuple[str, ...], chosen: str) -> None:
    plan = plan_for(with_packages(*packages))
    decision = decision_named(plan, "prefill attention")
    assert (plan.prefill_attention, decision.value, decision.is_fallback) == (chosen, chosen, False)


def test_a_choice_gives_its_reason_and_the_rejected_backends() -> None:
    first = decision_named(plan_for(with_packages("flash-attn-2")), "prefill attention").reason
    assert first == BACKENDS["triton"].prefill_reason
    second = decision_named(plan_for(without_triton()), "prefill attention").reason
    assert second == BACKENDS["torch-flash"].prefill_reason + "; not triton: triton is not installed"


def without_triton(*packages: str) -> Environment:
    return replace(with_packages(*packages), triton="")


def test_without_triton_torchs_flash_attention_is_preferred_to_the_package() -> None:
    assert plan_for(without_triton("flash-attn-2")).prefill_attention == "torch-flash"


def test_flash_attention_4_is_used_only_on_request() -> None:
    machine = with_packages("flash-attn-4")
    assert plan_for(machine).prefill_attention == "triton"
    plan = plan_for(machine, attention="flash-attn-4")
    assert (plan.prefill_attention, decision_named(plan, "prefill attention").reason) == ("flash-attn-4", "requested")


def test_a_soft_capped_model_does_not_use_torchs_flash_attention() -> None:
    plan = plan_for(without_triton("flash-attn-2"), GEMMA_2_9B)
    assert plan.prefill_attention == "flash-attn-2"
    reason = decision_named(plan, "prefill attention").reason
    assert "not torch-flash: it does not support logit soft-capping, which this model uses" in reason
    assert "not triton: triton is not installed" in reason


def test_sinks_do_not_change_the_choice() -> None:
    assert plan_for(architecture=GPT_OSS_20B, context=4096).prefill_attention == "triton"
    assert plan_for(without_triton(), GPT_OSS_20B, context=4096).prefill_attention == "torch-flash"


def test_unequal_head_dims_use_triton_or_the_reference() -> None:
    assert plan_for(H100, DEEPSEEK_LITE).prefill_attention == "triton"
    plan = plan_for(replace(H100, flash_packages=ALL_FLASH, triton=""), DEEPSEEK_LITE)
    assert plan.prefill_attention == "reference"
    reason = decision_named(plan, "prefill attention").reason
    for backend in ("torch-flash", "flash-attn-2"):
        assert f"not {backend}: keys have head_dim 192 and values 128" in reason


def test_float32_on_a_gpu_needs_triton() -> None:
    assert plan_for(with_packages("flash-attn-2"), dtype="float32").prefill_attention == "triton"
    plan = plan_for(without_triton("flash-attn-2"), dtype="float32")
    assert plan.prefill_attention == "reference"
    assert "only bfloat16 and float16" in decision_named(plan, "prefill attention").reason


def test_unsupported_head_dims_fall_back_in_prefill_and_decode() -> None:
    wide = tuple(replace(spec, head_dim=1024, v_head_dim=1024) for spec in LLAMA_8B.attention_layers)
    plan = plan_for(architecture=replace(LLAMA_8B, layer_states=wide), context=2048)
    assert (plan.prefill_attention, plan.decode_attention, plan.graphs) == ("reference", "reference", "none")
    assert decision_named(plan, "decode attention").is_fallback and decision_named(plan, "graphs").is_fallback


def test_the_reference_cannot_be_captured() -> None:
    plan = plan_for(attention="reference")
    assert (plan.graphs, decision_named(plan, "graphs").is_fallback) == ("none", True)
    with pytest.raises(UsageError, match="reads lengths"):
        plan_for(attention="reference", graphs="step")


def test_dynamic_shapes_exclude_region_graphs() -> None:
    with pytest.raises(UsageError, match="every length"):
        plan_for(shapes="dynamic", graphs="region")


def test_longrope_limits_the_context() -> None:
    longrope = replace(LLAMA_8B, rope_limit=4096)
    plan = plan_for(architecture=longrope, context=None)
    assert plan.context == 4096 and decision_named(plan, "context").is_fallback
    assert plan_for(architecture=longrope, context=4000).context == 4000
    with pytest.raises(UsageError, match="4096"):
        plan_for(architecture=longrope, context=4097)


def test_without_any_kernel_the_reference_is_marked_as_a_fallback() -> None:
    plan = plan_for(changed_environment(H100, triton="", gpu_capability=(7, 5)))
    prefill, decode = decision_named(plan, "prefill attention"), decision_named(plan, "decode attention")
    assert (plan.prefill_attention, plan.decode_attention) == ("reference", "reference")
    assert prefill.is_fallback and decode.is_fallback
    assert "not torch-flash: it has no kernels for compute capability 7.5" in prefill.reason
    assert decode.reason == "plain PyTorch; not triton: triton is not installed"


def test_on_a_cpu_the_reference_is_not_a_fallback() -> None:
    plan = plan_for(LAPTOP, context=4096)
    assert decision_named(plan, "prefill attention").reason == "the other backends require a GPU"
    assert decision_named(plan, "decode attention").reason == "the other backends require a GPU"
    assert not any(decision.is_fallback for decision in plan.decisions)


def test_a_requested_reference_also_serves_decode() -> None:
    plan = plan_for(attention="reference")
    assert (plan.prefill_attention, plan.decode_attention) == ("reference", "reference")
    assert decision_named(plan, "decode attention").reason == "requested"


@pytest.mark.parametrize(
    ("environment", "architecture", "attention", "reason"),
    [
        (LAPTOP, LLAMA_8B, "triton", "it requires a GPU"),
        (replace(H100, triton=""), LLAMA_8B, "triton", "triton is not installed"),
        (H100, LLAMA_8B, "flash-attn-2", "flash-attn is not installed"),
        (changed_environment(H100, gpu_capability=(7, 5)), LLAMA_8B, "torch-flash", "compute capability 7.5"),
        (H100, GEMMA_2_9B, "torch-flash", "soft-capping"),
        (H100, DEEPSEEK_LITE, "torch-flash", "keys have head_dim 192 and values 128"),
        (with_packages("flash-attn-4"), GEMMA_2_9B, "flash-attn-4", "not a multiple of 8 up to 128"),
    ],
)
def test_requesting_unsupported_attention_is_an_error_with_the_reason(
    environment: Environment, architecture: Architecture, attention: str, reason: str
) -> None:
    error = usage_error(environment, architecture, attention=attention)
    assert error.message.startswith(f"attention {attention} cannot be used: ")
    assert reason in error.message
    assert "--attention" in error.hint


# Graphs and mode


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("graphs", [None, "step", "region", "none"])
def test_graphs_default_to_whole_steps(mode: str, graphs: str | None) -> None:
    plan = plan_for(mode=mode, graphs=graphs)
    assert (plan.mode, plan.graphs) == (mode, graphs or "step")
    assert decision_named(plan, "graphs").reason == (
        "requested" if graphs else decision_named(plan_for(), "graphs").reason
    )
    assert not decision_named(plan, "graphs").is_fallback


@pytest.mark.parametrize("graphs", [None, "none"])
def test_mode_default_does_not_use_graphs(graphs: str | None) -> None:
    plan = plan_for(mode="default", graphs=graphs)
    assert (plan.graphs, decision_named(plan, "graphs").reason) == ("none", "mode default does not use CUDA graphs")


@pytest.mark.parametrize("graphs", ["step", "region"])
def test_mode_default_excludes_graphs(graphs: str) -> None:
    error = usage_error(mode="default", graphs=graphs)
    assert graphs in error.message
    assert error.hint == f"--mode reduce-overhead --graphs {graphs}"


@pytest.mark.parametrize(("graphs", "is_fallback"), [(None, False), ("none", False), ("step", True), ("region", True)])
def test_requested_graphs_on_a_cpu_are_marked_as_a_fallback(graphs: str | None, is_fallback: bool) -> None:
    plan = plan_for(LAPTOP, graphs=graphs)
    assert plan.graphs == "none"
    assert decision_named(plan, "graphs").is_fallback is is_fallback


def test_the_mode_is_explained() -> None:
    assert decision_named(plan_for(mode="max-autotune"), "mode").reason == "autotuned kernels"
    assert decision_named(plan_for(mode="reduce-overhead"), "mode").reason == "Inductor's default kernels"
    assert decision_named(plan_for(), "mode").reason == (
        "for each bucket the variant known to be fastest; not timed here without --tune-seconds"
    )
    assert "120 s" in decision_named(plan_for(tune_seconds=120), "mode").reason


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_every_mode_but_auto_uses_one_variant(mode: str) -> None:
    plan = plan_for(mode=mode)
    assert {len(plan.variants(bucket)) for bucket in plan.buckets} == {1}


@pytest.mark.parametrize("environment", [H100, LAPTOP], ids=["H100", "laptop"])
def test_mode_auto_tries_several_variants_with_distinct_names(environment: Environment) -> None:
    plan = plan_for(environment, mode="auto")
    for bucket in plan.buckets:
        names = [variant.name for variant in plan.variants(bucket)]
        assert len(set(names)) == len(names) > 1


def first_variants(
    environment: Environment = H100, architecture: Architecture = LLAMA_8B, **options: Any
) -> dict[str, str]:
    plan = plan_for(environment, architecture, **{"context": 8192, "batch_sizes": (1, 64, 65), **options})
    return {bucket.name: plan.variants(bucket)[0].name for bucket in plan.buckets}


def test_on_hopper_the_known_winner_of_each_size_comes_first() -> None:
    assert first_variants(buckets=(128, 256, 511, 512, 2047, 2048, 8192)) == {
        "prefill:128": "default",
        "prefill:256": "default",
        "prefill:511": "default",
        "prefill:512": "last-token-rows",
        "prefill:2047": "last-token-rows",
        "prefill:2048": "last-token-rows+inplace",
        "prefill:8192": "last-token-rows+inplace",
        "decode:1": "skinny+pdl+combo+fused",
        "decode:64": "skinny+pdl+combo+fused",
        "decode:65": "pdl+combo",
    }
    assert set(first_variants(region="blocks", buckets=(128, 512, 2048), batch_sizes=(128,)).values()) == {
        "default",
        "pdl+combo",
    }


@pytest.mark.parametrize(
    ("quantised", "tries_first"),
    [
        ({"schemes": {"int4_bfloat16_interleaved": 7}}, ["skinny+pdl+combo+fused"]),
        ({"schemes": {"int4_bfloat16_zeros": 7}}, []),
        ({"schemes": {"fp8_channel": 7}}, []),
        ({"schemes": {"int4_bfloat16_interleaved": 4}, "expert_schemes": {"int4_bfloat16": 2}}, []),
        ({"expert_schemes": {"mxfp4": 2}}, []),
    ],
    ids=["int4", "int4 with zero points", "fp8", "int4 experts", "mxfp4 experts"],
)
def test_only_large_decode_steps_of_int4_layers_try_our_products_first(
    quantised: dict[str, dict[str, int]], tries_first: list[str]
) -> None:
    """The whole steps of the others were not timed with them."""
    model = replace(LLAMA_8B, quantisation="int4", **quantised)  # type: ignore[arg-type]
    plan, dense = (plan_for(H100, architecture, mode="auto", batch_sizes=(256,)) for architecture in (model, LLAMA_8B))
    names, dense_names = ([variant.name for variant in p.variants(p.decode_buckets[0])] for p in (plan, dense))
    assert names == [*tries_first, *dense_names]


@pytest.mark.parametrize("environment", [A10G, LAPTOP], ids=["A10G", "laptop"])
def test_elsewhere_the_default_variant_comes_first(environment: Environment) -> None:
    assert set(first_variants(environment, architecture=LLAMA_1B).values()) == {"default"}


@pytest.mark.parametrize("environment", [H100, A10G, LAPTOP], ids=["H100", "A10G", "laptop"])
def test_without_timing_no_variant_is_tried_that_tunes_kernels_or_imports_a_package(environment: Environment) -> None:
    packages = replace(environment, flash_packages=ALL_FLASH)
    plan = plan_for(packages, LLAMA_1B, buckets=(128, 511, 512, 2048, 4096), batch_sizes=(1, 4, 64, 128))
    for bucket in plan.buckets:
        untimed = untimed_variants(plan.variants(bucket))
        assert untimed[-1] == DEFAULT and untimed == plan.variants(bucket)[: len(untimed)]
        settings_used = {name for variant in untimed for name, _ in variant.inductor_config}
        assert not settings_used & {"max_autotune", "coordinate_descent_tuning"}
        assert not any(variant.attention for variant in untimed)
    [max_autotune] = plan_for(mode="max-autotune").variants(plan.buckets[0])
    assert untimed_variants((max_autotune,)) == (max_autotune,)


def test_prefill_is_captured_if_its_attention_reads_nothing_on_the_host() -> None:
    def captured(**options: Any) -> list[bool]:
        plan = plan_for(**options)
        return [plan.uses_cuda_graph(bucket) for bucket in (plan.prefill_buckets[0], plan.decode_buckets[0])]

    assert captured() == [True, True]
    assert captured(attention="torch-flash") == [False, True]
    assert captured(shapes="dynamic") == [True, True]
    assert captured(graphs="region") == captured(graphs="none") == [False, False]


def test_the_predicted_workspace_is_left_free() -> None:
    plan = plan_for(context=131072, memory_fraction=1.0)
    assert 0 < plan.workspace_bytes < 3 * 2**30
    assert plan.weight_bytes + plan.kv_bytes + plan.workspace_bytes <= H100.gpu_memory_bytes
    assert plan_for(LAPTOP).workspace_bytes == 0


# Context, buckets, blocks


def test_the_context_is_the_model_s_maximum_or_as_requested() -> None:
    default, requested = plan_for(architecture=GEMMA_2_9B), plan_for(context=4096)
    assert (default.context, decision_named(default, "context").reason) == (8192, "the model's maximum")
    assert (requested.context, decision_named(requested, "context").reason) == (4096, "requested")
    assert plan_for(context=131072).context == 131072


@pytest.mark.parametrize(
    ("environment", "architecture", "largest_batch", "context"),
    [
        (H100, LLAMA_1B, 256, 131072),
        (H100, LLAMA_8B, 256, 131072),
        (H100, QWEN3_32B, 32, 35200),
        (A10G, LLAMA_1B, 256, 131072),
        (A10G, LLAMA_8B, 32, 43536),
        (RTX_4080, LLAMA_1B, 256, 131072),
    ],
    ids=["H100 1B", "H100 8B", "H100 32B", "A10G 1B", "A10G 8B", "RTX 4080 1B"],
)
def test_default_batch_sizes_and_context_follow_from_the_memory(
    environment: Environment, architecture: Architecture, largest_batch: int, context: int
) -> None:
    plan = plan_for(environment, architecture)
    sizes = tuple(bucket.size for bucket in plan.decode_buckets)
    assert sizes == GPU_BATCH_SIZES[: GPU_BATCH_SIZES.index(largest_batch) + 1]
    assert [bucket.size for bucket in plan.prefill_buckets] == [2048]
    assert (plan.kv_blocks - 1) * plan.block_size >= largest_batch * 1024
    assert plan.context == context
    held = (plan.kv_blocks - 1) * plan.block_size // 1024
    assert f"holds {held} sequences of 1024 tokens" in decision_named(plan, "decode buckets").reason
    decision = decision_named(plan, "context")
    is_shortened = context < architecture.context
    assert decision.is_fallback is is_shortened
    assert (str(architecture.context) in decision.reason) is is_shortened
    used = plan.weight_bytes + plan.kv_bytes + plan.workspace_bytes
    assert used <= 0.9 * environment.gpu_memory_bytes


@pytest.mark.parametrize(
    ("environment", "architecture"), [(A10G, QWEN3_32B), (RTX_4080, LLAMA_8B), (RTX_4080, QWEN3_32B)]
)
def test_a_model_that_does_not_fit_is_refused_with_its_size(
    environment: Environment, architecture: Architecture
) -> None:
    with pytest.raises(SpaceError, match="weights leave no memory for KV") as caught:
        plan_for(environment, architecture)
    assert caught.value.hint == "use a smaller model, a smaller --dtype, or more memory"


def test_one_more_sequence_of_kv_memory_brings_the_next_batch_size() -> None:
    def largest_batch(kv_tokens: int, **options: Any) -> int:
        return plan_for(kv_blocks=kv_tokens // 16 + 1, **options).decode_buckets[-1].size

    assert largest_batch(64 * 1024) == 64
    assert largest_batch(64 * 1024 - 16) == 32
    assert largest_batch(64 * 512, context=512) == 64, "a shorter context is the typical length"
    assert largest_batch(3 * 1024) == 4
    assert "holds 3 sequences" in decision_named(plan_for(kv_blocks=3 * 64 + 1), "decode buckets").reason


def test_requested_batch_sizes_do_not_depend_on_the_memory() -> None:
    sizes = (1, 8, 300)
    plan = plan_for(A10G, batch_sizes=sizes)
    assert tuple(bucket.size for bucket in plan.decode_buckets) == sizes
    assert decision_named(plan, "decode buckets").reason == "requested"
    with pytest.raises(SpaceError, match="the buckets need 5001, memory holds"):
        plan_for(A10G, batch_sizes=(1, 5000))


@given(memory_gib=st.floats(17.0, 200.0), context=st.integers(64, 131072), block_size=st.sampled_from([16, 64, 256]))
def test_default_batch_sizes_fit_or_are_the_smallest(memory_gib: float, context: int, block_size: int) -> None:
    environment = changed_environment(H100, gpu_memory_bytes=int(memory_gib * GIB))
    try:
        plan = plan_for(environment, context=context, block_size=block_size)
    except SpaceError:
        return
    sizes = tuple(bucket.size for bucket in plan.decode_buckets)
    assert sizes == GPU_BATCH_SIZES[: len(sizes)] and len(sizes) >= 2
    blocks_of_batch = sizes[-1] * -(-min(context, 1024) // block_size)
    assert blocks_of_batch <= plan.kv_blocks - 1 or len(sizes) == 2


@pytest.mark.parametrize("context", [131073, 0, -1])
def test_a_context_above_the_model_s_maximum_is_an_error(context: int) -> None:
    error = usage_error(context=context)
    assert str(context) in error.message and "131072" in error.message
    assert error.hint == "--context 131072"


@pytest.mark.parametrize(
    ("buckets", "named"),
    [
        ((512, 128), "512,128"),
        ((128, 128), "128,128"),
        ((128, 512, 256), "128,512,256"),
        ((0,), "0"),
        ((0, 128), "0,128"),
        ((-128, 128), "-128,128"),
        ((), "none"),
    ],
)
def test_buckets_that_do_not_ascend_from_1_are_an_error_with_their_values(buckets: tuple[int, ...], named: str) -> None:
    assert f" {named} " in f"{usage_error(buckets=buckets).message} "
    assert f" {named} " in f"{usage_error(batch_sizes=buckets).message} "


def test_the_hint_for_unsorted_buckets_is_the_sorted_list() -> None:
    assert usage_error(buckets=(512, 128, 512)).hint == "128,512"
    assert usage_error(batch_sizes=(4, 1)).hint == "1,4"


def test_a_bucket_above_the_context_is_an_error_with_its_value() -> None:
    error = usage_error(context=1000, buckets=(128, 1001))
    assert "1001" in error.message and "1000" in error.message
    assert "chunks" in error.hint
    assert plan_for(context=1000, buckets=(128, 1000)).prefill_buckets[-1].size == 1000
    assert "131073" in usage_error(buckets=(131073,)).message


@pytest.mark.parametrize(("context", "sizes"), [(2048, [128, 512, 2048]), (2047, [128, 512]), (128, [128]), (64, [64])])
def test_default_buckets_end_at_the_context(context: int, sizes: list[int]) -> None:
    plan = plan_for(LAPTOP, context=context)
    assert [bucket.size for bucket in plan.prefill_buckets] == sizes
    assert str(context) in decision_named(plan, "prefill buckets").reason
    assert [bucket.size for bucket in plan_for(context=context).prefill_buckets] == sizes[-1:], "on a GPU"


@pytest.mark.parametrize("sizes", [(1,), (1, 4), (1, 32)])
def test_prefill_programs_do_not_depend_on_the_batch_sizes(sizes: tuple[int, ...]) -> None:
    assert plan_for(batch_sizes=sizes).max_prefill_sequences == 8


def test_dynamic_shapes_are_one_prefill_bucket_over_the_whole_range() -> None:
    plan = plan_for(shapes="dynamic", buckets=(128, 512), batch_sizes=(1, 4))
    assert plan.prefill_buckets == (Bucket("prefill", 512, 2),)
    assert plan.prefill_buckets[0].name == "prefill:2-512"
    assert [bucket.name for bucket in plan.decode_buckets] == ["decode:1", "decode:4"]
    assert decision_named(plan, "prefill buckets").value == "2-512"


@pytest.mark.parametrize("largest", [1, 2])
def test_a_dynamic_range_must_contain_more_than_one_length(largest: int) -> None:
    assert str(largest) in usage_error(shapes="dynamic", buckets=(largest,)).message
    assert plan_for(shapes="dynamic", buckets=(3,)).prefill_buckets[0].name == "prefill:2-3"


@pytest.mark.parametrize("size", [0, 1, 8, 15, 17, 24, 48, 100, -16])
def test_a_block_size_must_be_a_power_of_two_of_at_least_16(size: int) -> None:
    assert f"block size {size} " in usage_error(block_size=size).message


@pytest.mark.parametrize("size", [16, 32, 256])
def test_powers_of_two_are_block_sizes(size: int) -> None:
    plan = plan_for(block_size=size)
    assert (plan.block_size, decision_named(plan, "block size").reason) == (size, "requested")


def test_a_context_that_ends_inside_a_block_counts_that_block() -> None:
    assert plan_for(context=129, buckets=(64,)).blocks_per_sequence == 9
    assert plan_for(context=128, buckets=(64,)).blocks_per_sequence == 8


def test_a_context_limited_by_memory_is_marked_as_a_fallback() -> None:
    plan = plan_for(changed_environment(H100, gpu_memory_bytes=24 * GIB))
    assert plan.context == (plan.kv_blocks - 1) * plan.block_size < 131072
    *_, decision = decisions_named(plan, "context")
    assert decision.is_fallback
    assert (decision.value, decision.reason) == (
        str(plan.context),
        "as many tokens as the KV cache holds; the model's maximum is 131072",
    )


def test_a_requested_context_is_never_shortened() -> None:
    small = changed_environment(H100, gpu_memory_bytes=24 * GIB)
    with pytest.raises(SpaceError) as caught:
        plan_for(small, context=100_000)
    assert caught.value.exit_code == 7
    fitting = int(caught.value.hint.removeprefix("--context "))
    assert plan_for(small, context=fitting).context == fitting


def test_the_cache_folder_is_as_requested_or_torch_s_or_the_user_s() -> None:
    cases = [
        (plan_for(cache_dir="/requested"), "/requested", "requested"),
        (plan_for(replace(H100, inductor_cache_dir="/torch"), cache_dir="/requested"), "/requested", "requested"),
        (plan_for(replace(H100, inductor_cache_dir="/torch")), "/torch", "TORCHINDUCTOR_CACHE_DIR was already set"),
    ]
    for plan, folder, reason in cases:
        assert (plan.cache_dir, decision_named(plan, "cache folder").reason) == (folder, reason)
    assert plan_for().cache_dir == "/home/someone/.cache/tcdeploy"


# The key

SMALL = {"context": 4096, "buckets": (128, 512), "batch_sizes": (1, 4)}  # fits with room to spare on all machines here


def test_equal_inputs_have_equal_keys() -> None:
    assert plan_for(**SMALL).key == plan_for(replace(H100), replace(LLAMA_8B), **SMALL).key
    assert len(plan_for().key) == 16 and set(plan_for().key) <= set("0123456789abcdef")


@pytest.mark.parametrize("seed", ["1", "2"])
def test_the_key_is_the_same_in_another_process(seed: str) -> None:
    root = Path(__file__).resolve().parents[2]
    source = f"from tests.planning.test_plan import *; print(plan_for(**{SMALL!r}).key)"
    environ = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", source], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == plan_for(**SMALL).key


@pytest.mark.parametrize(
    "change",
    [
        {"python": "3.12.1"},
        {"torch": "2.12.0"},
        {"transformers": "5.24.0"},
        {"triton": "3.6.0"},
        {"cuda": "12.8"},
        {"gpu": "NVIDIA H200"},
        {"gpu_capability": (9, 1)},
        {"gpu_multiprocessors": 114},
        {"flash_packages": ALL_FLASH[:1]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_different_environment_has_a_different_key(change: dict[str, Any]) -> None:
    assert plan_for(changed_environment(H100, **change), **SMALL).key != plan_for(**SMALL).key


@pytest.mark.parametrize(
    "change",
    [{"cpu": "DEFAULT"}, {"cpu_threads": 3}, {"compiler": "g++ 12"}, {"install_paths": "/elsewhere"}],
    ids=lambda change: next(iter(change)),
)
def test_cpu_and_compiler_enter_the_key_only_on_a_cpu(change: dict[str, Any]) -> None:
    """GPU programs depend on neither: a host with more cores starts from the same cache."""
    assert plan_for(changed_environment(H100, **change), **SMALL).key == plan_for(**SMALL).key
    assert plan_for(changed_environment(LAPTOP, **change), **SMALL).key != plan_for(LAPTOP, **SMALL).key


@pytest.mark.parametrize(
    "change",
    [
        {"region": "blocks"},
        {"mode": "max-autotune"},
        {"graphs": "region"},
        {"shapes": "dynamic"},
        {"buckets": (128, 256)},
        {"batch_sizes": (1, 8)},
        {"dtype": "float16"},
        {"device": "cpu"},
        {"attention": "torch-flash"},
        {"block_size": 32},
    ],
    ids=lambda change: next(iter(change)),
)
def test_different_options_have_a_different_key(change: dict[str, Any]) -> None:
    assert plan_for(**{**SMALL, **change}).key != plan_for(**SMALL).key


@pytest.mark.parametrize("change", [{"context": 2048}, {"kv_blocks": 2000}], ids=["context", "kv_blocks"])
def test_symbolic_sizes_do_not_enter_the_key(change: dict[str, Any]) -> None:
    assert plan_for(**{**SMALL, **change}).key == plan_for(**SMALL).key


def test_a_different_model_has_a_different_key() -> None:
    for other in (
        replace(LLAMA_8B, vocab_size=LLAMA_8B.vocab_size + 1),
        replace(LLAMA_8B, config_digest=digest_config({"rms_norm_eps": 1e-6})),
    ):
        assert plan_for(architecture=other, **SMALL).key != plan_for(**SMALL).key


@pytest.mark.parametrize(
    "change", [{"model": "/a/copy"}, {"model": "a/fine-tune"}, {"revision": "v2"}, {"load_format": "dummy"}]
)
def test_the_origin_of_weights_does_not_enter_the_key(change: dict[str, Any]) -> None:
    """CI can warm a cache without weights, and a server with weights can use it."""
    assert plan_for(**{**SMALL, **change}).key == plan_for(**SMALL).key


@pytest.mark.parametrize("change", [{"model": "a/fine-tune"}, {"revision": "v2"}, {"trust_remote_code": False}])
def test_the_origin_of_remote_code_enters_the_key(change: dict[str, Any]) -> None:
    remote = {**SMALL, "trust_remote_code": True}
    assert plan_for(**{**remote, **change}).key != plan_for(**remote).key


def test_names_paths_and_token_ids_are_not_in_the_config_digest() -> None:
    config = {"hidden_size": 64, "rope_parameters": {"rope_theta": 1e4}, "eos_token_id": 2, "_name_or_path": "/a"}
    digest = digest_config(config)
    assert digest == digest_config({**config, "eos_token_id": [2, 3], "_name_or_path": "/b", "architectures": ["X"]})
    assert digest != digest_config({**config, "rope_parameters": {"rope_theta": 1e5}})
    assert digest != digest_config({**config, "new_in_this_family": True})


@pytest.mark.parametrize(
    "change",
    [
        {"driver": "590.1"},
        {"gpu_memory_bytes": 94 * GIB},
        {"host_memory_bytes": 256 * GIB},
        {"inductor_cache_dir": "/elsewhere"},
        {"user_cache_dir": "/elsewhere"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_driver_folders_and_memory_sizes_do_not_enter_the_key(change: dict[str, Any]) -> None:
    assert plan_for(changed_environment(H100, **change), **SMALL).key == plan_for(**SMALL).key


@pytest.mark.parametrize("change", [{"cache_dir": "/elsewhere"}, {"memory_fraction": 0.8}])
def test_cache_folder_and_memory_fraction_do_not_enter_the_key(change: dict[str, Any]) -> None:
    assert plan_for(**{**SMALL, **change}).key == plan_for(**SMALL).key


def test_requesting_the_defaults_does_not_change_the_key() -> None:
    planned = plan_for(**SMALL)
    requested = plan_for(**SMALL, device="cuda", dtype="bfloat16", attention="triton", graphs="step", block_size=16)
    assert requested.key == planned.key


# For any buckets


def ascending(largest: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.sets(st.integers(1, largest), min_size=1, max_size=8).map(lambda sizes: tuple(sorted(sizes)))


@given(
    lengths=st.integers(2, LLAMA_8B.context).flatmap(lambda context: st.tuples(st.just(context), ascending(context))),
    batch_sizes=ascending(512),
    block_size=st.sampled_from([16, 32, 64, 128, 256]),
)
def test_the_plan_has_exactly_the_requested_buckets_and_kv_blocks_for_them(
    lengths: tuple[int, tuple[int, ...]], batch_sizes: tuple[int, ...], block_size: int
) -> None:
    context, buckets = lengths
    plan = plan_for(context=context, buckets=buckets, batch_sizes=batch_sizes, block_size=block_size)
    assert plan.prefill_buckets == tuple(Bucket("prefill", size) for size in buckets)
    assert plan.decode_buckets == tuple(Bucket("decode", size) for size in batch_sizes)
    assert plan.buckets == plan.prefill_buckets + plan.decode_buckets
    assert plan.context == context
    usable = plan.kv_blocks - 1  # block 0 is for padding
    assert usable * block_size >= max(context, buckets[-1])
    assert usable >= batch_sizes[-1]
    assert plan.blocks_per_sequence <= usable


def test_last_token_rows_require_whole_layers() -> None:
    def tried(**options: Any) -> set[bool]:
        plan = plan_for(**{"mode": "auto", "buckets": (512, 2048), **options})
        return {any(variant.last_token_rows for variant in plan.variants(bucket)) for bucket in plan.prefill_buckets}

    assert tried() == {True}
    assert tried(buckets=(128,)) == {False}, "it is not faster there"
    assert tried(shapes="dynamic", buckets=(2048,)) == {True}
    assert tried(region="blocks") == tried(region="blocks", shapes="dynamic") == {False}
    plan = plan_for(mode="auto")
    assert not any(variant.last_token_rows for bucket in plan.decode_buckets for variant in plan.variants(bucket))


def test_installed_packages_are_timed_in_long_buckets_unless_a_backend_is_requested() -> None:
    with_package_4 = with_packages("flash-attn-4")

    def tried(environment: Environment = with_package_4, **options: Any) -> list[list[str]]:
        plan = plan_for(environment, buckets=(512, 4096), context=8192, **{"mode": "auto", **options})
        return [[variant.attention for variant in plan.variants(b) if variant.attention] for b in plan.prefill_buckets]

    assert tried() == [[], ["flash-attn-4"]]
    assert tried(H100) == tried(attention="triton") == tried(mode="reduce-overhead") == [[], []]
    timed, untimed = (
        decision_named(plan_for(with_package_4, tune_seconds=seconds), "other attention").reason for seconds in (9, 0)
    )
    assert (timed, untimed) == (
        "installed; timed in prefill buckets of at least 4096 tokens",
        "installed; timed by --tune-seconds in prefill buckets of at least 4096 tokens",
    )
    assert plan_for(with_package_4, tune_seconds=9).key == plan_for(with_package_4).key, "timings stay valid"
    assert tried(with_packages("flash-attn-2")) == [[], []]
    plan = plan_for(with_package_4, buckets=(4096,), context=8192, mode="auto")
    variants = {variant.name: variant for variant in plan.variants(plan.buckets[0])}
    assert plan.uses_cuda_graph(plan.buckets[0], variants["default"])
    assert not plan.uses_cuda_graph(plan.buckets[0], variants["flash-attn-4"]), "it reads lengths on the host"


def test_a_large_bucket_packs_more_prompts() -> None:
    assert plan_for(buckets=(128, 2048)).max_prefill_sequences == plan_for(buckets=(4096,)).max_prefill_sequences == 8
    assert plan_for(buckets=(128, 8192), context=8192).max_prefill_sequences == 16


def test_one_rank_does_not_enter_the_key_and_several_do() -> None:
    plan = plan_for(**SMALL)
    assert (plan.rank, plan.world_size) == (0, 1)
    keys = [
        _plan_key(replace(plan, rank=rank, world_size=world_size), LLAMA_8B)
        for rank, world_size in ((0, 1), (0, 2), (1, 2))
    ]
    assert keys[0] == plan.key and len(set(keys)) == 3


def test_further_gpus_are_named_in_the_device_decision() -> None:
    [gpu] = H100.gpus
    reason = decision_named(plan_for(replace(H100, gpus=(gpu, gpu))), "device").reason
    assert reason == "the GPU is NVIDIA H100 80GB HBM3; GPU 0 of 2 x NVIDIA H100 80GB HBM3"
    mixed = replace(H100, gpus=(gpu, replace(gpu, name="NVIDIA A100")))
    assert "GPU 1: NVIDIA A100 (80 GiB" in decision_named(plan_for(mixed), "device").reason


def test_the_three_dtypes_are_decided_together() -> None:
    plan = plan_for(dtype="float16")
    assert (plan.weight_dtype, plan.kv_dtype, plan.compute_dtype) == ("float16",) * 3
    assert [decision.name for decision in plan.decisions if "dtype" in decision.name] == ["dtype"]


def test_ahead_of_time_programs_have_a_key_of_their_own_and_jit_keeps_its_key() -> None:
    plan = plan_for(LAPTOP)
    aot = plan_for(LAPTOP, programs="aot")
    assert (plan.programs, aot.programs) == ("jit", "aot")
    assert aot.key != plan.key == plan_for(LAPTOP, programs="jit").key
    assert decision_named(aot, "programs").value == "aot"


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        (H100, {"region": "blocks"}, "requires --region layer, not blocks"),
        (LAPTOP, {"region": "blocks"}, "requires --region layer, not blocks"),
    ],
)
def test_ahead_of_time_programs_are_refused_where_they_cannot_be_used(
    environment: Environment, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        plan_for(environment, programs="aot", **options)


@pytest.mark.parametrize("internal", [AOT_PACKAGES, DYNAMIC_SIZES])
def test_programs_fall_back_to_jit_with_a_warning_if_torch_lacks_an_interface(internal: str) -> None:
    environment = replace(LAPTOP, missing_internals=((internal, "lost"),))
    plan = plan_for(environment, programs="aot")
    decision = decision_named(plan, "programs")
    assert plan.programs == "jit" and decision.is_fallback and internal in decision.reason
