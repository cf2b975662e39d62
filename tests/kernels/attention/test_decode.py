"""The Triton decode kernel agrees with `reference.paged_decode`, split or not, and torch.compile sees its writes.

In every test the newest token's slot is NaN before the call, so the kernel must take that token from registers.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.testing import assert_close

from tcdeploy.kernels.attention import decode, decode_kernel, ops, reference
from tcdeploy.kernels.attention.metadata import HeadNorms
from tests.kernels.attention.paged import (
    CASES,
    TOLERANCE,
    Case,
    PagedSequences,
    assert_agrees,
    make_paged_sequences,
    make_queries,
    some_models,
)
from tests.triton_tools import (
    CUDA,
    HOPPER_SHARED_BYTES,
    compile_for_hopper,
    record_launches,
    record_prefetches,
    shared_memory_on_hopper,
    specialization_key,
    triton_interpreter,
)


class Step(NamedTuple):
    """The arguments of one decode step, and the reference's result for them, computed on the CPU."""

    q: Tensor
    k: Tensor
    v: Tensor
    sequences: PagedSequences
    split_counters: Tensor
    options: tuple[float, int, float, Tensor | None]  # scale, window, softcap, sinks

    def arguments(self, splits: int) -> tuple[Any, ...]:
        """In the op's order."""
        scale, window, softcap, sinks = self.options
        return (
            self.q,
            self.k,
            self.v,
            *self.sequences,
            self.split_counters,
            sinks,
            scale,
            window,
            softcap,
            splits,
            "triton",
        )

    def run(self, splits: int) -> Tensor:
        return decode.paged_decode(self.q, self.k, self.v, *self.sequences, self.split_counters, *self.options, splits)

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """The output, k_cache and v_cache after the step. The step's own caches do not change."""
        q, k, v, k_cache, v_cache, *rest = (x.cpu().clone() for x in (self.q, self.k, self.v, *self.sequences))
        scale, window, softcap, sinks = self.options
        sinks = sinks if sinks is None else sinks.cpu()
        out = reference.paged_decode(q, k, v, k_cache, v_cache, *rest, scale, window, softcap, sinks)
        return out, k_cache, v_cache


def make_step(case: Case, lengths: list[int], device: str) -> Step:
    sequences = make_paged_sequences(case, lengths, device)
    batch, v_head_dim = len(lengths), case.v_head_dim or case.head_dim
    for row, length in enumerate(lengths):
        for cache in sequences[:2]:
            cache.flatten(0, 1)[sequences.slots(row, max(length - 1, 0), length)] = float("nan")
    k, v = (torch.randn(batch, case.kv_heads, dim).to(case.dtype).to(device) for dim in (case.head_dim, v_head_dim))
    split_counters = torch.zeros(batch, case.kv_heads, dtype=torch.int32, device=device)
    return Step(make_queries(case, batch, device), k, v, sequences, split_counters, case.options(device))


def assert_step_result(step: Step, out: Tensor, expected: tuple[Tensor, Tensor, Tensor]) -> None:
    """The output agrees, only the newest tokens' slots were written, and the counters are zero."""
    assert_agrees(out, expected[0])
    assert_close([x.cpu() for x in step.sequences[:2]], list(expected[1:]), equal_nan=True, atol=0, rtol=0)
    assert not step.split_counters.any()


# Cases that also run with 8 splits.
MANY_SPLITS = (
    "heads of 128, groups of 7",  # the only one whose merge takes two steps
    "heads of 256",  # several tiles per split
    "blocks larger than a tile", "a window that decode splits", "sinks, softcap and window", "bfloat16, everything",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "splits"), [(name, n) for name in CASES for n in (1, 2, 8) if n < 8 or name in MANY_SPLITS]
)
def test_decode_agrees_with_the_reference(name, splits, device):
    # Shorter than a tile; whole tiles plus the new token; padding; partial tile.
    step = make_step(CASES[name], [1, 129, 0, 270], device)
    expected = step.expected()
    out = step.run(splits)
    assert_step_result(step, out, expected)
    assert not out[2].any(), "a sequence of length 0 is padding, and its output must be zero"


@pytest.mark.parametrize("splits", [1, 2])
def test_rows_of_length_0_keep_the_contents_of_a_given_output(splits, device):
    step = make_step(CASES["bfloat16, everything"], [0, 129, 0, 5], device)
    expected = step.expected()
    out = torch.full_like(expected[0], 7.0, device=device)
    result = decode.paged_decode(
        step.q, step.k, step.v, *step.sequences, step.split_counters, *step.options, splits, None, None, out
    )
    assert result is out and (out[[0, 2]] == 7.0).all()
    out[[0, 2]] = 0.0
    assert_step_result(step, out, expected)


@pytest.mark.parametrize("splits", [3, 32])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_a_long_sequence_can_be_cut_into_any_number_of_splits(sinks, splits, device):
    step = make_step(Case(kv_heads=1, group=2, sinks=sinks), [2040], device)
    expected = step.expected()
    assert_step_result(step, step.run(splits), expected)


@pytest.mark.parametrize("splits", [2, 4])
@pytest.mark.parametrize("window", [0, 300], ids=["", "window"])
def test_splits_take_turns_of_several_tiles(window, splits, device, monkeypatch):
    """Lengths: within a turn, whole turns with and without the new token, several rounds, and padding.

    A sequence that fits one turn is not split, so its counters may have any value.
    """
    turn = 2
    case = Case(group=2, window=window, head_dim=128)
    monkeypatch.setattr(decode, "tiles_per_turn", lambda batch, kv_heads: turn)
    monkeypatch.setattr(decode, "TILE_BYTES", 16 * case.head_dim * 4)  # tiles of 16 keys
    keys = 16 * turn
    step = make_step(case, [5, keys, keys + 1, 0, 2 * keys + 17, 5 * splits * keys + 3], device)
    expected = step.expected()
    step.split_counters[:3] = 99
    out = step.run(splits)
    assert (step.split_counters[:3] == 99).all()
    step.split_counters[:3] = 0
    assert_step_result(step, out, expected)


@pytest.mark.parametrize("splits", [1, 4])
def test_keys_older_than_the_window_are_not_read(splits, device):
    step = make_step(Case(window=37), [150], device)
    expected_out, _, _ = step.expected()
    for cache in step.sequences[:2]:
        cache.flatten(0, 1)[step.sequences.slots(0, 0, 113)] = float("nan")
    assert_agrees(step.run(splits), expected_out)


@pytest.mark.parametrize("splits", [1, 2])
def test_q_k_and_v_may_be_slices_of_one_packed_row(splits, device):
    step = make_step(Case(group=3), [40, 77], device)
    expected = step.expected()
    shapes = [x.shape[1:] for x in step[:3]]
    packed = torch.cat([x.flatten(1) for x in step[:3]], dim=1)
    slices = packed.split([shape.numel() for shape in shapes], dim=1)
    step = step._replace(**{name: x.unflatten(1, shape) for name, x, shape in zip("qkv", slices, shapes, strict=True)})
    assert not any(x.is_contiguous() for x in step[:3])
    assert_step_result(step, step.run(splits), expected)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    "case",
    [
        Case(group=3),
        Case(head_dim=80, group=2, window=50),
        Case(head_dim=128, group=4, kv_heads=1, dtype=torch.bfloat16),
        Case(head_dim=96, v_head_dim=32, sinks=True),
    ],
    ids=["", "heads of 80", "bfloat16", "values smaller than keys"],
)
def test_rope_in_the_kernel_equals_rope_before_it(case, splits, device):
    """The key that is stored in the cache is the rotated one."""
    step = make_step(case, [40, 0, 150], device)
    angles = torch.randn(3, case.head_dim // 2).repeat(1, 2) * 3
    cos, sin = (x.to(device, case.dtype) for x in (angles.cos(), angles.sin()))
    rotated = step._replace(**{name: reference.apply_rotary(getattr(step, name), cos, sin) for name in "qk"})
    expected_out, *expected_caches = rotated.expected()
    out = decode.paged_decode(
        step.q, step.k, step.v, *step.sequences, step.split_counters, *step.options, splits, cos, sin
    )
    assert_agrees(out, expected_out)
    for cache, expected_cache in zip(step.sequences[:2], expected_caches, strict=True):
        tolerance = TOLERANCE[case.dtype]  # multiply and add may be fused
        assert_close(cache.cpu(), expected_cache, equal_nan=True, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("lengths", [[40, 0, 150], [300]], ids=["", "one sequence"])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    "case",
    [
        Case(group=3),
        Case(head_dim=80, group=2, window=50),
        Case(head_dim=128, group=8, kv_heads=1, dtype=torch.bfloat16),
    ],
    ids=["", "heads of 80", "bfloat16"],
)
def test_norms_of_heads_in_the_kernel_equal_norms_before_it(case, splits, lengths, device):
    """The heads are small, so that eps matters."""
    step = make_step(case, lengths, device)
    step = step._replace(q=step.q / 30, k=step.k / 20)
    angles = torch.randn(len(lengths), case.head_dim // 2).repeat(1, 2) * 3
    cos, sin = (x.to(device, case.dtype) for x in (angles.cos(), angles.sin()))
    norms = HeadNorms(*(torch.randn(case.head_dim).to(device, case.dtype) for _ in range(2)), eps=1e-3)
    normed = (reference.normalise_heads(x, w, norms.eps) for x, w in ((step.q, norms.q), (step.k, norms.k)))
    q, k = (reference.apply_rotary(x, cos, sin).to(case.dtype) for x in normed)
    expected_out, *expected_caches = step._replace(q=q, k=k).expected()
    out = decode.paged_decode(
        step.q, step.k, step.v, *step.sequences, step.split_counters, *step.options, splits, cos, sin, norms=norms
    )
    assert_agrees(out, expected_out)
    for cache, expected_cache in zip(step.sequences[:2], expected_caches, strict=True):
        tolerance = TOLERANCE[case.dtype]
        assert_close(cache.cpu(), expected_cache, equal_nan=True, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("splits", [1, 8])
def test_a_captured_decode_replays_with_other_lengths(splits, device):
    step = make_step(Case(group=4, sinks=True, head_dim=128, dtype=torch.bfloat16), [300, 170], device)
    step.run(splits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step.run(splits)
    for lengths in ([300, 170], [1, 0], [64, 129]):
        step.sequences.seq_lens.copy_(torch.tensor(lengths))
        expected_out, _, _ = step.expected()
        graph.replay()
        first = out.clone()
        assert_agrees(first, expected_out)
        for _ in range(2000):
            graph.replay()
        assert torch.equal(out, first), "splits must merge in the same order, whichever finishes last"
        assert not step.split_counters.any()


@pytest.mark.parametrize("device", [CUDA])
def test_a_compiled_region_writes_in_place_for_any_table_width_and_number_of_blocks(device):
    case = Case(group=4, head_dim=128, dtype=torch.bfloat16)
    weight = torch.randn(case.heads * case.head_dim, 64, dtype=case.dtype, device=device) / 64

    @torch.compile(fullgraph=True, dynamic=False)
    def region(q: Tensor, *rest: Any) -> Tensor:
        return ops.decode_attention(q * 0.5, *rest).flatten(1) @ weight

    torch._dynamo.reset()
    counters.clear()
    for lengths in ([300, 170], [900, 40]):
        step = make_step(case, lengths, device)
        for tensor, dim in ((step.sequences.k_cache, 0), (step.sequences.v_cache, 0), (step.sequences.block_table, 1)):
            torch._dynamo.mark_dynamic(tensor, dim)
        expected_out, *expected_caches = step._replace(q=step.q * 0.5).expected()
        with torch.no_grad():
            out = region(*step.arguments(4))
        assert_close(out.cpu().float(), expected_out.flatten(1).float() @ weight.cpu().float(), atol=3e-2, rtol=3e-2)
        assert_close([x.cpu() for x in step.sequences[:2]], expected_caches, equal_nan=True, atol=0, rtol=0)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("splits", [1, 4])
def test_opcheck_passes_and_so_the_declared_mutations_are_complete(splits, device):
    step = make_step(Case(group=4, head_dim=128, kv_heads=1, dtype=torch.bfloat16, window=40), [100, 0], device)
    for cache in step.sequences[:2]:
        cache.nan_to_num_()
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(ops.decode_attention.overload, step.arguments(splits), test_utils=checks)
    factors = torch.randn(2, 2, 128, dtype=torch.bfloat16).to(device).unbind()
    torch.library.opcheck(ops.decode_attention.overload, (*step.arguments(splits), *factors), test_utils=checks)


@pytest.mark.parametrize("block_size", [16, 256], ids=["blocks smaller than a tile", "larger"])
@pytest.mark.parametrize("window", [0, 100], ids=["", "window"])
def test_the_first_tiles_of_all_splits_are_prefetched_and_no_other_memory(window, block_size, monkeypatch):
    """Three splits, and tiles of 128 keys. All that is prefetched is in a cache or another operand."""
    case = Case(head_dim=128, group=2, kv_heads=1, block_size=block_size, window=window, dtype=torch.bfloat16)
    step = make_step(case, [310], "cpu")
    step.sequences.block_table[0, -(-310 // block_size) :] = 10**6
    factors = [torch.ones(1, 128, dtype=case.dtype) for _ in range(2)]
    norms = HeadNorms(torch.ones(128), torch.ones(128), 1e-6)
    with triton_interpreter(monkeypatch):
        prefetched = record_prefetches(monkeypatch, decode.KERNEL, decode_kernel, decode)
        decode.paged_decode(
            step.q, step.k, step.v, *step.sequences, step.split_counters, *step.options, 3, *factors, norms=norms
        )
    addresses = set(np.concatenate([batch.ravel() for batch in prefetched]).tolist())
    first = 128 if window else 0  # of the tiles that overlap the window
    for cache in step.sequences[:2]:
        slots = step.sequences.slots(0, first, 309).tolist()
        assert {cache.data_ptr() + slot * 256 + byte for slot in slots for byte in (0, 255)} <= addresses
    operands = (*step.sequences[:2], *factors, norms.q, norms.k)
    inside = [range(x.data_ptr(), x.data_ptr() + x.nbytes) for x in operands]
    assert all(any(address in memory for memory in inside) for address in addresses)
    assert all(x.data_ptr() in addresses for x in operands[2:])


# No kernel runs below.


def launch(case: Case, batch: int, splits: int, with_rotary: bool = False) -> None:
    """Launch the kernel once, on zeros. With an odd batch the lengths and table start at an unaligned address."""
    lengths = torch.zeros(2 * batch, dtype=torch.int32)[batch % 2 :][:batch]
    table = torch.zeros(batch, 64 + batch, dtype=torch.int32)[:, batch % 2 :][:, :64]
    dims = case.head_dim, case.v_head_dim or case.head_dim
    caches = [torch.zeros(1, case.block_size, case.kv_heads, dim, dtype=case.dtype) for dim in dims]
    q = torch.zeros(batch, case.heads, case.head_dim, dtype=case.dtype)
    k, v = (torch.zeros(batch, case.kv_heads, dim, dtype=case.dtype) for dim in dims)
    split_counters = torch.zeros(batch, case.kv_heads, dtype=torch.int32)
    factors = [torch.zeros(batch, case.head_dim, dtype=case.dtype) for _ in range(2)] if with_rotary else []
    decode.paged_decode(q, k, v, *caches, table, lengths, split_counters, *case.options("cpu"), splits, *factors)


@some_models
def test_the_whole_kernel_compiles_for_hopper_and_fits_its_shared_memory(case, monkeypatch, tmp_path):
    """With splits and RoPE. The next test also compiles it without them, for one model."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = record_launches(monkeypatch)
    launch(case, batch=1, splits=8, with_rotary=True)
    [recorded] = launches
    assert shared_memory_on_hopper(recorded) <= HOPPER_SHARED_BYTES


@pytest.mark.parametrize(
    ("batch", "splits", "with_rotary"), [(1, 1, False), (1, 8, False), (1, 8, True), (64, 8, False)]
)
def test_with_pdl_the_kernel_waits_before_it_accesses_what_the_step_writes(
    batch, splits, with_rotary, monkeypatch, tmp_path
):
    """Before the wait the kernel loads only int32: the length and block ids, which no kernel of the step writes."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(decode, "supports_pdl", lambda _: True)
    launches = record_launches(monkeypatch)
    launch(Case(head_dim=128, group=4, kv_heads=2, dtype=torch.bfloat16), batch, splits, with_rotary)
    compiled = compile_for_hopper(launches[0])
    assert compiled.metadata.shared <= HOPPER_SHARED_BYTES
    assert compiled.metadata.launch_pdl
    before, after = compiled.asm["ptx"].split("griddepcontrol.wait")
    assert set(re.findall(r"ld\.global\.(\S+)", before)) == {"b32"}
    assert "cp.async" not in before and "st.global" not in before
    assert "griddepcontrol.launch_dependents" in after and "st.global" in after


def test_without_pdl_support_the_kernel_is_launched_without_it(monkeypatch):
    launches = record_launches(monkeypatch)
    launch(Case(), 1, 1)
    assert "launch_pdl" not in launches[0].options


def test_another_batch_window_or_number_of_splits_does_not_recompile(monkeypatch):
    launches = record_launches(monkeypatch)
    for batch, splits in ((1, 16), (2, 8), (3, 5), (16, 2), (17, 2)):
        for window in (0, 1001, 64):
            launch(Case(head_dim=128, group=4, window=window, dtype=torch.bfloat16), batch, splits)
    assert len(launches) == 15
    keys = [specialization_key(recorded) for recorded in launches]
    assert len(set(keys)) == 4, "one with a window and one without, for one sequence and for more"
    assert len(set(keys[3:])) == 2
    launches.clear()
    for batch, splits in ((1, 16), (64, 4), (65, 8), (100, 4)):
        launch(Case(head_dim=128, group=4, kv_heads=2, dtype=torch.bfloat16), batch, splits)
    keys = [specialization_key(recorded) for recorded in launches]
    assert keys[1] == keys[2] == keys[3] != keys[0], "large batches have longer turns"
