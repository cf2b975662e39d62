"""The Triton prefill kernel agrees with `reference.paged_prefill` for every feature, compiled or interpreted.

The last tests run no kernel: they compile it for Hopper and check its specialisation.
"""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from tcdeploy.attention import decode, kv_write, prefill, reference
from tests.attention.paged import (
    TOLERANCE,
    Case,
    assert_agrees,
    cu_seqlens,
    each_case,
    expected,
    make_paged_sequences,
    make_queries,
    some_models,
)
from tests.triton_tools import (
    CUDA,
    HOPPER_SHARED_BYTES,
    record_launches,
    shared_memory_on_hopper,
    specialization_key,
)


@each_case
def test_prefill_agrees_with_the_reference(case, device):
    sequences = make_paged_sequences(case, [1, 64, 140, 40], device)
    new = [1, 20, 10, 0]  # the rest of each sequence is a prefix that an earlier chunk wrote; 6 padding rows
    args = (make_queries(case, sum(new) + 6, device), *sequences[:3], cu_seqlens(new, device), sequences.seq_lens)
    actual = prefill.paged_prefill(*args, *case.options(device))
    assert_agrees(actual, expected(reference.paged_prefill, *args, *case.options(device)))
    assert not actual[sum(new) :].any(), "padding rows after the last sequence must be zero"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [0, 40])
def test_chunked_prefill_equals_one_prefill(dtype, window, device):
    case = Case(group=2, kv_heads=1, window=window, dtype=dtype)
    length, options = 150, case.options(device)
    sequences = make_paged_sequences(case, [length], device)
    q = make_queries(case, length, device)
    unchunked = prefill.paged_prefill(q, *sequences[:3], cu_seqlens([length], device), sequences.seq_lens, *options)
    edges = [0, 1, 65, 129, length]
    for start, stop in zip(edges, edges[1:], strict=False):
        seq_lens = torch.tensor([stop], dtype=torch.int32, device=device)
        chunk = prefill.paged_prefill(
            q[start:stop], *sequences[:3], cu_seqlens([stop - start], device), seq_lens, *options
        )
        assert_close(chunk, unchunked[start:stop], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("num_sequences", [1, 70])
def test_tiles_are_assigned_to_many_short_sequences(num_sequences, device):
    case = Case(head_dim=16, kv_heads=1)
    new = [1 + 5 * row % 23 for row in range(num_sequences)]
    sequences = make_paged_sequences(case, new, device)
    args = (make_queries(case, sum(new) + 40, device), *sequences[:3], cu_seqlens(new, device), sequences.seq_lens)
    actual = prefill.paged_prefill(*args, *case.options(device))
    assert_agrees(actual, expected(reference.paged_prefill, *args, *case.options(device)))


def test_keys_older_than_the_window_are_not_read(device):
    case = Case(window=37)
    sequences = make_paged_sequences(case, [150], device)
    q, options = make_queries(case, 10, device), case.options(device)
    args = (q, *sequences[:3], cu_seqlens([10], device), sequences.seq_lens, *options)
    reference_out = expected(reference.paged_prefill, *args)
    for cache in sequences[:2]:  # the oldest key that the first of the ten queries sees is 150 - 10 + 1 - 37
        cache.flatten(0, 1)[sequences.slots(0, 0, 104)] = float("nan")
    assert_agrees(prefill.paged_prefill(*args), reference_out)


def test_queries_may_be_strided(device):
    case = Case(group=3)
    sequences = make_paged_sequences(case, [40, 77], device)
    packed = make_queries(case, 2 * 40, device).flatten(1)  # [tokens, heads * head_dim]
    sliced = torch.cat([packed, packed], dim=1)[:, case.head_dim :][:, : packed.shape[1]].unflatten(1, (case.heads, -1))
    transposed = sliced.transpose(0, 1).contiguous().transpose(0, 1)
    for q in (sliced, transposed):
        assert not q.is_contiguous()
        args = (q[:40], *sequences[:3], cu_seqlens([10, 30], device), sequences.seq_lens, *case.options(device))
        assert_agrees(prefill.paged_prefill(*args), expected(reference.paged_prefill, *args))


@pytest.mark.parametrize("device", [CUDA])
def test_slots_beyond_two_billion_elements_are_reached(device):
    blocks = 2**31 // (16 * 8 * 128) + 2
    if torch.cuda.mem_get_info()[0] < 12e9:
        pytest.skip("needs 12 GB of free GPU memory")
    case = Case(kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    caches = [torch.empty(blocks, 16, 8, 128, dtype=case.dtype, device=device) for _ in range(2)]
    k, v, q = (torch.randn(16, 8, 128, dtype=case.dtype, device=device) for _ in range(3))
    kv_write.write_kv(k, v, *caches, (blocks - 1) * 16 + torch.arange(16, device=device))
    table = torch.full((1, 1), blocks - 1, dtype=torch.int32, device=device)
    lengths = torch.tensor([16], dtype=torch.int32, device=device)
    options = case.options(device)
    reference_out = expected(reference.attend, q, k, v, *options)
    prefilled = prefill.paged_prefill(q, *caches, table, cu_seqlens([16], device), lengths, *options)
    assert_agrees(prefilled, reference_out)
    for cache in caches:
        cache[-1, -1] = float("nan")
    split_counters = torch.zeros(1, 8, dtype=torch.int32, device=device)
    decoded = decode.paged_decode(q[15:], k[15:], v[15:], *caches, table, lengths, split_counters, *options, 2)
    assert_agrees(decoded, reference_out[15:])
    assert torch.equal(caches[0][-1], k) and torch.equal(caches[1][-1], v)


# No kernel runs below.


def launch(case: Case, batch: int) -> None:
    """Launch the prefill kernel once, on zeros. With an odd batch the lengths start at an unaligned address."""
    cu_seqlens_q = torch.zeros(batch + 1, dtype=torch.int32)
    lengths = torch.zeros(2 * batch, dtype=torch.int32)[batch % 2 :][:batch]
    table = torch.zeros(batch, 64 + batch, dtype=torch.int32)[:, :64]
    dims = case.head_dim, case.v_head_dim or case.head_dim
    caches = [torch.zeros(1, case.block_size, case.kv_heads, dim, dtype=case.dtype) for dim in dims]
    q = torch.zeros(batch, case.heads, case.head_dim, dtype=case.dtype)
    prefill.paged_prefill(q, *caches, table, cu_seqlens_q, lengths, *case.options("cpu"))


@some_models
def test_the_kernel_compiles_for_hopper_and_fits_its_shared_memory(case, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = record_launches(monkeypatch)
    launch(case, batch=1)
    assert [recorded.kernel for recorded in launches] == [prefill._prefill_kernel]
    assert shared_memory_on_hopper(launches[0]) <= HOPPER_SHARED_BYTES


def test_another_batch_or_window_does_not_recompile(monkeypatch):
    launches = record_launches(monkeypatch)
    for batch, window in ((1, 0), (2, 0), (3, 1001), (16, 0), (17, 0), (33, 1001)):
        launch(Case(head_dim=128, group=4, window=window, dtype=torch.bfloat16), batch)
    assert len(launches) == 6
    assert len({specialization_key(recorded) for recorded in launches}) == 1
