"""Every "auto" is decided with its reason, for any machine and any model, and what cannot be asked is an error."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tcdeploy.errors import SpaceError, UsageError
from tcdeploy.planning.architecture import Architecture, digest_config
from tcdeploy.planning.backends import BACKENDS
from tcdeploy.planning.environment import Environment
from tcdeploy.planning.plan import Bucket, Plan, make_plan
from tests.machines import (
    ALL_FLASH,
    DEEPSEEK_LITE,
    GEMMA_2_9B,
    GIB,
    GPT_OSS_20B,
    H100,
    LAPTOP,
    LLAMA_8B,
    changed_environment,
    decision_named,
    decisions_named,
    make_recipe,
)


def plan_for(environment: Environment = H100, architecture: Architecture = LLAMA_8B, **asked: Any) -> Plan:
    return make_plan(make_recipe(**asked), environment, architecture)


def with_packages(*backends: str) -> Environment:
    return replace(H100, flash_packages=tuple(item for item in ALL_FLASH if item[0] in backends))


def refusal(environment: Environment = H100, architecture: Architecture = LLAMA_8B, **asked: Any) -> UsageError:
    """The UsageError of what cannot be asked."""
    with pytest.raises(UsageError) as caught:
        plan_for(environment, architecture, **asked)
    assert caught.value.exit_code == 2
    return caught.value


# The plan as a whole


@pytest.mark.parametrize("environment", [H100, LAPTOP], ids=["H100", "laptop"])
def test_every_decision_has_a_value_and_a_reason(environment: Environment) -> None:
    plan = plan_for(environment, context=4096)
    names = [decision.name for decision in plan.decisions]
    on_gpu = ["workspace"] if environment.gpus else []
    assert sorted(names) == sorted(
        ["device", "dtype", "prefill attention", "decode attention", "graphs", "context", "decode buckets",
         "prefill buckets", "block size", "KV blocks", "region", "mode", "cache folder", *on_gpu]
    )  # fmt: skip
    assert all(decision.value and decision.reason for decision in plan.decisions)
    assert not any(decision.is_fallback for decision in plan.decisions)


def test_the_plan_of_an_h100() -> None:
    plan = plan_for(context=16384)
    assert (plan.device, plan.compute_dtype, plan.graphs) == ("cuda", "bfloat16", "step")
    assert (plan.prefill_attention, plan.decode_attention) == ("triton", "triton")
    assert [bucket.name for bucket in plan.buckets] == [
        "prefill:128", "prefill:512", "prefill:2048", "decode:1", "decode:4", "decode:16", "decode:32",
    ]  # fmt: skip
    assert (plan.max_prefill_sequences, plan.block_size, plan.blocks_per_sequence) == (8, 16, 1024)


def test_the_plan_of_a_laptop() -> None:
    plan = plan_for(LAPTOP)
    assert (plan.device, plan.compute_dtype, plan.graphs) == ("cpu", "float32", "none")
    assert (plan.prefill_attention, plan.decode_attention) == ("reference", "reference")
    assert [bucket.name for bucket in plan.decode_buckets] == ["decode:1", "decode:4"]


def test_a_plan_repeats_what_was_asked_about_the_model() -> None:
    plan = plan_for(model="a/b", revision="v2", load_format="dummy", trust_remote_code=True, region="model")
    assert (plan.model, plan.revision, plan.load_format, plan.trust_remote_code) == ("a/b", "v2", "dummy", True)
    assert (plan.region, decision_named(plan, "region").value) == ("model", "model")


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


def test_the_gpu_is_taken_when_there_is_one() -> None:
    assert decision_named(plan_for(), "device").reason == "NVIDIA H100 80GB HBM3 is present"
    assert decision_named(plan_for(LAPTOP), "device").reason == "torch sees no GPU"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_device_that_was_asked_for_is_taken(device: str) -> None:
    plan = plan_for(device=device)
    assert (plan.device, decision_named(plan, "device").reason) == (device, "requested")


def test_a_gpu_that_is_not_there_cannot_be_asked_for() -> None:
    error = refusal(LAPTOP, device="cuda")
    assert "torch sees no GPU" in error.message
    assert "--device cpu" in error.hint


@pytest.mark.parametrize(
    ("environment", "checkpoint", "dtype", "reason"),
    [
        (H100, "bfloat16", "bfloat16", "the checkpoint's dtype"),
        (H100, "float16", "float16", "the checkpoint's dtype"),
        (H100, "float32", "bfloat16", "the checkpoint is float32; bfloat16 halves the bytes read per token"),
        (LAPTOP, "bfloat16", "float32", "default on cpu; its text equals transformers' own"),
    ],
)
def test_the_dtype_follows_device_and_checkpoint(
    environment: Environment, checkpoint: str, dtype: str, reason: str
) -> None:
    plan = plan_for(environment, replace(LLAMA_8B, dtype=checkpoint))
    assert (plan.compute_dtype, decision_named(plan, "dtype").reason) == (dtype, reason)


@pytest.mark.parametrize("environment", [H100, LAPTOP], ids=["H100", "laptop"])
def test_a_dtype_that_was_asked_for_is_taken(environment: Environment) -> None:
    plan = plan_for(environment, dtype="float16")
    assert (plan.compute_dtype, decision_named(plan, "dtype").reason) == ("float16", "requested")


# Attention


@pytest.mark.parametrize(
    ("packages", "chosen"),
    [
        (("flash-attn-2", "flash-attn-3", "flash-attn-4"), "triton"),
        (("flash-attn-2", "flash-attn-4"), "triton"),
        ((), "triton"),
    ],
)
def test_prefill_attention_is_chosen_in_the_order_of_preference(packages: tuple[str, ...], chosen: str) -> None:
    plan = plan_for(with_packages(*packages))
    decision = decision_named(plan, "prefill attention")
    assert (plan.prefill_attention, decision.value, decision.is_fallback) == (chosen, chosen, False)


def test_a_choice_says_why_and_what_stood_before_it() -> None:
    first = decision_named(plan_for(with_packages("flash-attn-3")), "prefill attention").reason
    assert first == BACKENDS["triton"].prefill_reason
    second = decision_named(plan_for(without_triton()), "prefill attention").reason
    assert second == BACKENDS["torch-flash"].prefill_reason + "; not triton: triton is not installed"


def without_triton(*packages: str) -> Environment:
    return replace(with_packages(*packages), triton="")


def test_without_triton_torchs_own_kernel_comes_before_the_package_of_the_same_kernel() -> None:
    assert plan_for(without_triton("flash-attn-2")).prefill_attention == "torch-flash"


def test_flash_attention_4_is_taken_only_when_asked_for() -> None:
    machine = with_packages("flash-attn-4")
    assert plan_for(machine).prefill_attention == "triton"
    plan = plan_for(machine, attention="flash-attn-4")
    assert (plan.prefill_attention, decision_named(plan, "prefill attention").reason) == ("flash-attn-4", "requested")


def test_a_soft_capped_model_passes_over_torchs_own_kernel() -> None:
    plan = plan_for(without_triton("flash-attn-2"), GEMMA_2_9B)
    assert plan.prefill_attention == "flash-attn-2"
    reason = decision_named(plan, "prefill attention").reason
    assert "not torch-flash: it does not support logit soft-capping, which this model uses" in reason
    assert "not triton: triton is not installed" in reason
    assert plan_for(without_triton("flash-attn-2", "flash-attn-3"), GEMMA_2_9B).prefill_attention == "flash-attn-3"


def test_sinks_change_nothing_about_the_choice() -> None:
    assert plan_for(architecture=GPT_OSS_20B, context=4096).prefill_attention == "triton"
    assert plan_for(without_triton(), GPT_OSS_20B, context=4096).prefill_attention == "torch-flash"


def test_a_model_with_narrower_values_has_triton_or_the_reference() -> None:
    assert plan_for(H100, DEEPSEEK_LITE).prefill_attention == "triton"
    plan = plan_for(replace(H100, flash_packages=ALL_FLASH, triton=""), DEEPSEEK_LITE)
    assert plan.prefill_attention == "reference"
    reason = decision_named(plan, "prefill attention").reason
    for backend in ("flash-attn-3", "torch-flash", "flash-attn-2"):
        assert f"not {backend}: keys have head_dim 192 and values 128" in reason


def test_float32_on_a_gpu_needs_triton() -> None:
    assert plan_for(with_packages("flash-attn-3"), dtype="float32").prefill_attention == "triton"
    plan = plan_for(without_triton("flash-attn-3"), dtype="float32")
    assert plan.prefill_attention == "reference"
    assert "only bfloat16 and float16" in decision_named(plan, "prefill attention").reason


def test_heads_too_wide_for_the_kernels_fall_back_in_decode_as_well() -> None:
    wide = tuple(replace(spec, head_dim=512, v_head_dim=512) for spec in LLAMA_8B.attention_layers)
    plan = plan_for(architecture=replace(LLAMA_8B, attention_layers=wide), context=2048)
    assert (plan.prefill_attention, plan.decode_attention, plan.graphs) == ("reference", "reference", "none")
    assert decision_named(plan, "decode attention").is_fallback and decision_named(plan, "graphs").is_fallback


def test_the_reference_cannot_stand_in_a_graph() -> None:
    plan = plan_for(attention="reference")
    assert (plan.graphs, decision_named(plan, "graphs").is_fallback) == ("none", True)
    with pytest.raises(UsageError, match="reads lengths"):
        plan_for(attention="reference", graphs="step")


def test_a_dynamic_range_and_graphs_per_region_exclude_one_another() -> None:
    with pytest.raises(UsageError, match="every length"):
        plan_for(shapes="dynamic", graphs="region")


def test_longrope_is_served_up_to_where_its_factors_change() -> None:
    switching = replace(LLAMA_8B, longrope_limit=4096)
    plan = plan_for(architecture=switching, context=None)
    assert plan.context == 4096 and decision_named(plan, "context").is_fallback
    assert plan_for(architecture=switching, context=4000).context == 4000
    with pytest.raises(UsageError, match="4096"):
        plan_for(architecture=switching, context=4097)


def test_without_any_kernel_the_reference_is_a_fallback_that_shows() -> None:
    plan = plan_for(changed_environment(H100, triton="", gpu_capability=(7, 5)))
    prefill, decode = decision_named(plan, "prefill attention"), decision_named(plan, "decode attention")
    assert (plan.prefill_attention, plan.decode_attention) == ("reference", "reference")
    assert prefill.is_fallback and decode.is_fallback
    assert "not torch-flash: it has no kernels for compute capability 7.5" in prefill.reason
    assert decode.reason == "plain PyTorch; not triton: triton is not installed"


def test_the_reference_is_no_fallback_on_a_cpu() -> None:
    plan = plan_for(LAPTOP, context=4096)
    assert decision_named(plan, "prefill attention").reason == "the other backends require a GPU"
    assert decision_named(plan, "decode attention").reason == "the other backends require a GPU"
    assert not any(decision.is_fallback for decision in plan.decisions)


def test_the_reference_that_was_asked_for_serves_decode_as_well() -> None:
    plan = plan_for(attention="reference")
    assert (plan.prefill_attention, plan.decode_attention) == ("reference", "reference")
    assert decision_named(plan, "decode attention").reason == "requested"


@pytest.mark.parametrize(
    ("environment", "architecture", "attention", "reason"),
    [
        (LAPTOP, LLAMA_8B, "triton", "it requires a GPU"),
        (replace(H100, triton=""), LLAMA_8B, "triton", "triton is not installed"),
        (H100, LLAMA_8B, "flash-attn-3", "flash-attn-3 is not installed"),
        (changed_environment(H100, gpu_capability=(7, 5)), LLAMA_8B, "torch-flash", "compute capability 7.5"),
        (H100, GEMMA_2_9B, "torch-flash", "soft-capping"),
        (H100, DEEPSEEK_LITE, "torch-flash", "keys have head_dim 192 and values 128"),
        (with_packages("flash-attn-4"), GEMMA_2_9B, "flash-attn-4", "not a multiple of 8 up to 128"),
    ],
)
def test_attention_that_cannot_run_is_refused_with_its_reason(
    environment: Environment, architecture: Architecture, attention: str, reason: str
) -> None:
    error = refusal(environment, architecture, attention=attention)
    assert error.message.startswith(f"attention {attention} cannot be used: ")
    assert reason in error.message
    assert "--attention" in error.hint


# Graphs and mode


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("graphs", [None, "step", "region", "none"])
def test_modes_with_graphs_take_them_by_step_or_as_asked(mode: str, graphs: str | None) -> None:
    plan = plan_for(mode=mode, graphs=graphs)
    assert (plan.mode, plan.graphs) == (mode, graphs or "step")
    assert decision_named(plan, "graphs").reason == (
        "requested" if graphs else decision_named(plan_for(), "graphs").reason
    )
    assert not decision_named(plan, "graphs").is_fallback


@pytest.mark.parametrize("graphs", [None, "none"])
def test_mode_default_takes_no_graphs(graphs: str | None) -> None:
    plan = plan_for(mode="default", graphs=graphs)
    assert (plan.graphs, decision_named(plan, "graphs").reason) == ("none", "mode default does not use CUDA graphs")


@pytest.mark.parametrize("graphs", ["step", "region"])
def test_mode_default_and_graphs_contradict_each_other(graphs: str) -> None:
    error = refusal(mode="default", graphs=graphs)
    assert graphs in error.message
    assert error.hint == f"--mode reduce-overhead --graphs {graphs}"


@pytest.mark.parametrize(("graphs", "is_fallback"), [(None, False), ("none", False), ("step", True), ("region", True)])
def test_graphs_asked_for_on_a_cpu_are_a_fallback_that_shows(graphs: str | None, is_fallback: bool) -> None:
    plan = plan_for(LAPTOP, graphs=graphs)
    assert plan.graphs == "none"
    assert decision_named(plan, "graphs").is_fallback is is_fallback


def test_max_autotune_is_said_to_autotune() -> None:
    assert decision_named(plan_for(mode="max-autotune"), "mode").reason == "autotuned kernels"
    assert decision_named(plan_for(), "mode").reason == "Inductor's default kernels"
    assert "120 s" in decision_named(plan_for(mode="auto", tune_seconds=120), "mode").reason


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_every_mode_but_auto_names_one_candidate(mode: str) -> None:
    plan = plan_for(mode=mode)
    assert {len(plan.variants(bucket)) for bucket in plan.buckets} == {1}


@pytest.mark.parametrize("environment", [H100, LAPTOP], ids=["H100", "laptop"])
def test_mode_auto_tries_several_candidates_of_different_names(environment: Environment) -> None:
    plan = plan_for(environment, mode="auto")
    for bucket in plan.buckets:
        names = [variant.name for variant in plan.variants(bucket)]
        assert len(set(names)) == len(names) > 1


def test_prefill_is_recorded_where_its_attention_reads_nothing_on_the_host() -> None:
    def recorded(**asked: Any) -> list[bool]:
        plan = plan_for(**asked)
        return [plan.uses_cuda_graph(bucket) for bucket in (plan.prefill_buckets[0], plan.decode_buckets[0])]

    assert recorded() == [True, True]
    assert recorded(attention="torch-flash") == [False, True]
    assert recorded(shapes="dynamic") == [False, True]
    assert recorded(graphs="region") == recorded(graphs="none") == [False, False]


def test_the_workspace_is_predicted_and_left_free() -> None:
    plan = plan_for(context=131072, memory_fraction=1.0)
    assert 0 < plan.workspace_bytes < 3 * 2**30
    assert plan.weight_bytes + plan.kv_bytes + plan.workspace_bytes <= H100.gpu_memory_bytes
    assert plan_for(LAPTOP).workspace_bytes == 0


# Context, buckets, blocks


def test_the_context_is_the_model_s_own_or_what_was_asked_for() -> None:
    own, asked = plan_for(architecture=GEMMA_2_9B), plan_for(context=4096)
    assert (own.context, decision_named(own, "context").reason) == (8192, "the model's maximum")
    assert (asked.context, decision_named(asked, "context").reason) == (4096, "requested")
    assert plan_for(context=131072).context == 131072


@pytest.mark.parametrize("context", [131073, 0, -1])
def test_a_context_that_the_model_does_not_have_is_refused(context: int) -> None:
    error = refusal(context=context)
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
def test_buckets_that_do_not_ascend_from_1_are_refused_by_number(buckets: tuple[int, ...], named: str) -> None:
    assert f" {named} " in f"{refusal(buckets=buckets).message} "
    assert f" {named} " in f"{refusal(batch_sizes=buckets).message} "


def test_the_hint_for_disorder_is_the_order() -> None:
    assert refusal(buckets=(512, 128, 512)).hint == "128,512"
    assert refusal(batch_sizes=(4, 1)).hint == "1,4"


def test_a_bucket_above_the_context_is_refused_by_number() -> None:
    error = refusal(context=1000, buckets=(128, 1001))
    assert "1001" in error.message and "1000" in error.message
    assert "chunks" in error.hint
    assert plan_for(context=1000, buckets=(128, 1000)).prefill_buckets[-1].size == 1000
    assert "131073" in refusal(buckets=(131073,)).message


@pytest.mark.parametrize(("context", "sizes"), [(2048, [128, 512, 2048]), (2047, [128, 512]), (128, [128]), (64, [64])])
def test_default_buckets_end_at_the_context(context: int, sizes: list[int]) -> None:
    plan = plan_for(context=context)
    assert [bucket.size for bucket in plan.prefill_buckets] == sizes
    assert str(context) in decision_named(plan, "prefill buckets").reason


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
def test_a_dynamic_range_needs_more_than_its_beginning(largest: int) -> None:
    assert str(largest) in refusal(shapes="dynamic", buckets=(largest,)).message
    assert plan_for(shapes="dynamic", buckets=(3,)).prefill_buckets[0].name == "prefill:2-3"


@pytest.mark.parametrize("size", [0, 1, 8, 15, 17, 24, 48, 100, -16])
def test_a_block_size_that_is_no_power_of_two_from_16_is_refused(size: int) -> None:
    assert f"block size {size} " in refusal(block_size=size).message


@pytest.mark.parametrize("size", [16, 32, 256])
def test_a_power_of_two_is_a_block_size(size: int) -> None:
    plan = plan_for(block_size=size)
    assert (plan.block_size, decision_named(plan, "block size").reason) == (size, "requested")


def test_a_context_that_ends_inside_a_block_counts_that_block() -> None:
    assert plan_for(context=129, buckets=(64,)).blocks_per_sequence == 9
    assert plan_for(context=128, buckets=(64,)).blocks_per_sequence == 8


def test_a_context_that_memory_cuts_short_is_a_fallback_that_shows() -> None:
    plan = plan_for(changed_environment(H100, gpu_memory_bytes=24 * GIB))
    assert plan.context == (plan.kv_blocks - 1) * plan.block_size < 131072
    *_, shown = decisions_named(plan, "context")
    assert shown.is_fallback
    assert (shown.value, shown.reason) == (str(plan.context), "KV memory holds less than the model's maximum of 131072")


def test_a_context_that_was_asked_for_is_not_cut_short() -> None:
    small = changed_environment(H100, gpu_memory_bytes=24 * GIB)
    with pytest.raises(SpaceError) as caught:
        plan_for(small, context=100_000)
    assert caught.value.exit_code == 7
    fitting = int(caught.value.hint.removeprefix("--context "))
    assert plan_for(small, context=fitting).context == fitting


def test_the_cache_folder_is_asked_for_or_torch_s_or_the_user_s() -> None:
    cases = [
        (plan_for(cache_dir="/asked"), "/asked", "requested"),
        (plan_for(replace(H100, inductor_cache_dir="/torch"), cache_dir="/asked"), "/asked", "requested"),
        (plan_for(replace(H100, inductor_cache_dir="/torch")), "/torch", "TORCHINDUCTOR_CACHE_DIR was already set"),
    ]
    for plan, folder, reason in cases:
        assert (plan.cache_dir, decision_named(plan, "cache folder").reason) == (folder, reason)
    assert plan_for().cache_dir == "/home/someone/.cache/tcdeploy"


# The key

SMALL = {"context": 4096, "buckets": (128, 512), "batch_sizes": (1, 4)}  # fits with room to spare on all machines here


def test_equal_questions_have_equal_keys() -> None:
    assert plan_for(**SMALL).key == plan_for(replace(H100), replace(LLAMA_8B), **SMALL).key
    assert len(plan_for().key) == 16 and set(plan_for().key) <= set("0123456789abcdef")


@pytest.mark.parametrize("seed", ["1", "2"])
def test_another_process_finds_the_same_key(seed: str) -> None:
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
def test_another_environment_has_another_key(change: dict[str, Any]) -> None:
    assert plan_for(changed_environment(H100, **change), **SMALL).key != plan_for(**SMALL).key


@pytest.mark.parametrize(
    "change",
    [{"cpu": "DEFAULT"}, {"cpu_threads": 3}, {"compiler": "g++ 12"}, {"install_paths": "/elsewhere"}],
    ids=lambda change: next(iter(change)),
)
def test_what_makes_a_cpus_programs_is_in_the_key_only_there(change: dict[str, Any]) -> None:
    """A GPU's programs hold none of it: a host with more cores starts from the same cache."""
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
def test_another_question_has_another_key(change: dict[str, Any]) -> None:
    assert plan_for(**{**SMALL, **change}).key != plan_for(**SMALL).key


@pytest.mark.parametrize("change", [{"context": 2048}, {"kv_blocks": 2000}], ids=["context", "kv_blocks"])
def test_sizes_that_programs_hold_as_symbols_do_not_change_the_key(change: dict[str, Any]) -> None:
    assert plan_for(**{**SMALL, **change}).key == plan_for(**SMALL).key


def test_another_model_has_another_key() -> None:
    for other in (
        replace(LLAMA_8B, vocab_size=LLAMA_8B.vocab_size + 1),
        replace(LLAMA_8B, config_digest=digest_config({"rms_norm_eps": 1e-6})),
    ):
        assert plan_for(architecture=other, **SMALL).key != plan_for(**SMALL).key


@pytest.mark.parametrize(
    "change", [{"model": "/a/copy"}, {"model": "a/fine-tune"}, {"revision": "v2"}, {"load_format": "dummy"}]
)
def test_where_weights_come_from_does_not_change_the_key(change: dict[str, Any]) -> None:
    """CI warms a cache without them, and a server with them finds it."""
    assert plan_for(**{**SMALL, **change}).key == plan_for(**SMALL).key


@pytest.mark.parametrize("change", [{"model": "a/fine-tune"}, {"revision": "v2"}, {"trust_remote_code": False}])
def test_where_code_comes_from_does(change: dict[str, Any]) -> None:
    remote = {**SMALL, "trust_remote_code": True}
    assert plan_for(**{**remote, **change}).key != plan_for(**remote).key


def test_names_places_and_token_ids_are_not_in_the_digest_of_a_config_and_all_else_is() -> None:
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
def test_driver_folders_and_sizes_of_memory_do_not_enter_the_key(change: dict[str, Any]) -> None:
    assert plan_for(changed_environment(H100, **change), **SMALL).key == plan_for(**SMALL).key


@pytest.mark.parametrize("change", [{"cache_dir": "/elsewhere"}, {"memory_fraction": 0.8}])
def test_the_cache_folder_and_the_share_of_memory_do_not_enter_the_key(change: dict[str, Any]) -> None:
    assert plan_for(**{**SMALL, **change}).key == plan_for(**SMALL).key


def test_what_was_asked_for_and_what_was_decided_alike_have_one_key() -> None:
    planned = plan_for(**SMALL)
    asked = plan_for(**SMALL, device="cuda", dtype="bfloat16", attention="triton", graphs="step", block_size=16)
    assert asked.key == planned.key


# For any buckets


def ascending(largest: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.sets(st.integers(1, largest), min_size=1, max_size=8).map(lambda sizes: tuple(sorted(sizes)))


@settings(deadline=None)
@given(
    asked=st.integers(2, LLAMA_8B.context).flatmap(lambda context: st.tuples(st.just(context), ascending(context))),
    batch_sizes=ascending(512),
    block_size=st.sampled_from([16, 32, 64, 128, 256]),
)
def test_the_buckets_of_the_plan_are_exactly_those_asked_for_and_the_cache_covers_them(
    asked: tuple[int, tuple[int, ...]], batch_sizes: tuple[int, ...], block_size: int
) -> None:
    context, buckets = asked
    plan = plan_for(context=context, buckets=buckets, batch_sizes=batch_sizes, block_size=block_size)
    assert plan.prefill_buckets == tuple(Bucket("prefill", size) for size in buckets)
    assert plan.decode_buckets == tuple(Bucket("decode", size) for size in batch_sizes)
    assert plan.buckets == plan.prefill_buckets + plan.decode_buckets
    assert plan.context == context
    usable = plan.kv_blocks - 1  # block 0 is the padding's
    assert usable * block_size >= max(context, buckets[-1])
    assert usable >= batch_sizes[-1]
    assert plan.blocks_per_sequence <= usable


def test_rows_are_chosen_early_in_whole_layers_of_static_shape_alone() -> None:
    def tried(**asked: Any) -> set[bool]:
        plan = plan_for(**{"mode": "auto", "buckets": (512, 2048), **asked})
        return {any(one.last_token_rows for one in plan.variants(bucket)) for bucket in plan.prefill_buckets}

    assert tried() == {True}
    assert tried(buckets=(128,)) == {False}, "it brought nothing there"
    assert tried(region="blocks") == tried(shapes="dynamic", buckets=(2048,)) == {False}
    plan = plan_for(mode="auto")
    assert not any(one.last_token_rows for bucket in plan.decode_buckets for one in plan.variants(bucket))


def test_installed_packages_are_tried_in_long_buckets_unless_a_backend_was_asked_for() -> None:
    with_package_4 = with_packages("flash-attn-4")

    def tried(environment: Environment = with_package_4, **asked: Any) -> list[list[str]]:
        plan = plan_for(environment, buckets=(512, 4096), context=8192, **{"mode": "auto", **asked})
        return [[one.attention for one in plan.variants(b) if one.attention] for b in plan.prefill_buckets]

    assert tried() == [[], ["flash-attn-4"]]
    assert tried(H100) == tried(attention="triton") == tried(mode="reduce-overhead") == [[], []]
    assert "4096 tokens" in decision_named(plan_for(with_package_4, mode="auto"), "other attention").reason
    assert tried(with_packages("flash-attn-2", "flash-attn-3")) == [[], []]
    plan = plan_for(with_package_4, buckets=(4096,), context=8192, mode="auto")
    variants = {one.name: one for one in plan.variants(plan.buckets[0])}
    assert plan.uses_cuda_graph(plan.buckets[0], variants["default"])
    assert not plan.uses_cuda_graph(plan.buckets[0], variants["flash-attn-4"]), "it reads lengths on the host"


def test_a_large_bucket_packs_more_prompts() -> None:
    assert plan_for(buckets=(128, 2048)).max_prefill_sequences == plan_for(buckets=(4096,)).max_prefill_sequences == 8
    assert plan_for(buckets=(128, 8192), context=8192).max_prefill_sequences == 16
