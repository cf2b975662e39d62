"""The Triton prefill kernel agrees with `reference.paged_prefill` for every feature, compiled or interpreted.

The last tests run no kernel: they compile it for Hopper and check its specialisation.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tcdeploy.kernels.attention import decode, prefill, reference
from tcdeploy.kernels.attention.splits import num_prefill_counters
from tests.kernels.attention.paged import (
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


def split_workspace(args: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch) -> prefill.SplitWorkspace:
    """A workspace of zeroed counters and NaN, for a call that splits keys as often as the programs allow."""
    monkeypatch.setattr(prefill, "MIN_KEYS_PER_PREFILL_SPLIT", 1)
    monkeypatch.setattr(prefill, "_concurrent_programs", lambda device: 1 << 12)
    monkeypatch.setattr(prefill, "MAX_PREFILL_TILES_TO_SPLIT", 1 << 12)
    q, _, v_cache, block_table = args[:4]
    sequences = len(block_table)
    counters = torch.zeros(q.shape[1] * (len(q) + sequences + 9), dtype=torch.int32, device=q.device)
    workspace = prefill.make_split_workspace(q, v_cache, sequences, counters)
    assert workspace is not None
    workspace.out.fill_(float("nan"))
    workspace.lse.fill_(float("nan"))
    return workspace


@each_case
def test_split_prefill_agrees_with_the_reference(case, device, monkeypatch):
    sequences = make_paged_sequences(case, [1, 140, 75, 40, *[0] * 6], device)
    new = [1, 20, 10, *[0] * 7]  # each sequence without a query adds an idle program, which splits can use
    args = (make_queries(case, sum(new) + 6, device), *sequences[:3], cu_seqlens(new, device), sequences.seq_lens)
    workspace = split_workspace(args, monkeypatch)
    actual = prefill.paged_prefill(*args, *case.options(device), workspace)
    assert_agrees(actual, expected(reference.paged_prefill, *args, *case.options(device)))
    assert not actual[sum(new) :].any(), "padding rows after the last sequence must be zero"
    assert not workspace.counters.any()
    splits = (~workspace.lse.isnan()).all(-1).sum(1)
    if not case.window:
        assert (splits >= 4).all(), "two sequences have more than one tile of keys"
    assert (splits == splits[0]).all(), "all heads are split alike"


def test_splits_depend_on_the_programs_without_a_tile_and_on_the_keys(device, monkeypatch):
    """Tiles have 16 queries and 16 keys. The grid of 90 tokens and 3 sequences has 5 + 3 + 1 + 4 programs per head."""
    case = Case(kv_heads=1)
    for new, lengths, concurrent_programs, splits in (
        ([16, 0, 0], [64, 0, 0], 99, 4),  # four tiles of keys
        ([16, 0, 0], [640, 0, 0], 99, 8),  # one tile of queries and five of padding: 13 - 5 programs
        ([80, 0, 0], [640, 0, 0], 99, 10),  # five tiles, and one of padding: 12 programs, two for each tile
        ([16, 16, 0], [640, 320, 0], 99, 8),  # two tiles, and four of padding: four for each tile
        ([16, 16, 0], [640, 16, 0], 99, 4),  # the second sequence has one tile of keys
        ([16, 0, 0], [640, 0, 0], 3, 3),
        ([16, 16, 0], [640, 320, 0], 3, 6),  # two waves of a third take less time than one whole tile
        ([16, 16, 0], [640, 320, 0], 2, 0),
        ([16, *[0] * 10], [640, *[0] * 10], 99, 10),  # of 16 possible splits, each of which adds 1%
    ):
        sequences = make_paged_sequences(case, lengths, device)
        args = (make_queries(case, 90, device), *sequences[:3], cu_seqlens(new, device), sequences.seq_lens)
        workspace = split_workspace(args, monkeypatch)
        monkeypatch.setattr(prefill, "MIN_KEYS_PER_PREFILL_SPLIT", 16)
        monkeypatch.setattr(prefill, "_concurrent_programs", lambda device, n=concurrent_programs: n * case.heads)
        actual = prefill.paged_prefill(*args, *case.options(device), workspace)
        assert_agrees(actual, expected(reference.paged_prefill, *args, *case.options(device)))
        written = (~workspace.lse.isnan()).all(-1).sum(1)
        assert written.tolist() == [splits] * case.heads, (new, lengths, concurrent_programs)


@pytest.mark.parametrize("seed", range(4))
def test_splits_of_random_lengths_agree_with_the_reference(seed, device, monkeypatch):
    source, case = random.Random(seed), Case(kv_heads=1, head_dim=16, window=seed % 2 * 70)
    chunks = [(source.choice([1, 15, 16, 17, 40]), source.choice([0, 1, 60, 200])) for _ in range(source.randint(1, 8))]
    # One chunk has a long prefix, and each sequence without a query adds an idle program: so keys are split.
    chunks += [(17, 200), *[(0, 0)] * 20]
    source.shuffle(chunks)
    new, lengths = [tokens for tokens, _ in chunks], [tokens + prefix for tokens, prefix in chunks]
    sequences = make_paged_sequences(case, lengths, device)
    q = make_queries(case, sum(new) + source.randint(1, 40), device)
    args = (q, *sequences[:3], cu_seqlens(new, device), sequences.seq_lens)
    workspace = split_workspace(args, monkeypatch)
    actual = prefill.paged_prefill(*args, *case.options(device), workspace)
    assert_agrees(actual, expected(reference.paged_prefill, *args, *case.options(device)))
    assert (~workspace.lse.isnan()).any(), "no key is split"
    assert not workspace.counters.any()


@pytest.mark.parametrize("splits_keys", [False, True])
def test_rows_of_decoding_sequences_are_not_written(splits_keys, device, monkeypatch):
    """The first sequence has the tokens of 20 decode rows, two of which are empty."""
    case, new = Case(group=3), [20, 30]
    sequences = make_paged_sequences(case, [0, 100], device)
    args = (make_queries(case, 56, device), *sequences[:3], cu_seqlens(new, device), sequences.seq_lens)
    row_seq_lens = torch.full((32,), 7, dtype=torch.int32, device=device)
    row_seq_lens[[3, 19]] = 0
    row_seq_lens[20:] = 0  # not decode rows: these tokens belong to the prompt
    out = torch.full((56, case.heads, case.head_dim), 5.0, device=device)
    workspace = split_workspace(args, monkeypatch) if splits_keys else None
    actual = prefill.paged_prefill(*args, *case.options(device), workspace, out, row_seq_lens)
    assert actual is out
    reference_out = expected(reference.paged_prefill, *args, *case.options(device))
    assert_agrees(actual[20:], reference_out[20:])
    assert workspace is None or (~workspace.lse.isnan()).any(), "no key is split"
    assert not actual[[3, 19]].any(), "an empty row is padding"
    assert (actual[:3] == 5.0).all() and (actual[4:19] == 5.0).all()


@pytest.mark.parametrize(
    ("tokens", "heads", "sequences", "counters", "splits"),
    [
        (256, 32, 9, num_prefill_counters(32, 9), True),
        (320, 32, 9, num_prefill_counters(32, 9), True),
        (321, 32, 9, 1 << 20, False),  # 192 tiles: more than 5/8 of the 264 that an H100 runs at once
        (640, 16, 9, num_prefill_counters(16, 9), True),
        (64, 32, 63, num_prefill_counters(32, 63), True),
        (64, 32, 64, 1 << 20, False),
        (64, 32, 9, 32 * 15 - 1, False),  # one counter is missing
    ],
)
def test_keys_are_split_if_a_step_has_few_tiles(tokens, heads, sequences, counters, splits):
    q = torch.empty(tokens, heads, 128, dtype=torch.bfloat16, device="meta")
    v_cache = torch.empty(4, 16, 8, 128, dtype=torch.bfloat16, device="meta")
    workspace = prefill.make_split_workspace(q, v_cache, sequences, torch.empty(counters, device="meta"))
    assert (workspace is not None) == splits
    if workspace is not None:
        assert workspace.out.shape == (heads, tokens // 64 + sequences + 5, 64, 128)


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
    prefill.write_kv(k, v, *caches, (blocks - 1) * 16 + torch.arange(16, device=device))
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


def launch(case: Case, batch: int, splits_keys: bool = False) -> None:
    """Launch the prefill kernel once, on zeros; if keys are split, as in a mixed step.

    With an odd batch the lengths start at an unaligned address.
    """
    cu_seqlens_q = torch.zeros(batch + 1, dtype=torch.int32)
    lengths = torch.zeros(2 * batch, dtype=torch.int32)[batch % 2 :][:batch]
    table = torch.zeros(batch, 64 + batch, dtype=torch.int32)[:, :64]
    dims = case.head_dim, case.v_head_dim or case.head_dim
    caches = [torch.zeros(1, case.block_size, case.kv_heads, dim, dtype=case.dtype) for dim in dims]
    q = torch.zeros(batch, case.heads, case.head_dim, dtype=case.dtype)
    counters = torch.zeros(num_prefill_counters(case.heads, batch), dtype=torch.int32)
    workspace = prefill.make_split_workspace(q, caches[1], batch, counters) if splits_keys else None
    assert (workspace is not None) == splits_keys
    row_seq_lens = torch.zeros(2 * batch, dtype=torch.int32)[batch % 2 :][:batch] if splits_keys else None
    out = torch.empty(batch, case.heads, dims[1], dtype=case.dtype)
    prefill.paged_prefill(
        q, *caches, table, cu_seqlens_q, lengths, *case.options("cpu"), workspace, out, row_seq_lens
    )  # fmt: skip


# Each run compiles the kernel with splits, which contains the code of the kernel without them.
@pytest.mark.parametrize("splits_keys", [pytest.param(False, marks=pytest.mark.long), True])
@some_models
def test_the_kernel_compiles_for_hopper_and_fits_its_shared_memory(case, splits_keys, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = record_launches(monkeypatch)
    launch(case, 1, splits_keys)
    assert [recorded.kernel for recorded in launches] == [prefill.KERNEL.function]
    assert shared_memory_on_hopper(launches[0]) <= HOPPER_SHARED_BYTES


@pytest.mark.parametrize("splits_keys", [False, True])
def test_another_batch_or_window_does_not_recompile(splits_keys, monkeypatch):
    launches = record_launches(monkeypatch)
    for batch, window in ((1, 0), (2, 0), (3, 1001), (16, 0), (17, 0), (33, 1001)):
        launch(Case(head_dim=128, group=4, window=window, dtype=torch.bfloat16), batch, splits_keys)
    assert len(launches) == 6
    assert len({specialization_key(recorded) for recorded in launches}) == 1
