"""Decode says what `reference.paged_decode` says, whole and in parts, and torch.compile sees what it writes.

In every test the newest token's slot is NaN before the call: only what the kernel takes from registers is right.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.testing import assert_close

from tcdeploy.attention import decode, ops, reference
from tests.attention.paged import (
    CUDA,
    TOLERANCE,
    Case,
    PagedSequences,
    assert_agrees,
    compile_for_hopper,
    each_case,
    make_paged_sequences,
    make_queries,
    record_launches,
    shared_memory_on_hopper,
    some_models,
    specialization_key,
)


class Step(NamedTuple):
    """One decode step's arguments, and the reference's answer to them, computed on the CPU."""

    q: Tensor
    k: Tensor
    v: Tensor
    pages: PagedSequences
    split_counters: Tensor
    options: tuple[float, int, float, Tensor | None]  # scale, window, softcap, sinks

    def arguments(self, splits: int) -> tuple[Any, ...]:
        """As the op takes them."""
        scale, window, softcap, sinks = self.options
        return (
            self.q,
            self.k,
            self.v,
            *self.pages,
            self.split_counters,
            sinks,
            scale,
            window,
            softcap,
            splits,
            "triton",
        )

    def run(self, splits: int) -> Tensor:
        return decode.paged_decode(self.q, self.k, self.v, *self.pages, self.split_counters, *self.options, splits)

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output, k_cache and v_cache afterwards; the step's own caches are left alone."""
        q, k, v, k_cache, v_cache, *rest = (x.cpu().clone() for x in (self.q, self.k, self.v, *self.pages))
        scale, window, softcap, sinks = self.options
        sinks = sinks if sinks is None else sinks.cpu()
        out = reference.paged_decode(q, k, v, k_cache, v_cache, *rest, scale, window, softcap, sinks)
        return out, k_cache, v_cache


def make_step(case: Case, lengths: list[int], device: str) -> Step:
    pages = make_paged_sequences(case, lengths, device)
    batch, v_head_dim = len(lengths), case.v_head_dim or case.head_dim
    for row, length in enumerate(lengths):
        for cache in pages[:2]:
            cache.flatten(0, 1)[pages.slots(row, max(length - 1, 0), length)] = float("nan")
    k, v = (torch.randn(batch, case.kv_heads, dim).to(case.dtype).to(device) for dim in (case.head_dim, v_head_dim))
    split_counters = torch.zeros(batch, case.kv_heads, dtype=torch.int32, device=device)
    return Step(make_queries(case, batch, device), k, v, pages, split_counters, case.options(device))


def assert_step_result(step: Step, out: Tensor, wanted: tuple[Tensor, Tensor, Tensor]) -> None:
    """The output, the newest tokens in their slots and no other slot touched, the counters at zero."""
    assert_agrees(out, wanted[0])
    assert_close([x.cpu() for x in step.pages[:2]], list(wanted[1:]), equal_nan=True, atol=0, rtol=0)
    assert not step.split_counters.any()


@each_case
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_decode_means_what_the_reference_means(case, splits, device):
    step = make_step(case, [1, 129, 0, 270], device)  # shorter than a tile, whole tiles and the new token, padding
    wanted = step.expected()
    out = step.run(splits)
    assert_step_result(step, out, wanted)
    assert not out[2].any(), "a sequence of length 0 is padding, and padding is zeros"


@pytest.mark.parametrize("splits", [3, 32])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_a_long_sequence_is_dealt_to_any_number_of_parts(sinks, splits, device):
    step = make_step(Case(kv_heads=1, group=2, sinks=sinks), [2040], device)
    wanted = step.expected()
    assert_step_result(step, step.run(splits), wanted)


@pytest.mark.parametrize("splits", [1, 4])
def test_keys_older_than_the_window_are_never_read(splits, device):
    step = make_step(Case(window=37), [150], device)
    wanted, _, _ = step.expected()
    for cache in step.pages[:2]:
        cache.flatten(0, 1)[step.pages.slots(0, 0, 113)] = float("nan")
    assert_agrees(step.run(splits), wanted)


@pytest.mark.parametrize("splits", [1, 2])
def test_queries_keys_and_values_may_be_slices_of_one_row(splits, device):
    step = make_step(Case(group=3), [40, 77], device)
    wanted = step.expected()
    shapes = [x.shape[1:] for x in step[:3]]
    packed = torch.cat([x.flatten(1) for x in step[:3]], dim=1)
    slices = packed.split([shape.numel() for shape in shapes], dim=1)
    step = step._replace(**{name: x.unflatten(1, shape) for name, x, shape in zip("qkv", slices, shapes, strict=True)})
    assert not any(x.is_contiguous() for x in step[:3])
    assert_step_result(step, step.run(splits), wanted)


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
def test_queries_and_keys_that_are_yet_to_be_turned(case, splits, device):
    """As if they had been turned before; the key that lands in the cache is the turned one."""
    step = make_step(case, [40, 0, 150], device)
    angles = torch.randn(3, case.head_dim // 2).repeat(1, 2) * 3
    cos, sin = (x.to(device, case.dtype) for x in (angles.cos(), angles.sin()))
    apply_rotary = step._replace(**{name: reference.apply_rotary(getattr(step, name), cos, sin) for name in "qk"})
    wanted = apply_rotary.expected()
    out = decode.paged_decode(step.q, step.k, step.v, *step.pages, step.split_counters, *step.options, splits, cos, sin)
    assert_agrees(out, wanted[0])
    for found, expected in zip(step.pages[:2], wanted[1:], strict=True):
        tolerance = TOLERANCE[case.dtype]  # a product and a sum, in one order or fused
        assert_close(found.cpu(), expected, equal_nan=True, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("splits", [1, 8])
def test_a_captured_decode_replays_thousands_of_times_with_other_lengths(splits, device):
    step = make_step(Case(group=4, sinks=True, head_dim=128, dtype=torch.bfloat16), [300, 170], device)
    step.run(splits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step.run(splits)
    for lengths in ([300, 170], [1, 0], [64, 129]):
        step.pages.seq_lens.copy_(torch.tensor(lengths))
        wanted, _, _ = step.expected()
        graph.replay()
        first = out.clone()
        assert_agrees(first, wanted)
        for _ in range(2000):
            graph.replay()
        assert torch.equal(out, first), "whoever arrives last, the parts are merged in one order"
        assert not step.split_counters.any()


@pytest.mark.parametrize("device", [CUDA])
def test_a_compiled_region_writes_in_place_and_takes_any_width_and_number_of_blocks(device):
    case = Case(group=4, head_dim=128, dtype=torch.bfloat16)
    weight = torch.randn(case.heads * case.head_dim, 64, dtype=case.dtype, device=device) / 64

    @torch.compile(fullgraph=True, dynamic=False)
    def region(q: Tensor, *rest: Any) -> Tensor:
        return ops.decode_attention(q * 0.5, *rest).flatten(1) @ weight

    torch._dynamo.reset()
    counters.clear()
    for lengths in ([300, 170], [900, 40]):
        step = make_step(case, lengths, device)
        for tensor, dim in ((step.pages.k_cache, 0), (step.pages.v_cache, 0), (step.pages.block_table, 1)):
            torch._dynamo.mark_dynamic(tensor, dim)
        wanted, *caches = step._replace(q=step.q * 0.5).expected()
        with torch.no_grad():
            out = region(*step.arguments(4))
        assert_close(out.cpu().float(), wanted.flatten(1).float() @ weight.cpu().float(), atol=3e-2, rtol=3e-2)
        assert_close([x.cpu() for x in step.pages[:2]], caches, equal_nan=True, atol=0, rtol=0)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("splits", [1, 4])
def test_opcheck_passes_so_the_op_writes_what_it_declares_and_nothing_else(splits, device):
    step = make_step(Case(group=4, head_dim=128, dtype=torch.bfloat16, window=100), [300, 0], device)
    for cache in step.pages[:2]:
        cache.nan_to_num_()
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(ops.decode_attention, step.arguments(splits), test_utils=checks)
    factors = torch.randn(2, 2, 128, dtype=torch.bfloat16).to(device).unbind()
    torch.library.opcheck(ops.decode_attention, (*step.arguments(splits), *factors), test_utils=checks)


# What holds without running a kernel.


def launch(case: Case, batch: int, splits: int, with_rotary: bool = False) -> None:
    """The op once, on zeros. An odd batch has its lengths and table at an odd address."""
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
@pytest.mark.parametrize(("splits", "turns"), [(1, False), (8, False), (8, True)])
def test_the_kernel_compiles_for_hopper_and_fits_its_shared_memory(case, splits, with_rotary, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = record_launches(monkeypatch)
    launch(case, 1, splits, with_rotary)
    [launched] = launches
    assert shared_memory_on_hopper(launched) <= 227 * 1024


@pytest.mark.parametrize(("splits", "turns"), [(1, False), (8, False), (8, True)])
def test_launched_early_the_kernel_waits_before_it_touches_what_the_step_writes(
    splits, with_rotary, monkeypatch, tmp_path
):
    """Before the wait it reads a length and block ids, int32, which no kernel of the step writes; no bfloat16."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(decode, "supports_pdl", lambda _: True)
    launches = record_launches(monkeypatch)
    launch(Case(head_dim=128, group=4, dtype=torch.bfloat16), 1, splits, with_rotary)
    compiled = compile_for_hopper(launches[0])
    assert compiled.metadata.launch_pdl
    before, after = compiled.asm["ptx"].split("griddepcontrol.wait")
    assert set(re.findall(r"ld\.global\.(\S+)", before)) == {"b32"}
    assert "cp.async" not in before and "st.global" not in before
    assert "griddepcontrol.launch_dependents" in after and "st.global" in after


def test_a_gpu_without_dependent_launch_is_not_asked_for_it(monkeypatch):
    launches = record_launches(monkeypatch)
    launch(Case(), 1, 1)
    assert "launch_pdl" not in launches[0].options


def test_another_batch_window_or_number_of_parts_compiles_nothing_new(monkeypatch):
    launches = record_launches(monkeypatch)
    for batch, splits in ((1, 16), (2, 8), (3, 5), (16, 2), (17, 2)):
        for window in (0, 1001, 64):
            launch(Case(head_dim=128, group=4, window=window, dtype=torch.bfloat16), batch, splits)
    assert len(launches) == 15
    assert len({specialization_key(launched) for launched in launches}) == 2, "with a window, and without"
