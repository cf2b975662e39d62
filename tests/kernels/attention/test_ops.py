"""The ops as torch.compile sees them: opcheck, correct fakes, and equality of each backend with the reference."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from tcdeploy.kernels.attention import backends, ops, reference
from tcdeploy.kernels.attention.backends import AttentionParams, PagedBatch, VarlenResult, VarlenSeqlens
from tcdeploy.kernels.attention.metadata import make_split_counters
from tcdeploy.kernels.attention.splits import LARGE_BATCH_TURN, decode_splits, tiles_per_turn
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.backends import BACKENDS
from tcdeploy.planning.plan import make_plan
from tcdeploy.planning.recipe import Attention
from tests.machines import GEMMA_2_9B, GPT_OSS_20B, H100, LLAMA_8B, make_recipe

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 16, 16


class Case:
    """Three sequences in a shuffled paged cache: one without and one with a prefix, one padding; and padding tokens."""

    def __init__(
        self, device: str = "cpu", dtype: torch.dtype = torch.float32, prefix: int = 21, dim: int = DIM
    ) -> None:
        generator = torch.Generator().manual_seed(5)

        def rand(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

        self.queries = [19, 7]
        self.lengths = [19, 7 + prefix]
        tokens = sum(self.queries) + 6
        self.q, self.k, self.v = rand(tokens, HEADS, dim), rand(tokens, KV_HEADS, dim), rand(tokens, KV_HEADS, dim)
        self.k_cache, self.v_cache = rand(12, BLOCK, KV_HEADS, dim), rand(12, BLOCK, KV_HEADS, dim)
        self.sinks = rand(HEADS)
        self.block_table = torch.tensor([[5, 2, 0, 0], [9, 1, 7, 0], [0] * 4], dtype=torch.int32, device=device)
        self.cu_seqlens_q = torch.tensor([0, 19, 26, 26], dtype=torch.int32, device=device)
        self.seq_lens = torch.tensor([*self.lengths, 0], dtype=torch.int32, device=device)
        self.host_scalars = torch.tensor([26, sum(self.lengths), 19, max(self.lengths), int(prefix > 0), 0, 0])
        spans = [
            (row, length - query, length) for row, (query, length) in enumerate(zip([19, 7], self.lengths, strict=True))
        ]
        slots = [self.slot(row, position) for row, start, stop in spans for position in range(start, stop)]
        self.slot_mapping = torch.tensor(slots + [0] * 6, device=device)

    def slot(self, row: int, position: int) -> int:
        return int(self.block_table[row, position // BLOCK]) * BLOCK + position % BLOCK

    def write(self) -> None:
        ops.kv_write(self.k, self.v, self.k_cache, self.v_cache, self.slot_mapping, "reference")

    def prefill(self, backend: str, window: int = 0, softcap: float = 0.0, sinks: bool = False) -> Tensor:
        return ops.prefill_attention(*self.prefill_arguments(backend, window, softcap, sinks))

    def prefill_arguments(
        self, backend: str, window: int = 0, softcap: float = 0.0, sinks: bool = False
    ) -> tuple[Any, ...]:
        return (
            self.q, self.k, self.v, self.k_cache, self.v_cache, self.block_table, self.cu_seqlens_q, self.seq_lens,
            self.host_scalars, self.sinks if sinks else None, 0.3, window, softcap, backend,
        )  # fmt: skip

    def mixed_arguments(self, backend: str, **rules: Any) -> tuple[Any, ...]:
        """The case with three decode rows before its prompts, the second of them empty, and a fourth that is unused."""
        q, k, v = (torch.cat([x[-3:] * 0.5, x]) for x in (self.q, self.k, self.v))
        table, starts = self.block_table, self.cu_seqlens_q
        host_scalars = self.host_scalars.clone()
        host_scalars[0] += 3
        host_scalars[5:] = 3
        row_table = torch.tensor(
            [[3, 4, 0, 0], [0] * 4, [11, 8, 0, 0], [6, 0, 0, 0]], dtype=torch.int32, device=q.device
        )
        row_seq_lens = torch.tensor([20, 0, 17, 5], dtype=torch.int32, device=q.device)
        _, _, _, _, _, _, _, _, _, sinks, scale, window, softcap, _ = self.prefill_arguments(backend, **rules)
        return (
            q, k, v, self.k_cache, self.v_cache, torch.cat([table[-1:], table]),
            torch.cat([starts[:1], starts + 3]), torch.cat([self.seq_lens[-1:], self.seq_lens]), host_scalars,
            row_table, row_seq_lens, torch.zeros(100, KV_HEADS, dtype=torch.int32, device=q.device),
            sinks, scale, window, softcap, backend, "triton" if backend == "triton" else "reference",
        )  # fmt: skip

    def decode_arguments(self) -> tuple[Any, ...]:
        return (
            self.q[:3], self.k[:3], self.v[:3], self.k_cache, self.v_cache, self.block_table, self.seq_lens,
            torch.zeros(3, KV_HEADS, dtype=torch.int32), self.sinks, 0.3, 9, 2.0, 1, "reference",
        )  # fmt: skip


def test_each_backend_implements_exactly_the_ops_of_its_row() -> None:
    """A decode backend also writes the keys and values of prefill."""
    assert set(backends.IMPLEMENTATIONS) == set(BACKENDS)
    for name, row in BACKENDS.items():
        *implemented, mixed = (function is not None for function in backends.IMPLEMENTATIONS[name])
        assert implemented == [True, row.serves_decode, row.serves_decode], name
        assert not mixed or row.serves_decode, name


def test_opcheck_passes_on_every_op() -> None:
    case = Case()
    write = (case.k, case.v, case.k_cache, case.v_cache, case.slot_mapping[:], "reference")
    torch.library.opcheck(ops.kv_write.overload, write)
    for sinks in (False, True):
        torch.library.opcheck(ops.prefill_attention.overload, case.prefill_arguments("reference", 9, 2.0, sinks))
    torch.library.opcheck(ops.decode_attention.overload, case.decode_arguments())
    torch.library.opcheck(
        ops.mixed_attention.overload, case.mixed_arguments("reference", window=9, softcap=2.0, sinks=True)
    )
    factors = torch.randn(2, 3, case.q.shape[-1]).unbind()
    torch.library.opcheck(ops.decode_attention.overload, (*case.decode_arguments(), *factors))
    with pytest.raises(AssertionError):
        ops.decode_attention(*case.decode_arguments(), factors[0])


def test_kv_write_writes_exactly_the_mapped_slots() -> None:
    case = Case()
    initial = case.k_cache.clone()
    case.write()
    flat, old = case.k_cache.flatten(0, 1), initial.flatten(0, 1)
    slots = case.slot_mapping[:26]
    assert torch.equal(flat[slots], case.k[:26])
    untouched = torch.ones(len(flat), dtype=torch.bool)
    untouched[case.slot_mapping] = False
    assert torch.equal(flat[untouched], old[untouched])


@pytest.mark.parametrize(
    "rules", [{}, {"window": 9}, {"softcap": 2.0}, {"sinks": True}, {"window": 9, "softcap": 2.0, "sinks": True}]
)
def test_the_reference_is_the_textbook_formula(rules: dict[str, Any]) -> None:
    """One query and one head, computed in float64 with Python's math."""
    case = Case()
    case.write()
    out = case.prefill("reference", **rules)
    row, head, token = 1, 4, 24  # the sixth of seven queries after a prefix of 21
    position = 21 + 5
    first = max(0, position - rules["window"] + 1) if rules.get("window") else 0
    keys = [case.k_cache.flatten(0, 1)[case.slot(row, at), head // 3].double() for at in range(first, position + 1)]
    values = [case.v_cache.flatten(0, 1)[case.slot(row, at), head // 3].double() for at in range(first, position + 1)]
    scores = [0.3 * float(case.q[token, head].double() @ key) for key in keys]
    if rules.get("softcap"):
        scores = [2.0 * math.tanh(score / 2.0) for score in scores]
    weights = [math.exp(score) for score in scores]
    total = sum(weights) + (math.exp(float(case.sinks[head])) if rules.get("sinks") else 0.0)
    expected = sum(weight / total * value for weight, value in zip(weights, values, strict=True))
    torch.testing.assert_close(out[token, head].double(), expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(out[26:], torch.zeros_like(out[26:])), "padding rows are zeros"


def test_reference_decode_equals_prefill_and_writes_only_the_newest_slots() -> None:
    case = Case()
    case.write()
    last = case.cu_seqlens_q[1:3] - 1
    expected = case.prefill("reference", 9, 2.0, sinks=True)[last]
    q, k, v = (x[[*last.tolist(), 0]] for x in (case.q, case.k, case.v))
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    for row, length in enumerate(case.lengths):
        for cache in (case.k_cache, case.v_cache):
            cache.flatten(0, 1)[case.slot(row, length - 1)] = float("nan")
    out = ops.decode_attention(
        q, k, v, case.k_cache, case.v_cache, case.block_table, case.seq_lens, torch.zeros(3, KV_HEADS), case.sinks,
        0.3, 9, 2.0, 1, "reference",
    )  # fmt: skip
    torch.testing.assert_close(out[:2], expected)
    assert not out[2].any()
    assert torch.equal(case.k_cache, k_cache) and torch.equal(case.v_cache, v_cache)


@pytest.mark.parametrize("rules", [{}, {"window": 9, "softcap": 2.0, "sinks": True}])
def test_mixed_attention_is_decode_for_the_rows_and_prefill_for_the_prompts(rules: dict[str, Any]) -> None:
    assert_mixed_equals_its_parts(Case(), "reference", rules)


def assert_mixed_equals_its_parts(case: Case, backend: str, rules: dict[str, Any]) -> None:
    case.write()
    arguments = case.mixed_arguments(backend, **rules)
    q, k, v, k_cache, v_cache = arguments[:5]
    row_table, row_seq_lens, counters, sinks, scale, window, softcap = arguments[9:16]
    prompts = case.prefill("reference", **rules)
    expected_caches = k_cache.clone(), v_cache.clone()
    rows = ops.decode_attention(
        q[:3], k[:3], v[:3], *expected_caches, row_table[:3], row_seq_lens[:3], counters.clone(), sinks, scale, window,
        softcap, 1, "reference",
    )  # fmt: skip
    out = ops.mixed_attention(*arguments)
    tolerance = {"atol": 2e-6, "rtol": 1e-4} if q.dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(out, torch.cat([rows, prompts]), **tolerance)
    assert not out[1].any(), "an empty row is padding"
    assert torch.equal(k_cache, expected_caches[0]) and torch.equal(v_cache, expected_caches[1])
    assert not counters.any()


@pytest.mark.parametrize("rules", [{}, {"window": 9, "softcap": 2.0, "sinks": True}])
def test_mixed_attention_of_the_triton_kernels(rules: dict[str, Any], device: str) -> None:
    assert_mixed_equals_its_parts(Case(device), "triton", rules)


def test_mixed_attention_of_the_triton_kernels_splits_the_keys_of_prompts(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tcdeploy.kernels.attention import prefill

    monkeypatch.setattr(prefill, "MIN_KEYS_PER_PREFILL_SPLIT", 16)
    workspaces = []

    def make_split_workspace(*args: Any) -> Any:
        workspaces.append(original(*args))
        workspaces[-1].lse.fill_(float("nan"))
        return workspaces[-1]

    original = prefill.make_split_workspace
    monkeypatch.setattr(prefill, "make_split_workspace", make_split_workspace)
    case = Case(device, prefix=30)
    case.block_table, case.cu_seqlens_q, case.seq_lens = (  # each one without a query adds an idle program
        torch.cat([tensor, *[tensor[-1:]] * 8]) for tensor in (case.block_table, case.cu_seqlens_q, case.seq_lens)
    )
    assert_mixed_equals_its_parts(case, "triton", {})
    assert (~workspaces[0].lse.isnan()).any()


@pytest.mark.parametrize("rules", [{}, {"window": 9, "softcap": 2.0, "sinks": True}])
def test_prefill_and_decode_of_a_mixed_step_may_run_in_any_order(
    rules: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run on two streams. Here prefill runs after decode."""
    from tcdeploy.kernels.attention import decode, prefill

    paged_prefill, paged_decode, prefill_calls = prefill.paged_prefill, decode.paged_decode, []

    def decode_before_prefill(*args: Any) -> None:
        paged_decode(*args)
        paged_prefill(*prefill_calls.pop())

    monkeypatch.setattr(prefill, "paged_prefill", lambda *args: prefill_calls.append(args))
    monkeypatch.setattr(decode, "paged_decode", decode_before_prefill)
    assert_mixed_equals_its_parts(Case(device), "triton", rules)


def test_the_counters_of_decode_rows_are_not_used_for_prompts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode attention uses the counters of the rows, of which there are four."""
    from tcdeploy.kernels.attention import decode, prefill

    counters = []
    make_split_workspace = prefill.make_split_workspace
    monkeypatch.setattr(
        prefill, "make_split_workspace", lambda *args: counters.append(args[3]) or make_split_workspace(*args)
    )
    monkeypatch.setattr(decode, "paged_decode", lambda *args: counters.append(args[7]))
    case = Case(device)
    case.write()
    arguments = case.mixed_arguments("triton")
    ops.mixed_attention(*arguments)
    for_prompts, for_rows = counters
    assert for_rows.data_ptr() == arguments[11].data_ptr()
    assert for_prompts.data_ptr() == arguments[11][4:].data_ptr() and for_prompts.numel() == arguments[11][4:].numel()


def test_the_second_stream_is_joined_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    from tcdeploy.kernels.attention import mixed

    log: list[str] = []

    class FakeStream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: FakeStream) -> None:
            log.append(f"{self.name} waits for {other.name}")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream("current"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(mixed, "_stream", lambda device: FakeStream("second"))
    with pytest.raises(MemoryError), mixed._second_stream(torch.device("cuda", 0)):
        raise MemoryError
    assert log == ["second waits for current", "current waits for second"]


@pytest.mark.parametrize("recipe", [{}, {"buckets": (512,), "batch_sizes": (1,)}, {"buckets": (8192,)}])
@pytest.mark.parametrize("architecture", [LLAMA_8B, GEMMA_2_9B, GPT_OSS_20B])
def test_there_are_counters_for_all_steps_that_split_keys(recipe: dict[str, Any], architecture: Architecture) -> None:
    from tcdeploy.kernels.attention import prefill

    plan = make_plan(
        make_recipe(**{"shapes": "dynamic", "buckets": (2048,), "mixed_steps": "on", **recipe}), H100, architecture
    )
    counters = make_split_counters(dataclasses.replace(plan, device="cpu"), architecture)
    num_rows = plan.decode_buckets[-1].size + 1
    for layer in architecture.attention_layers:
        v_cache = torch.empty(1, 16, layer.kv_heads, layer.v_head_dim, dtype=torch.bfloat16, device="meta")
        split = [
            prefill.make_split_workspace(
                torch.empty(tokens, layer.heads, layer.head_dim, dtype=torch.bfloat16, device="meta"),
                v_cache, plan.max_prefill_sequences + 1, counters[num_rows:],
            ) is not None
            for tokens in (32, 64, 128, 512, 2048)
        ]  # fmt: skip
        assert split == sorted(split, reverse=True) and split[0]
    without = make_split_counters(dataclasses.replace(plan, device="cpu", mixed_steps=False), architecture)
    assert len(without) == num_rows


def test_mixed_attention_of_the_triton_kernels_without_rows_is_prefill(device: str) -> None:
    case = Case(device)
    case.write()
    arguments = list(case.mixed_arguments("triton"))
    arguments[8] = torch.tensor([29, *arguments[8].tolist()[1:6], 0])
    out = ops.mixed_attention(*arguments)
    torch.testing.assert_close(out[3:], case.prefill("reference"), atol=2e-2, rtol=2e-2)
    assert not out[:3].any()


def test_mixed_attention_without_rows_is_prefill() -> None:
    case = Case()
    case.write()
    before = case.k_cache.clone()
    arguments = list(case.mixed_arguments("reference"))
    arguments[8] = torch.tensor([29, *arguments[8].tolist()[1:6], 0])
    out = ops.mixed_attention(*arguments)
    assert torch.equal(out[3:], case.prefill("reference")) and not out[:3].any()
    assert torch.equal(case.k_cache, before)


@pytest.mark.parametrize(("batch", "kv_heads", "splits"), [(1, 8, 16), (4, 8, 4), (15, 8, 1), (1, 1, 128)])
def test_a_small_batch_has_about_one_thread_block_per_sm(batch: int, kv_heads: int, splits: int) -> None:
    assert decode_splits(batch, kv_heads, num_sms=132) == splits
    assert tiles_per_turn(batch, kv_heads) == 1


@pytest.mark.parametrize(("batch", "kv_heads", "splits"), [(16, 8, 8), (32, 8, 8), (64, 8, 4), (256, 8, 4), (4, 32, 8)])
def test_only_the_long_sequences_of_a_large_batch_are_split(batch: int, kv_heads: int, splits: int) -> None:
    assert decode_splits(batch, kv_heads, num_sms=132) == splits
    assert tiles_per_turn(batch, kv_heads) == LARGE_BATCH_TURN


def test_default_splits_are_a_power_of_two() -> None:
    for batch in range(1, 40):
        splits = decode_splits(batch, 2, num_sms=132)
        assert splits & (splits - 1) == 0


def plain_varlen(q: Tensor, k: Tensor, v: Tensor, seqlens: VarlenSeqlens, params: AttentionParams) -> VarlenResult:
    """FlashAttention's interface in plain PyTorch: output and log-sum-exp, without sinks."""
    outs, sums = [], []
    starts_q, starts_k = seqlens.cu_seqlens_q.tolist(), seqlens.cu_seqlens_k.tolist()
    for begin_q, end_q, begin_k, end_k in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
        if end_q == begin_q:
            continue
        query, key, value = q[begin_q:end_q], k[begin_k:end_k], v[begin_k:end_k]
        outs.append(reference.attend(query, key, value, params.scale, params.window, params.softcap, None))
        unit_values = torch.zeros(len(key), HEADS // len(key[0]) * len(key[0]), 1)[:, :KV_HEADS]
        share = reference.attend(
            query, key, torch.ones_like(unit_values), params.scale, params.window, params.softcap, torch.zeros(HEADS)
        )
        total = share[..., 0].double()  # exp(lse) / (exp(lse) + 1), since the sink is exp(0)
        sums.append((total / (1 - total)).log().float().T)
    return VarlenResult(torch.cat(outs), torch.cat(sums, dim=1))


@pytest.mark.parametrize("prefix", [0, 21])
@pytest.mark.parametrize("sinks", [False, True])
def test_the_flash_adapter_gathers_blocks_and_applies_sinks(prefix: int, sinks: bool) -> None:
    """Tests only the adapter, with plain PyTorch instead of a package."""
    case = Case(prefix=prefix)
    case.write()
    batch = PagedBatch(
        case.k_cache, case.v_cache, case.block_table, case.cu_seqlens_q, case.seq_lens, case.host_scalars
    )
    params = AttentionParams(0.3, 9, 0.0, case.sinks if sinks else None)
    out = backends._flash_prefill(plain_varlen, case.q, case.k, case.v, batch, params)
    torch.testing.assert_close(out, case.prefill("reference", window=9, sinks=sinks), atol=2e-6, rtol=1e-4)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Any:  # fmt: skip
    """flash-attn 2.8.3's function: its parameters, the checks of its C++ code, and its results."""
    assert causal and not dropout_p and alibi_slopes is None and block_table is None
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert cu_seqlens_q.is_contiguous() and cu_seqlens_k.is_contiguous()
    assert cu_seqlens_q.shape == cu_seqlens_k.shape == (len(cu_seqlens_q),) and len(cu_seqlens_q) > 1
    tokens, heads, head_dim = q.shape
    assert k.shape == v.shape == (len(k), k.shape[1], head_dim)
    assert head_dim <= 256 and head_dim % 8 == 0 and heads % k.shape[1] == 0
    for x in (q, k, v):  # not checked there: rows are read 16 bytes at a time
        assert x.stride(-1) == 1 and all(stride % 8 == 0 for stride in x.stride()[:-1]) and x.data_ptr() % 16 == 0
    # It launches blocks for max_seqlen_q queries per sequence, packs head groups if that is 1 (and then ignores
    # cu_seqlens_q), and leaves rows of q that belong to no sequence undefined.
    assert 1 < max_seqlen_q >= int(cu_seqlens_q.diff().max()) and max_seqlen_k >= int(cu_seqlens_k.diff().max())
    assert tokens == cu_seqlens_q[-1] and len(k) >= cu_seqlens_k[-1]
    window_left, window_right = window_size
    assert window_right == (0 if window_left >= 0 else -1)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    seqlens = VarlenSeqlens(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    result = plain_varlen(q, k, v, seqlens, AttentionParams(scale, window_left + 1, softcap, None))
    return (*result, q.new_empty(0)) if return_attn_probs else result.out


@pytest.fixture
def flash_attn_2(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("flash_attn")
    package.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)


@pytest.mark.usefixtures("flash_attn_2")
@pytest.mark.parametrize("prefix", [0, 21])
@pytest.mark.parametrize(
    "rules", [{}, {"window": 1}, {"window": 9}, {"softcap": 2.0}, {"sinks": True}, {"window": 9, "softcap": 2.0}]
)
def test_flash_attn_2_is_called_as_its_interface_requires(prefix: int, rules: dict[str, Any]) -> None:
    case = Case(prefix=prefix)
    packed = torch.cat([case.q, case.k, case.v], dim=1)  # as a fused projection returns them
    case.q, case.k, case.v = packed.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    case.write()
    out = case.prefill("flash-attn-2", **rules)
    torch.testing.assert_close(out, case.prefill("reference", **rules), atol=2e-6, rtol=1e-4)


@pytest.mark.usefixtures("flash_attn_2")
@pytest.mark.parametrize("prefix", [0, 21])
def test_mixed_attention_passes_only_the_prompts_to_a_package(prefix: int) -> None:
    assert_mixed_equals_its_parts(Case(prefix=prefix), "flash-attn-2", {"window": 9})


@pytest.mark.usefixtures("flash_attn_2")
def test_flash_attn_2_does_not_get_a_max_seqlen_q_of_one() -> None:
    """It would then require one query of every sequence, and the padding sequence has none."""
    case = Case()
    case.write()
    case.cu_seqlens_q = torch.tensor([0, 1, 2, 2], dtype=torch.int32)
    case.host_scalars = torch.tensor([2, sum(case.lengths), 1, max(case.lengths), 1, 0, 0])
    out = case.prefill("flash-attn-2")
    torch.testing.assert_close(out, case.prefill("reference"), atol=2e-6, rtol=1e-4)


FLASH = ["torch-flash", "flash-attn-2", "flash-attn-4"]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [*FLASH, "triton"])
@pytest.mark.parametrize("prefix", [0, 21])
@pytest.mark.parametrize("rules", [{}, {"window": 9}, {"softcap": 2.0}, {"sinks": True}])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_each_prefill_backend_equals_the_reference(
    backend: Attention, prefix: int, rules: dict[str, Any], dim: int
) -> None:
    """Skips packages that are not installed."""
    from tcdeploy.planning.environment import installed_flash_packages

    if backend.startswith("flash-attn") and backend not in dict(installed_flash_packages()):
        pytest.skip(f"{backend} is not installed")
    if backend == "torch-flash" and rules.get("softcap"):
        pytest.skip("torch's FlashAttention has no soft-capping")
    if dim > (BACKENDS[backend].max_head_dim or dim):
        pytest.skip(f"{backend} supports no head dimension of {dim}")
    case = Case("cuda", torch.bfloat16, prefix, dim=dim)
    case.write()
    out, expected = case.prefill(backend, **rules).float(), case.prefill("reference", **rules).float()
    assert not out.isnan().any()
    assert (out - expected).norm() / expected.norm() < 1e-2
    assert torch.equal(out[26:], torch.zeros_like(out[26:]))


@pytest.mark.gpu
def test_opcheck_passes_on_the_gpu() -> None:
    case = Case("cuda", torch.bfloat16, dim=64)
    torch.library.opcheck(
        ops.kv_write.overload, (case.k, case.v, case.k_cache, case.v_cache, case.slot_mapping, "triton")
    )
    torch.library.opcheck(ops.prefill_attention.overload, case.prefill_arguments("torch-flash"))
    torch.library.opcheck(ops.prefill_attention.overload, case.prefill_arguments("triton", 9, 2.0, True))
