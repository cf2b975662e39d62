"""The kernels of prefill say what `reference.py` says, for every feature, on a GPU or in Triton's interpreter.

The last tests need neither: they ask Triton's compiler, which works without a GPU, whether the kernels fit a Hopper GPU
and whether a batch of another size would compile them again.
"""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from torch.testing import assert_close
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from tcdeploy.attention import decode, kernels, reference
from tests.attention.paged import (
    CUDA,
    TOLERANCE,
    Case,
    assert_agrees,
    each_case,
    expected,
    make_paged_sequences,
    make_queries,
    offsets,
    record_launches,
    shared_memory_on_hopper,
    some_models,
    specialization_key,
    triton_interpreter,
)


@each_case
def test_prefill_means_what_the_reference_means(case, device):
    pages = make_paged_sequences(case, [1, 64, 140, 40], device)
    new = [1, 34, 20, 0]  # the rest of each sequence is a prefix that an earlier chunk wrote; 6 rows of padding
    args = (make_queries(case, sum(new) + 6, device), *pages[:3], offsets(new, device), pages.seq_lens)
    actual = kernels.paged_prefill(*args, *case.options(device))
    assert_agrees(actual, expected(reference.paged_prefill, *args, *case.options(device)))
    assert not actual[sum(new) :].any(), "rows past the last sequence are padding, and padding is zeros"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [0, 40])
def test_chunks_over_one_cache_make_one_whole_prefill(dtype, window, device):
    case = Case(group=2, kv_heads=1, window=window, dtype=dtype)
    length, options = 150, case.options(device)
    pages = make_paged_sequences(case, [length], device)
    q = make_queries(case, length, device)
    whole = kernels.paged_prefill(q, *pages[:3], offsets([length], device), pages.seq_lens, *options)
    edges = [0, 1, 65, 129, length]
    for start, stop in zip(edges, edges[1:], strict=False):
        so_far = torch.tensor([stop], dtype=torch.int32, device=device)
        chunk = kernels.paged_prefill(q[start:stop], *pages[:3], offsets([stop - start], device), so_far, *options)
        assert_close(chunk, whole[start:stop], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("sequences", [1, 70])
def test_many_short_sequences_find_their_tiles(sequences, device):
    case = Case(head_dim=16, kv_heads=1)
    new = [1 + 5 * row % 23 for row in range(sequences)]
    pages = make_paged_sequences(case, new, device)
    args = (make_queries(case, sum(new) + 40, device), *pages[:3], offsets(new, device), pages.seq_lens)
    actual = kernels.paged_prefill(*args, *case.options(device))
    assert_agrees(actual, expected(reference.paged_prefill, *args, *case.options(device)))


def test_keys_older_than_the_window_are_never_read(device):
    case = Case(window=37)
    pages = make_paged_sequences(case, [150], device)
    q, options = make_queries(case, 10, device), case.options(device)
    prefill_args = (q, *pages[:3], offsets([10], device), pages.seq_lens, *options)
    prefilled = expected(reference.paged_prefill, *prefill_args)
    for cache in pages[:2]:  # what the first of the ten queries still sees begins at 150 - 10 + 1 - 37
        cache.flatten(0, 1)[pages.slots(0, 0, 104)] = float("nan")
    assert_agrees(kernels.paged_prefill(*prefill_args), prefilled)


def test_queries_may_be_strided(device):
    case = Case(group=3)
    pages = make_paged_sequences(case, [40, 77], device)
    packed = make_queries(case, 2 * 40, device).flatten(1)  # [tokens, heads * head_dim]
    sliced = torch.cat([packed, packed], dim=1)[:, case.head_dim :][:, : packed.shape[1]].unflatten(1, (case.heads, -1))
    transposed = sliced.transpose(0, 1).contiguous().transpose(0, 1)
    for q in (sliced, transposed):
        assert not q.is_contiguous()
        prefill = (q[:40], *pages[:3], offsets([10, 30], device), pages.seq_lens, *case.options(device))
        assert_agrees(kernels.paged_prefill(*prefill), expected(reference.paged_prefill, *prefill))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "v_head_dim"),
    [(2, 64, 64), (3, 96, 32), (1, 32, 80), (40, 128, 128)],
    ids=["plain", "values smaller", "values larger", "more heads than a program takes"],
)
def test_write_puts_each_token_in_its_slot_and_touches_no_other(kv_heads, head_dim, v_head_dim, dtype, device):
    slots = torch.tensor([5, 63, 0, 31, 32], device=device)
    packed = torch.randn(5, 7 + kv_heads * (head_dim + v_head_dim)).to(dtype).to(device)
    k, v = packed[:, 7:].split([kv_heads * head_dim, kv_heads * v_head_dim], dim=1)
    k, v = k.unflatten(1, (kv_heads, head_dim)), v.unflatten(1, (kv_heads, v_head_dim))
    caches = [torch.full((4, 16, *x.shape[1:]), float("nan"), dtype=dtype, device=device) for x in (k, v)]
    wanted = [cache.clone() for cache in caches]
    for cache, new in zip(wanted, (k, v), strict=True):
        cache.flatten(0, 1)[slots] = new
    kernels.write_kv(k, v, *caches, slots)
    assert_close(caches, wanted, equal_nan=True, atol=0, rtol=0)


def test_one_launch_writes_keys_and_values(device, monkeypatch):
    launched = record_launches(monkeypatch)
    k, cache = torch.randn(3, 2, 32, device=device), torch.zeros(2, 16, 2, 32, device=device)
    kernels.write_kv(k, k, cache, cache.clone(), torch.arange(3, device=device))
    assert [launch.kernel for launch in launched] == [kernels._write_kernel]


@pytest.mark.parametrize("device", [CUDA])
def test_slots_beyond_two_billion_elements_are_reached(device):
    blocks = 2**31 // (16 * 8 * 128) + 2
    if torch.cuda.mem_get_info()[0] < 12e9:
        pytest.skip("needs 12 GB of free GPU memory")
    case = Case(kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    caches = [torch.empty(blocks, 16, 8, 128, dtype=case.dtype, device=device) for _ in range(2)]
    k, v, q = (torch.randn(16, 8, 128, dtype=case.dtype, device=device) for _ in range(3))
    kernels.write_kv(k, v, *caches, (blocks - 1) * 16 + torch.arange(16, device=device))
    table = torch.full((1, 1), blocks - 1, dtype=torch.int32, device=device)
    lengths = torch.tensor([16], dtype=torch.int32, device=device)
    wanted = expected(reference.attend, q, k, v, *case.options(device))
    prefilled = kernels.paged_prefill(q, *caches, table, offsets([16], device), lengths, *case.options(device))
    assert_agrees(prefilled, wanted)
    for cache in caches:
        cache[-1, -1] = float("nan")
    split_counters = torch.zeros(1, 8, dtype=torch.int32, device=device)
    decoded = decode.attend(q[15:], k[15:], v[15:], *caches, table, lengths, split_counters, *case.options(device), 2)
    assert_agrees(decoded, wanted[15:])
    assert torch.equal(caches[0][-1], k) and torch.equal(caches[1][-1], v)


# What holds without running a kernel.


def test_interpreting_leaves_triton_as_it_was():
    def attributes() -> dict[tuple[str, str], int]:
        owners = [tl, tl.core, tl.math, tl.tensor, tl.dtype, interpreter, interpreter.InterpreterBuilder, JITFunction]
        return {(repr(owner), name): id(value) for owner in owners for name, value in vars(owner).items()}

    before = attributes()
    k, cache = torch.randn(3, 2, 32), torch.zeros(2, 16, 2, 32)
    with pytest.MonkeyPatch.context() as patch, triton_interpreter(patch):
        assert attributes() != before
        kernels.write_kv(k, k, cache, cache.clone(), torch.arange(3))
    assert attributes() == before
    assert_close(cache[0, :3], k, atol=0, rtol=0)


def launch_everything(case: Case, batch: int) -> None:
    """Each public function once, on zeros. An odd batch has its lengths and slots at an odd address."""
    cu_seqlens_q = torch.zeros(batch + 1, dtype=torch.int32)
    lengths, slots = (torch.zeros(2 * batch, dtype=x)[batch % 2 :][:batch] for x in (torch.int32, torch.int64))
    table = torch.zeros(batch, 64 + batch, dtype=torch.int32)[:, :64]
    dims = case.head_dim, case.v_head_dim or case.head_dim
    caches = [torch.zeros(1, case.block_size, case.kv_heads, dim, dtype=case.dtype) for dim in dims]
    q = torch.zeros(batch, case.heads, case.head_dim, dtype=case.dtype)
    k, v = (cache[0, :1].expand(batch, -1, -1) for cache in caches)
    kernels.write_kv(k, v, *caches, slots)
    kernels.paged_prefill(q, *caches, table, cu_seqlens_q, lengths, *case.options("cpu"))


@some_models
def test_the_kernels_compile_for_hopper_and_fit_its_shared_memory(case, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = record_launches(monkeypatch)
    launch_everything(case, batch=1)
    assert [launch.kernel for launch in launches] == [kernels._write_kernel, kernels._prefill_kernel]
    for launch in launches:
        assert shared_memory_on_hopper(launch) <= 227 * 1024


def test_another_batch_or_window_compiles_nothing_new(monkeypatch):
    launches = record_launches(monkeypatch)
    for batch, window in ((1, 0), (2, 0), (3, 1001), (16, 0), (17, 0), (33, 1001)):
        launch_everything(Case(head_dim=128, group=4, window=window, dtype=torch.bfloat16), batch)
    programs = {specialization_key(launch) for launch in launches}
    assert sorted(name for name, _ in programs) == ["_prefill_kernel", "_write_kernel"]
