"""KV sizing: exact bytes, the memory that remains, and errors whose hints work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tcdeploy.engine.step.batch import PrefillBuffers, make_decode_rows
from tcdeploy.errors import SpaceError, UsageError
from tcdeploy.planning.architecture import Architecture, SlotState
from tcdeploy.planning.decision import DTypes, PlanInputs
from tcdeploy.planning.environment import Environment
from tcdeploy.planning.memory import (
    GRAPH_BYTES_PER_LAYER,
    CacheDemand,
    KVSize,
    Workspace,
    gib,
    predict_workspace,
    size_kv_cache,
)
from tcdeploy.planning.plan import Bucket, make_plan
from tcdeploy.planning.recipe import Device, DType
from tcdeploy.planning.sizes import GPU_BATCH_SIZES, count_graphs, graph_sizes
from tests.machines import DEEPSEEK_LITE, GIB, H100, LAPTOP, LLAMA_1B, LLAMA_8B, changed_environment, make_recipe

DEMAND = CacheDemand(
    context=4096,
    batch_sizes=(1, 32),
    max_prefill_tokens=2048,
    captured_sizes=((128,), (512,), (2048,)),
    captures_decode=True,
    mixed_steps=False,
    block_size=16,
)
RESERVE = 4 * GIB
LLAMA_TOKEN_BYTES = 32 * 8 * (128 + 128) * 2  # layers x kv heads x (key and value) x bfloat16: 128 KiB
HALF_AND_FULL: tuple[DType, DType] = ("bfloat16", "float32")
LLAMA_WEIGHT_BYTES = 8_030_261_248 * 2


def size(
    demand: CacheDemand = DEMAND,
    environment: Environment = H100,
    architecture: Architecture = LLAMA_8B,
    device: Device = "cuda",
    dtype: DType = "bfloat16",
    kv_dtype: DType | None = None,
    **options: Any,
) -> KVSize:
    workspace = Workspace(RESERVE, 0, 0, 0, 0, 0, 0)
    dtypes = DTypes(dtype, kv_dtype or dtype, dtype)
    inputs = PlanInputs(make_recipe(**options), environment, architecture, device, dtypes)
    return size_kv_cache(inputs, demand, workspace)


def test_the_cache_holds_the_largest_batch_at_full_context_and_one_block_for_padding() -> None:
    kv = size()
    assert kv.blocks == 32 * 4096 // 16 + 1
    assert kv.kv_bytes == kv.blocks * 16 * LLAMA_TOKEN_BYTES
    assert kv.weight_bytes == LLAMA_WEIGHT_BYTES
    assert kv.context == 4096
    assert "32 sequences of 4096 tokens" in kv.reason


def test_a_context_that_ends_inside_a_block_takes_the_whole_block() -> None:
    assert size(DEMAND._replace(context=4097)).blocks == 32 * 257 + 1
    assert size(DEMAND._replace(context=4095)).blocks == 32 * 256 + 1
    assert size(DEMAND._replace(context=4096, block_size=64)).blocks == 32 * 64 + 1


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_bytes_follow_the_dtype_and_each_layer_s_own_key_and_value_sizes(dtype: str, width: int) -> None:
    small = DEMAND._replace(context=2048, batch_sizes=(1,))
    kv = size(
        small,
        architecture=DEEPSEEK_LITE,
        environment=changed_environment(H100, gpu_memory_bytes=141 * GIB),
        dtype=dtype,
    )
    assert kv.kv_bytes == kv.blocks * 16 * 27 * 16 * (192 + 128) * width
    assert kv.weight_bytes == 15_706_484_224 * width


def test_layers_of_different_sizes_are_summed() -> None:
    mixed = replace(LLAMA_8B, layer_states=LLAMA_8B.attention_layers[:1] + DEEPSEEK_LITE.attention_layers[:2])
    kv = size(DEMAND._replace(batch_sizes=(1,)), architecture=mixed)
    assert kv.kv_bytes == kv.blocks * 16 * 2 * (8 * 256 + 2 * 16 * 320)


def test_kv_takes_all_remaining_memory_if_the_demand_exceeds_it() -> None:
    kv = size(DEMAND._replace(context=131072))
    left = int(80 * GIB * 0.9) - LLAMA_WEIGHT_BYTES - RESERVE
    assert kv.blocks == left // (16 * LLAMA_TOKEN_BYTES)
    assert kv.context == 131072  # one sequence still fits
    assert f"{32 * 8192 + 1}" in kv.reason


def test_the_context_shrinks_to_what_one_sequence_can_hold() -> None:
    kv = size(DEMAND._replace(context=131072), changed_environment(H100, gpu_memory_bytes=24 * GIB))
    left = int(24 * GIB * 0.9) - LLAMA_WEIGHT_BYTES - RESERVE
    assert kv.blocks == left // (16 * LLAMA_TOKEN_BYTES)
    assert kv.context == (kv.blocks - 1) * 16 < 131072


def test_a_requested_context_that_does_not_fit_is_an_error_whose_hint_fits() -> None:
    small = changed_environment(H100, gpu_memory_bytes=24 * GIB)
    with pytest.raises(SpaceError, match="context 65536 exceeds") as caught:
        size(DEMAND._replace(context=65536), small, context=65536)
    assert caught.value.exit_code == 7
    flag, value = caught.value.hint.split()
    assert flag == "--context"
    assert size(DEMAND._replace(context=int(value)), small, context=int(value)).context == int(value)
    with pytest.raises(SpaceError):
        size(DEMAND._replace(context=int(value) + 1), small, context=int(value) + 1)


def test_on_a_cpu_kv_takes_a_quarter_of_host_memory_beyond_the_weights() -> None:
    kv = size(DEMAND._replace(context=131072, batch_sizes=(4,)), LAPTOP, device="cpu", dtype="float32")
    left = (64 * GIB - 2 * LLAMA_WEIGHT_BYTES) // 4
    assert kv.blocks == left // (2 * 16 * LLAMA_TOKEN_BYTES)


@pytest.mark.parametrize(
    ("environment", "device", "dtype", "words"),
    [
        (
            changed_environment(H100, gpu_memory_bytes=16 * GIB),
            "cuda",
            "bfloat16",
            ("14.96 GiB of bfloat16", "16.00 GiB", "90%"),
        ),
        (changed_environment(H100, gpu_memory_bytes=20 * GIB), "cuda", "bfloat16", ("H100", "20.00 GiB")),
        (changed_environment(H100, gpu_memory_bytes=32 * GIB), "cuda", "float32", ("29.92 GiB of float32",)),
        (replace(LAPTOP, host_memory_bytes=16 * GIB), "cpu", "float32", ("29.92 GiB", "the host has 16.00 GiB")),
    ],
)
def test_weights_that_leave_no_memory_for_kv_are_an_error_with_sizes(
    environment: Environment, device: str, dtype: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(SpaceError, match="leave no memory for KV") as caught:
        size(environment=environment, device=device, dtype=dtype)
    assert caught.value.exit_code == 7
    assert caught.value.hint
    assert all(word in caught.value.message for word in words)


def test_room_for_one_block_less_than_the_buckets_need_is_an_error() -> None:
    tight = LLAMA_WEIGHT_BYTES + RESERVE + 129 * 16 * LLAMA_TOKEN_BYTES  # 2048 tokens are 128 blocks, and the padding's
    assert size(environment=changed_environment(H100, gpu_memory_bytes=tight), memory_fraction=1.0).blocks == 129
    with pytest.raises(SpaceError, match=r"the buckets need 129, memory holds 128") as caught:
        size(environment=changed_environment(H100, gpu_memory_bytes=tight - 1), memory_fraction=1.0)
    assert caught.value.exit_code == 7


@pytest.mark.parametrize(
    ("demand", "least"),
    [
        (DEMAND, 129),  # the longest prompt decides
        (DEMAND._replace(max_prefill_tokens=2049), 130),
        (DEMAND._replace(max_prefill_tokens=64), 33),  # the largest batch decides: a block for each
    ],
)
def test_requested_kv_blocks_must_hold_every_bucket(demand: CacheDemand, least: int) -> None:
    assert size(demand, kv_blocks=least).blocks == least
    for too_few in (least - 1, 1, 0, -5):
        with pytest.raises(SpaceError, match=rf"{too_few} KV blocks .* the buckets need {least}") as caught:
            size(demand, kv_blocks=too_few)
        assert caught.value.exit_code == 7


def test_requested_kv_blocks_are_limited_by_memory() -> None:
    affordable = (int(80 * GIB * 0.9) - LLAMA_WEIGHT_BYTES - RESERVE) // (16 * LLAMA_TOKEN_BYTES)
    kv_bytes = affordable * 16 * LLAMA_TOKEN_BYTES
    assert size(kv_blocks=affordable) == (affordable, kv_bytes, LLAMA_WEIGHT_BYTES, 4096, "requested", 0, 0, 0)
    with pytest.raises(SpaceError, match=f"memory holds {affordable}"):
        size(kv_blocks=affordable + 1)


def test_requested_kv_blocks_limit_the_context() -> None:
    assert size(kv_blocks=200).context == 199 * 16
    with pytest.raises(SpaceError, match=f"context 4096 exceeds the {199 * 16} tokens"):
        size(kv_blocks=200, context=4096)


def test_the_workspace_counts_everything_that_grows() -> None:
    wide = replace(LLAMA_8B, peak_activation_elements=51200)
    workspace = predict_workspace(wide, "bfloat16", DEMAND, max_prefill_sequences=8, num_graphs=5)
    assert workspace.activations_bytes == 2048 * 51200 * 2
    assert workspace.decode_rows_bytes == 33 * (128256 * 3 + 256 * 4)
    assert workspace.logits_bytes == (1 + 32 + 8) * 128256 * 2, "all prefill steps share theirs"
    assert workspace.graphs_bytes == 5 * 32 * GRAPH_BYTES_PER_LAYER
    assert workspace.parity_check_bytes > workspace.activations_bytes
    assert workspace.serving_bytes == sum(workspace) - workspace.parity_check_bytes
    mixed = predict_workspace(
        wide, "bfloat16", DEMAND._replace(mixed_steps=True), max_prefill_sequences=8, num_graphs=5
    )
    assert mixed.logits_bytes - workspace.logits_bytes == 32 * 128256 * 2, "the outputs of the decode rows"


def test_graphs_are_counted_by_layer_also_if_a_layer_has_two_states() -> None:
    mixers = (SlotState(f"model.layers.{number}.mamba", "mamba2", ()) for number in range(32))
    both = replace(LLAMA_8B, layer_states=(*LLAMA_8B.layer_states, *mixers))
    assert both.num_layers == LLAMA_8B.num_layers == 32
    workspace = predict_workspace(both, "bfloat16", DEMAND, max_prefill_sequences=8, num_graphs=5)
    assert workspace.graphs_bytes == 5 * 32 * GRAPH_BYTES_PER_LAYER


def test_the_dense_copy_of_a_quantised_weight_is_counted() -> None:
    quantised = replace(LLAMA_8B, largest_scheme_elements=28672 * 4096)
    first, second = (
        predict_workspace(item, "bfloat16", DEMAND, max_prefill_sequences=8, num_graphs=5)
        for item in (LLAMA_8B, quantised)
    )
    assert second.activations_bytes - first.activations_bytes == 2 * 28672 * 4096
    assert second.parity_check_bytes - first.parity_check_bytes == 2 * 4 * 28672 * 4096


@pytest.mark.parametrize("mixed_steps", [True, False])
def test_the_inputs_of_every_captured_size_are_counted_as_they_are_made(mixed_steps: bool) -> None:
    """The block tables are the largest part: each size has one."""
    recipe = make_recipe(mixed_steps="on" if mixed_steps else "off", context=131072)
    plan = make_plan(recipe, LAPTOP, LLAMA_1B)
    demand = DEMAND._replace(captured_sizes=((128,), (512,)), mixed_steps=mixed_steps, context=plan.context)
    workspace = predict_workspace(LLAMA_8B, "bfloat16", demand, plan.max_prefill_sequences, num_graphs=0)
    decode_rows = make_decode_rows(plan, vocab_size=10)
    made = [
        PrefillBuffers(plan, Bucket("prefill", tokens), tokens, decode_rows, torch.zeros(1))._packed.nbytes
        for tokens in (128, 512)
    ]
    assert workspace.prefill_inputs_bytes == pytest.approx(sum(made), rel=0.02)


def test_a_dynamic_bucket_with_mixed_steps_has_far_more_graphs() -> None:
    sizes = graph_sizes(2048)
    demand = DEMAND._replace(captured_sizes=(sizes,), batch_sizes=GPU_BATCH_SIZES)
    assert count_graphs(demand) == 40 + 7
    # 32 row slots at all 40 sizes; 128 from 34 tokens on, 256 from 130 on
    assert count_graphs(demand._replace(mixed_steps=True)) == 40 + 40 + 39 + 36 + 7
    assert count_graphs(demand._replace(captured_sizes=())) == 7
    assert count_graphs(demand._replace(captured_sizes=(), captures_decode=False)) == 0


def test_weights_kv_and_logits_are_sized_by_their_own_dtypes() -> None:
    mixed = size(dtype="bfloat16", kv_dtype="float32", memory_fraction=1.0)
    assert mixed.weight_bytes == LLAMA_WEIGHT_BYTES
    assert mixed.kv_bytes == mixed.blocks * 16 * LLAMA_TOKEN_BYTES * 2
    half, full = (
        predict_workspace(LLAMA_8B, dtype, DEMAND, max_prefill_sequences=8, num_graphs=5) for dtype in HALF_AND_FULL
    )
    assert full.logits_bytes == 2 * half.logits_bytes


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.01, float("nan"), float("inf")])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_memory_fraction_outside_0_to_1_is_a_usage_error(fraction: float, device: str) -> None:
    with pytest.raises(UsageError, match=f"memory fraction {fraction}") as caught:
        size(device=device, memory_fraction=fraction)
    assert caught.value.exit_code == 2


@given(
    memory_gib=st.floats(18.0, 200.0),
    fraction=st.floats(0.3, 1.0),
    context=st.integers(64, 131072),
    batch=st.integers(1, 256),
    block_size=st.sampled_from([16, 32, 64, 128]),
)
def test_weights_cache_and_reserve_never_exceed_the_share(
    memory_gib: float, fraction: float, context: int, batch: int, block_size: int
) -> None:
    demand = DEMAND._replace(
        context=context, batch_sizes=(batch,), max_prefill_tokens=min(context, 2048), block_size=block_size
    )
    machine = changed_environment(H100, gpu_memory_bytes=int(memory_gib * GIB))
    try:
        kv = size(demand, machine, memory_fraction=fraction)
    except SpaceError:
        return
    assert kv.weight_bytes + kv.kv_bytes + RESERVE <= machine.gpu_memory_bytes * fraction
    assert kv.kv_bytes == kv.blocks * block_size * LLAMA_TOKEN_BYTES
    assert kv.blocks > batch
    assert min(context, 2048) <= kv.context <= min(context, (kv.blocks - 1) * block_size)
    assert kv.blocks <= batch * -(-context // block_size) + 1


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (GIB, "1.00 GiB"), (80 * GIB, "80.00 GiB"), (GIB - GIB // 4, "768.0 MiB"), (1 << 20, "1.0 MiB"),
        (3 << 10, "3.0 KiB"), (640, "640 bytes"), (0, "0 bytes"),
    ],
)  # fmt: skip
def test_sizes_are_printed_in_the_largest_unit_that_fits(size_bytes: int, text: str) -> None:
    assert gib(size_bytes) == text
