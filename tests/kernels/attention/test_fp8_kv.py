"""An FP8 cache holds K / k_scale and V / v_scale, and attention over it is attention over the rounded K and V.

The scales are far from 1 and from each other, and some values exceed what FP8 holds. So a scale that is left out, two
that are swapped, or a missing clamp fail these tests. As in the other tests, slots that must not be read are NaN.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tcdeploy.kernels.attention import decode, ops, prefill, reference
from tcdeploy.kernels.attention.splits import num_prefill_counters
from tests.kernels.attention.paged import (
    Case,
    PagedSequences,
    assert_agrees,
    cu_seqlens,
    make_paged_sequences,
    make_queries,
)
from tests.triton_tools import HOPPER_SHARED_BYTES, compile_for_hopper, record_launches, specialization_key

FP8 = torch.float8_e4m3fn
SCALES = (0.004, 0.03)  # of K and V; K beyond 448 * 0.004 saturates, which is every 14th element
CASES = {
    "float32": Case(group=3),
    "bfloat16": Case(head_dim=128, group=4, kv_heads=1, dtype=torch.bfloat16),
    "float16, values smaller than keys": Case(head_dim=96, v_head_dim=32, group=2, dtype=torch.float16),
    "bfloat16, keys smaller than values": Case(head_dim=32, v_head_dim=80, group=2, dtype=torch.bfloat16),
    "softcap, sinks and window": Case(softcap=2.0, sinks=True, window=70, group=3, dtype=torch.bfloat16),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def scales(device: str) -> Tensor:
    return torch.tensor(SCALES, device=device)


def to_fp8(sequences: PagedSequences) -> PagedSequences:
    """The sequences in FP8 caches. NaN stays NaN."""
    k_scale, v_scale = scales(sequences.k_cache.device.type).split(1)
    return sequences._replace(
        k_cache=reference.to_fp8(sequences.k_cache, k_scale), v_cache=reference.to_fp8(sequences.v_cache, v_scale)
    )


def bits(cache: Tensor) -> Tensor:
    return cache.cpu().view(torch.uint8)


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    """What attention reads of x [*], float32."""
    return reference.to_fp8(x, scale).float() * scale


def test_values_are_divided_by_the_scale_saturate_and_round_to_the_nearest() -> None:
    x = torch.tensor([0.0, 1.0, -3.3, 900.0, -1e6, float("inf"), float("nan"), 2**-10])
    stored = reference.to_fp8(x, torch.tensor([2.0]))
    assert stored.dtype == FP8
    assert_close(stored.float(), torch.tensor([0, 0.5, -1.625, 448, -448, 448, float("nan"), 0]), equal_nan=True)
    for dtype in (torch.bfloat16, torch.float16):  # 1.18738 is below the middle of 1.125 and 1.25; in 16 bits it is it
        assert reference.to_fp8(torch.tensor([1.1875], dtype=dtype), torch.tensor([1.0001])).item() == 1.125


@each_case
def test_attention_over_an_fp8_cache_is_attention_over_the_rounded_values(case: Case) -> None:
    sequences, new = make_paged_sequences(case, [1, 64, 140], "cpu"), [1, 20, 10]
    stored, queries = to_fp8(sequences), make_queries(case, 31, "cpu")
    caches = (rounded(x, scale) for x, scale in zip(sequences, scales("cpu").split(1), strict=False))
    args = (*stored[2:3], cu_seqlens(new, "cpu"), stored.seq_lens, *case.options("cpu"))
    out = reference.paged_prefill(queries, *stored[:2], *args, kv_scales=scales("cpu"))
    assert torch.equal(out, reference.paged_prefill(queries, *caches, *args))
    assert out.isfinite().all()


@each_case
def test_the_write_kernel_stores_the_bytes_of_the_reference(case: Case, device: str) -> None:
    slots = torch.tensor([5, 31, 0], device=device)
    dims = case.head_dim, case.v_head_dim or case.head_dim
    k, v = (torch.randn(3, case.kv_heads, dim, dtype=case.dtype).to(device) * 20 for dim in dims)
    caches = [torch.zeros(2, case.block_size, case.kv_heads, dim, device=device).to(FP8) for dim in dims]
    expected_caches = [cache.cpu().clone() for cache in caches]
    reference.write_kv(k.cpu(), v.cpu(), *expected_caches, slots.cpu(), scales("cpu"))
    prefill.write_kv(k, v, *caches, slots, scales(device))
    for cache, expected_cache in zip(caches, expected_caches, strict=True):
        assert torch.equal(bits(cache), bits(expected_cache))
        assert cache.float().abs().max() == reference.FP8_MAX, "no value saturates"


@pytest.mark.parametrize("rotary", [False, True], ids=["", "rotary"])
@pytest.mark.parametrize("splits", [1, 4])
@each_case
def test_decode_agrees_with_the_reference_and_stores_the_newest_token(
    case: Case, splits: int, rotary: bool, device: str
) -> None:
    lengths = [1, 129, 0, 270]
    sequences = to_fp8(make_paged_sequences(case, lengths, device))
    for row, length in enumerate(lengths):
        for cache in sequences[:2]:
            cache.flatten(0, 1)[sequences.slots(row, max(length - 1, 0), length)] = float("nan")
    dims = case.head_dim, case.v_head_dim or case.head_dim
    k, v = (torch.randn(4, case.kv_heads, dim).to(device, case.dtype) for dim in dims)
    q, factors = make_queries(case, 4, device), list[Tensor]()
    expected_q, expected_k = q.cpu(), k.cpu()
    if rotary:
        angles = torch.randn(4, case.head_dim // 2).repeat(1, 2)
        factors = [x.to(device, case.dtype) for x in (angles.cos(), angles.sin())]
        cos, sin = (x.cpu() for x in factors)
        expected_q, expected_k = (reference.apply_rotary(x, cos, sin) for x in (q.cpu(), k.cpu()))
    after = [x.cpu().clone() for x in sequences]
    expected_out = reference.paged_decode(
        expected_q, expected_k, v.cpu(), *after, *case.options("cpu"), kv_scales=scales("cpu")
    )
    counters = torch.zeros(4, case.kv_heads, dtype=torch.int32, device=device)
    out = decode.paged_decode(
        q, k, v, *sequences, counters, *case.options(device), splits, *factors, kv_scales=scales(device)
    )
    assert_agrees(out, expected_out)
    for cache, expected_cache in zip(sequences[:2], after[:2], strict=True):
        distance = (bits(cache).int() - bits(expected_cache).int()).abs()
        assert distance.max() <= rotary, "rounding of RoPE may lead to the next FP8 value"
    assert not counters.any()


@pytest.mark.parametrize("splits_keys", [False, True])
@each_case
def test_prefill_agrees_with_the_reference(
    case: Case, splits_keys: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences, new = to_fp8(make_paged_sequences(case, [1, 140, 75, *[0] * 6], device)), [1, 20, 10, *[0] * 6]
    q = make_queries(case, sum(new) + 6, device)
    args = (q, *sequences[:3], cu_seqlens(new, device), sequences.seq_lens)
    workspace = None
    if splits_keys:
        monkeypatch.setattr(prefill, "MIN_KEYS_PER_PREFILL_SPLIT", 1)
        monkeypatch.setattr(prefill, "_concurrent_programs", lambda device: 1 << 12)
        counters = torch.zeros(case.heads * (len(q) + 18), dtype=torch.int32, device=device)
        workspace = prefill.make_split_workspace(q, sequences.v_cache, len(new), counters)
        assert workspace is not None
        workspace.lse.fill_(float("nan"))
    out = prefill.paged_prefill(*args, *case.options(device), workspace, kv_scales=scales(device))
    cpu = [x.cpu() for x in args]
    assert_agrees(out, reference.paged_prefill(*cpu, *case.options("cpu"), kv_scales=scales("cpu")))
    assert not out[sum(new) :].any(), "padding rows after the last sequence must be zero"
    assert workspace is None or ((~workspace.lse.isnan()).all(-1).sum(1) > 3).all(), "no key is split"


def mixed_arguments(case: Case, backend: str, device: str) -> tuple[Any, ...]:
    """Two decode rows, then the second chunks of two prompts, for `ops.mixed_attention`."""
    sequences = to_fp8(make_paged_sequences(case, [20, 33, 40, 25], device))
    q = make_queries(case, 15, device)
    dims = case.head_dim, case.v_head_dim or case.head_dim
    k, v = (torch.randn(15, case.kv_heads, dim).to(device, case.dtype) for dim in dims)
    prompts = torch.cat([torch.zeros_like(sequences.block_table[:1]), sequences.block_table[2:]])
    seq_lens = torch.tensor([0, 40, 25], dtype=torch.int32, device=device)
    scale, window, softcap, sinks = case.options(device)
    host_scalars = torch.tensor([15, 65, 8, 40, 1, 2, 2])
    counters = torch.zeros(num_prefill_counters(case.heads, 3) + 2, case.kv_heads, dtype=torch.int32, device=device)
    return (
        q, k, v, *sequences[:2], prompts, cu_seqlens([2, 8, 5], device), seq_lens, host_scalars,
        sequences.block_table[:2], sequences.seq_lens[:2], counters, sinks, scale, window, softcap, backend, backend,
        scales(device),
    )  # fmt: skip


@each_case
def test_the_mixed_step_agrees_with_the_reference(case: Case, device: str) -> None:
    arguments = mixed_arguments(case, "triton", device)
    cpu = [x.cpu().clone() if isinstance(x, Tensor) else x for x in arguments]
    cpu[16:18] = ["reference"] * 2
    out = ops.mixed_attention(*arguments)
    assert_agrees(out, ops.mixed_attention(*cpu))
    for cache, expected_cache in zip(arguments[3:5], cpu[3:5], strict=True):
        assert torch.equal(bits(cache), bits(expected_cache))


def test_opcheck_passes_with_scales() -> None:
    case = Case(group=2, head_dim=16)
    arguments = mixed_arguments(case, "reference", "cpu")
    q, k, v, k_cache, v_cache, table, starts, lengths, host_scalars = arguments[:9]
    for cache in (k_cache, v_cache):
        cache.copy_(cache.float().nan_to_num())
    rules, kv_scales = arguments[12:16], arguments[-1]
    checks = (
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_static",
    )  # test_schema multiplies float8
    for op, args in (
        (ops.kv_write, (k, v, k_cache, v_cache, torch.arange(20, 35), "reference", kv_scales)),
        (ops.prefill_attention, (q, k, v, k_cache, v_cache, table, starts, lengths, host_scalars, *rules, "reference",
                                 kv_scales)),
        (ops.decode_attention, (q[:2], k[:2], v[:2], k_cache, v_cache, *arguments[9:12], *rules, 1, "reference", None,
                                None, kv_scales)),
        (ops.mixed_attention, arguments),
    ):  # fmt: skip
        torch.library.opcheck(op.overload, args, test_utils=checks)


# No kernel runs below.


def launch_all(case: Case, batch: int, splits: int, scale_offset: int = 0) -> None:
    """Launch the three kernels once, on zeros. `scale_offset` moves the scales to an unaligned address."""
    kv_scales = torch.ones(2 + scale_offset)[scale_offset:]
    dims = case.head_dim, case.v_head_dim or case.head_dim
    caches = [torch.zeros(1, case.block_size, case.kv_heads, dim).to(FP8) for dim in dims]
    q = torch.zeros(batch, case.heads, case.head_dim, dtype=case.dtype)
    k, v = (torch.zeros(batch, case.kv_heads, dim, dtype=case.dtype) for dim in dims)
    table, lengths = torch.zeros(batch, 64, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
    counters = torch.zeros(batch, case.kv_heads, dtype=torch.int32)
    factors = torch.zeros(2, batch, case.head_dim, dtype=case.dtype).unbind()
    options = case.options("cpu")
    decode.paged_decode(q, k, v, *caches, table, lengths, counters, *options, splits, *factors, kv_scales=kv_scales)
    prefill.paged_prefill(
        q, *caches, table, torch.zeros(batch + 1, dtype=torch.int32), lengths, *options, kv_scales=kv_scales
    )
    prefill.write_kv(k, v, *caches, torch.zeros(batch, dtype=torch.int64), kv_scales)


@pytest.mark.parametrize(
    "case",
    [
        Case(head_dim=128, kv_heads=8, group=4, dtype=torch.bfloat16),
        pytest.param(
            Case(head_dim=256, kv_heads=4, group=2, dtype=torch.bfloat16, window=1024, softcap=50.0),
            marks=pytest.mark.long,
        ),
        Case(head_dim=192, v_head_dim=128, kv_heads=16, dtype=torch.float16, sinks=True),
        Case(head_dim=64, kv_heads=1),
    ],
    ids=["llama", "gemma", "deepseek with sinks", "float32"],
)
def test_the_kernels_compile_for_hopper_and_convert_in_hardware(case, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(decode, "supports_pdl", lambda _: True)
    launches = record_launches(monkeypatch)
    launch_all(case, batch=1, splits=8)
    decoding, prefilling, writing = (compile_for_hopper(launch) for launch in launches)
    for kernel in (decoding, prefilling, writing):
        assert kernel.metadata.shared <= HOPPER_SHARED_BYTES
    for kernel in (decoding, writing):
        assert re.search(r"cvt\.rn\.satfinite\.e4m3x2\.f32", kernel.asm["ptx"])
    for kernel in (decoding, prefilling):
        assert re.search(r"cvt\.rn\.f16x2\.e4m3x2", kernel.asm["ptx"])
    before, _ = decoding.asm["ptx"].split("griddepcontrol.wait")
    assert set(re.findall(r"ld\.global\.(\S+)", before)) == {"b32"}, "before the wait, only lengths and block ids"


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "dim", "v_dim"),
    [
        pytest.param(96, 32, 128, 64, id="128-64"),
        pytest.param(32, 16, 32, 32, id="32-32", marks=pytest.mark.long),
        pytest.param(16, 80, 64, 128, id="64-128", marks=pytest.mark.long),
    ],
)
def test_k_and_v_of_prefill_get_one_swizzle(head_dim, v_head_dim, dim, v_dim, monkeypatch, tmp_path) -> None:
    """With two swizzles, ptxas 12.8 computes most descriptors of V from registers that it does not write."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = record_launches(monkeypatch)
    launch_all(Case(head_dim, v_head_dim, group=2, dtype=torch.float16), batch=1, splits=8)
    compiled = compile_for_hopper(launches[1])
    constants = {compiled.src.fn.arg_names[i]: value for (i,), value in compiled.src.constants.items()}
    assert (constants["DIM"], constants["V_DIM"]) == (dim, v_dim)


def test_another_batch_window_or_address_of_the_scales_does_not_recompile(monkeypatch) -> None:
    launches = record_launches(monkeypatch)
    case = Case(head_dim=128, group=4, dtype=torch.bfloat16, window=64)
    for batch, splits, offset, window in ((1, 16, 0, 64), (2, 8, 1, 64), (3, 5, 3, 1001)):
        launch_all(replace(case, window=window), batch, splits, offset)
    assert len(launches) == 9
    keys = {specialization_key(launch) for launch in launches}
    assert len(keys) == 4, "decode of one sequence has larger tiles"
