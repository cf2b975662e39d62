"""The Triton kernels say what `reference.py` says, for every feature, on a GPU or in Triton's interpreter.

With a GPU the tests run the compiled kernels; without one they run the same source in numpy (`interpreted`). All caches
are NaN outside the written slots, and block tables point at NaN blocks past a sequence's end, so that one key too many
shows in every test. The last tests need neither: they ask Triton's compiler, which works without a GPU, whether the
kernels fit a Hopper GPU and whether a batch of another size would compile them again.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import triton.language as tl
from torch import Tensor
from torch.testing import assert_close
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.compiler import compile as triton_compile
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction, create_function_from_signature, mangle_type

from tcdeploy.attention import decode, kernels, ops, reference

# Absolute and relative: float32 sums in another order; the others round the weights and the output once (8, 11 bits).
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
HOPPER = GPUTarget("cuda", 90, 32)


@contextmanager
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run in numpy, on CPU tensors, until the block ends and the patches are undone.

    TRITON_INTERPRET is read when `@triton.jit` decorates, Triton's own `tl.max` and `tl.cdiv` included: it decides for
    the whole process, or fails if Triton was imported before. So the decorated functions are diverted instead. Three
    faults of the interpreter are mended: a jitted function called from a kernel leaves `triton.language` patched; a dot
    of bfloat16, which numpy lacks, multiplies the bit patterns; Triton 3.6 cannot loop with numpy 2.4.
    """

    interpret = functools.cache(interpreter.InterpretedFunction)

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return interpret(self.fn).run(*args, grid=grid, warmup=warmup, **kwargs)

    def call(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        return interpret(self.fn)(*args, **kwargs)

    create_dot = interpreter.InterpreterBuilder.create_dot

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return create_dot(self, a, b, *rest)

    patched = interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    patched.set_attr(tl.tensor, "__index__", lambda self: self.handle.data.item())
    monkeypatch.setattr(interpreter, "_patch_lang", lambda fn: interpreter._LangPatchScope())
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(JITFunction, "__call__", call)
    try:
        yield
    finally:
        patched.restore()


NO_GPU, GPU = not torch.cuda.is_available(), torch.cuda.is_available()
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(NO_GPU, reason="needs a GPU")])
CPU = pytest.param(
    "cpu", id="cpu-interpreted", marks=pytest.mark.skipif(GPU, reason="the compiled kernels run instead: a GPU is here")
)


@pytest.fixture(params=[CPU, CUDA])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "cuda":
        yield "cuda"
    else:
        with interpreted(monkeypatch):
            yield "cpu"


@dataclass(frozen=True)
class Case:
    head_dim: int = 64
    v_head_dim: int = 0  # 0: as head_dim
    group: int = 1
    kv_heads: int = 2
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def heads(self) -> int:
        return self.group * self.kv_heads

    def options(self, device: str) -> tuple[float, int, float, Tensor | None]:
        """scale, window, softcap, sinks. The sinks are large enough to take half of the weights and more."""
        sinks = torch.linspace(-1, 5, self.heads, dtype=self.dtype, device=device) if self.sinks else None
        return self.head_dim**-0.5, self.window, self.softcap, sinks


CASES = {
    "heads of 32": Case(head_dim=32, block_size=32),
    "heads of 64, groups of 3": Case(group=3),
    "heads of 80": Case(head_dim=80),
    "heads of 96, groups of 4": Case(head_dim=96, group=4, kv_heads=1),
    "heads of 128, groups of 7": Case(head_dim=128, group=7, kv_heads=1, block_size=32),
    "heads of 256": Case(head_dim=256, kv_heads=1),
    "groups of 17": Case(head_dim=16, group=17, kv_heads=1),
    "blocks larger than a tile": Case(block_size=256),
    "a window of one key": Case(window=1),
    "a window smaller than a tile": Case(group=3, window=7),
    "a window of whole tiles": Case(head_dim=128, window=64, block_size=32),
    "a window across tiles": Case(window=50),
    "a window that decode splits": Case(window=130, sinks=True),
    "a window larger than all": Case(window=5000),
    "softcap": Case(softcap=1.5, group=3),
    "sinks": Case(sinks=True, group=3),
    "sinks, softcap and window": Case(sinks=True, softcap=2.0, window=33, group=2, block_size=32),
    "values smaller than keys": Case(head_dim=96, v_head_dim=32),
    "values larger than keys": Case(head_dim=32, v_head_dim=80),
    "bfloat16": Case(head_dim=128, group=4, dtype=torch.bfloat16),
    "bfloat16, everything": Case(sinks=True, softcap=2.0, window=70, group=3, dtype=torch.bfloat16),
    "bfloat16, heads of 256": Case(head_dim=256, kv_heads=1, group=2, dtype=torch.bfloat16),
    "float16": Case(group=4, dtype=torch.float16),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


class Pages(NamedTuple):
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor

    def slots(self, row: int, start: int, stop: int) -> Tensor:
        """The slots of one sequence's tokens [start, stop)."""
        block_size = self.k_cache.shape[1]
        tokens = torch.arange(start, stop, device=self.block_table.device)
        return self.block_table[row, tokens // block_size].long() * block_size + tokens % block_size


def make_pages(case: Case, lengths: list[int], device: str) -> Pages:
    """Sequences of these lengths in shuffled blocks; every other slot is NaN, and block 0 is never anyone's."""
    torch.manual_seed(0)
    width = -(-max(lengths) // case.block_size) + 2
    blocks = 1 + torch.randperm(len(lengths) * width, dtype=torch.int32)
    in_use = torch.arange(width) * case.block_size < torch.tensor(lengths)[:, None]
    shape = (len(lengths) * width + 1, case.block_size, case.kv_heads)
    k_cache = torch.full((*shape, case.head_dim), float("nan"), dtype=case.dtype)
    v_cache = torch.full((*shape, case.v_head_dim or case.head_dim), float("nan"), dtype=case.dtype)
    block_table = torch.where(in_use, blocks.view(len(lengths), width), 0)
    pages = Pages(k_cache, v_cache, block_table, torch.tensor(lengths, dtype=torch.int32))
    for row, length in enumerate(lengths):
        for cache in (k_cache, v_cache):
            slots = cache.flatten(0, 1)
            slots[pages.slots(row, 0, length)] = torch.randn(length, *slots.shape[1:]).to(case.dtype)
    return Pages(*(tensor.to(device) for tensor in pages))


def make_queries(case: Case, tokens: int, device: str) -> Tensor:
    return torch.randn(tokens, case.heads, case.head_dim).to(case.dtype).to(device)


def offsets(lengths: list[int], device: str) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


def expected(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """The reference's answer, always computed on the CPU."""
    return function(*(arg.cpu() if isinstance(arg, Tensor) else arg for arg in args))


def assert_agrees(actual: Tensor, wanted: Tensor) -> None:
    tolerance = TOLERANCE[wanted.dtype]
    assert_close(actual.cpu(), wanted, atol=tolerance, rtol=tolerance)


@each_case
@pytest.mark.parametrize("multiprocessors", [1, 64], ids=["whole", "split"])
def test_decode_means_what_the_reference_means(case, multiprocessors, device, monkeypatch):
    monkeypatch.setattr(kernels, "_multiprocessors", lambda _: multiprocessors)
    pages = make_pages(case, [1, 128, 0, 270], device)
    args = (make_queries(case, 4, device), *pages, *case.options(device))
    actual = kernels.paged_decode(*args)
    assert_agrees(actual, expected(reference.paged_decode, *args))
    assert not actual[2].any(), "a sequence of length 0 is padding, and padding is zeros"


@each_case
def test_prefill_means_what_the_reference_means(case, device):
    pages = make_pages(case, [1, 64, 140, 40], device)
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
    pages = make_pages(case, [length], device)
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
    pages = make_pages(case, new, device)
    args = (make_queries(case, sum(new) + 40, device), *pages[:3], offsets(new, device), pages.seq_lens)
    actual = kernels.paged_prefill(*args, *case.options(device))
    assert_agrees(actual, expected(reference.paged_prefill, *args, *case.options(device)))


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_one_long_sequence_is_cut_in_32_and_merged(sinks, device, monkeypatch):
    monkeypatch.setattr(kernels, "_multiprocessors", lambda _: 40)
    case = Case(kv_heads=1, group=2, sinks=sinks)
    pages = make_pages(case, [2040], device)
    args = (make_queries(case, 1, device), *pages, *case.options(device))
    assert kernels.decode_splits(1, 1, pages.block_table.shape[1] * case.block_size, 40) == 32
    assert_agrees(kernels.paged_decode(*args), expected(reference.paged_decode, *args))


def test_keys_older_than_the_window_are_never_read(device, monkeypatch):
    monkeypatch.setattr(kernels, "_multiprocessors", lambda _: 8)
    case = Case(window=37)
    pages = make_pages(case, [150], device)
    q, options = make_queries(case, 10, device), case.options(device)
    decode_args = (q[:1], *pages, *options)
    prefill_args = (q, *pages[:3], offsets([10], device), pages.seq_lens, *options)
    prefilled = expected(reference.paged_prefill, *prefill_args)
    decoded = expected(reference.paged_decode, *decode_args)
    for cache in pages[:2]:  # what the first of the ten queries still sees begins at 150 - 10 + 1 - 37
        cache.flatten(0, 1)[pages.slots(0, 0, 104)] = float("nan")
    assert_agrees(kernels.paged_prefill(*prefill_args), prefilled)
    for cache in pages[:2]:
        cache.flatten(0, 1)[pages.slots(0, 0, 113)] = float("nan")
    assert_agrees(kernels.paged_decode(*decode_args), decoded)


def test_queries_may_be_strided(device):
    case = Case(group=3)
    pages = make_pages(case, [40, 77], device)
    packed = make_queries(case, 2 * 40, device).flatten(1)  # [tokens, heads * head_dim]
    sliced = torch.cat([packed, packed], dim=1)[:, case.head_dim :][:, : packed.shape[1]].unflatten(1, (case.heads, -1))
    transposed = sliced.transpose(0, 1).contiguous().transpose(0, 1)
    for q in (sliced, transposed):
        assert not q.is_contiguous()
        prefill = (q[:40], *pages[:3], offsets([10, 30], device), pages.seq_lens, *case.options(device))
        assert_agrees(kernels.paged_prefill(*prefill), expected(reference.paged_prefill, *prefill))
        decode = (q[40:42], *pages, *case.options(device))
        assert_agrees(kernels.paged_decode(*decode), expected(reference.paged_decode, *decode))


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
def test_a_captured_decode_replays_with_other_lengths(device):
    case = Case(group=4, sinks=True, head_dim=128, dtype=torch.bfloat16)
    pages = make_pages(case, [300, 170], device)
    args = (make_queries(case, 2, device), *pages, *case.options(device))
    kernels.paged_decode(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.paged_decode(*args)
    for lengths in ([300, 170], [1, 0], [64, 129]):
        pages.seq_lens.copy_(torch.tensor(lengths))
        graph.replay()
        assert_agrees(out, expected(reference.paged_decode, *args))


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
    decoded = kernels.paged_decode(q[15:], *caches, table, lengths, *case.options(device))
    assert_agrees(prefilled, wanted)
    assert_agrees(decoded, wanted[15:])


# What holds without running a kernel.


@pytest.mark.parametrize(
    ("batch", "kv_heads", "max_context", "splits"),
    [(1, 8, 8192, 16), (4, 8, 8192, 4), (16, 8, 8192, 1), (32, 8, 8192, 1), (1, 1, 131072, 128), (1, 8, 512, 8)],
)
def test_decode_is_cut_into_about_one_part_per_multiprocessor(batch, kv_heads, max_context, splits):
    assert kernels.decode_splits(batch, kv_heads, max_context, multiprocessors=132) == splits


def test_a_split_is_a_power_of_two_and_never_without_keys():
    for batch in range(1, 40):
        for max_context in (16, 100, 1000, 10000):
            splits = kernels.decode_splits(batch, 2, max_context, multiprocessors=132)
            assert splits & (splits - 1) == 0
            assert splits == 1 or max_context // splits >= kernels.MIN_KEYS_PER_SPLIT


def test_interpreting_leaves_triton_as_it_was():
    def attributes() -> dict[tuple[str, str], int]:
        owners = [tl, tl.core, tl.math, tl.tensor, tl.dtype, interpreter, interpreter.InterpreterBuilder, JITFunction]
        return {(repr(owner), name): id(value) for owner in owners for name, value in vars(owner).items()}

    before = attributes()
    k, cache = torch.randn(3, 2, 32), torch.zeros(2, 16, 2, 32)
    with pytest.MonkeyPatch.context() as patch, interpreted(patch):
        assert attributes() != before
        kernels.write_kv(k, k, cache, cache.clone(), torch.arange(3))
    assert attributes() == before
    assert_close(cache[0, :3], k, atol=0, rtol=0)


class Launch(NamedTuple):
    kernel: JITFunction
    args: tuple[Any, ...]
    options: dict[str, int]


def record_launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    launches: list[Launch] = []

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: int) -> None:
        launches.append(Launch(self, args, options))

    monkeypatch.setattr(JITFunction, "run", run)
    return launches


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
    kernels.paged_decode(q, *caches, table, lengths, *case.options("cpu"))
    kernels.paged_prefill(q, *caches, table, cu_seqlens_q, lengths, *case.options("cpu"))


@pytest.mark.parametrize(
    "case",
    [
        Case(head_dim=128, kv_heads=8, group=4, dtype=torch.bfloat16),
        Case(head_dim=256, kv_heads=4, group=2, dtype=torch.bfloat16, window=1024, softcap=50.0),
        Case(head_dim=192, v_head_dim=128, kv_heads=16, dtype=torch.bfloat16, sinks=True),
        Case(head_dim=256, kv_heads=1),
    ],
    ids=["llama", "gemma", "deepseek with sinks", "float32"],
)
def test_the_kernels_compile_for_hopper_and_fit_its_shared_memory(case, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = record_launches(monkeypatch)
    monkeypatch.setattr(kernels, "_multiprocessors", lambda _: 132)
    launch_everything(case, batch=1)
    assert {launch.kernel.fn.__name__ for launch in launches} >= {"_write_kernel", "_decode_kernel", "_merge_kernel"}
    for kernel, args, options in launches:
        signature, constants, hints = {}, {}, {}
        for i, (param, arg) in enumerate(zip(kernel.params, args, strict=True)):
            if param.is_constexpr or arg is None:
                signature[param.name], constants[i,] = "constexpr", arg
            else:
                signature[param.name] = mangle_type(arg)
                if isinstance(arg, Tensor) and not param.do_not_specialize:
                    hints[i,] = [["tt.divisibility", 16]]
        compiled = triton_compile(ASTSource(kernel, signature, constants, hints), target=HOPPER, options=options)
        assert compiled.metadata.shared <= 227 * 1024


def test_another_batch_or_window_compiles_nothing_new(monkeypatch):
    launches = record_launches(monkeypatch)
    monkeypatch.setattr(kernels, "_multiprocessors", lambda _: 132)
    for batch, window in ((1, 0), (2, 0), (3, 1001), (16, 0), (17, 0), (33, 1001)):  # always more than one part
        launch_everything(Case(head_dim=128, group=4, window=window, dtype=torch.bfloat16), batch)
    programs = set()
    for kernel, args, options in launches:
        bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(HOPPER))
        programs.add((kernel.fn.__name__, str(bind(*args, **options)[1:])))
    names = ["_decode_kernel", "_merge_kernel", "_prefill_kernel", "_write_kernel"]
    assert sorted(name for name, _ in programs) == names
