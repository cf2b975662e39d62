"""The device-side end of a step: the reference backend, and the Triton kernel in Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tcdeploy.engine.step.advance import advance
from tcdeploy.kernels.sampling import advance_triton as module

pytest.importorskip("triton")
NAN, INF = float("nan"), float("inf")
NO_GPU = not torch.cuda.is_available()


class Machine(NamedTuple):
    backend: Literal["reference", "triton"]
    device: str


@pytest.fixture(
    params=[
        "reference",
        pytest.param("triton, interpreted", marks=pytest.mark.skipif(not NO_GPU, reason="the compiled kernel runs")),
        pytest.param("triton", marks=pytest.mark.gpu),
    ]
)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    if request.param == "reference":
        yield Machine("reference", "cpu")
        return
    pytest.importorskip("triton")
    if request.param == "triton":
        yield Machine("triton", "cuda")
        return
    from tests.triton_tools import triton_interpreter

    with triton_interpreter(monkeypatch):
        yield Machine("triton", "cpu")


class State(NamedTuple):
    token_ids: Tensor
    positions: Tensor
    seq_lens: Tensor

    def lists(self) -> list[list[int]]:
        return [tensor.tolist() for tensor in self]


def make_state(rows: int, device: str = "cpu") -> State:
    """Every entry has a distinct value, so a misplaced write shows."""
    ids = torch.arange(rows, device=device)
    return State(100 + ids, 200 + ids, (300 + ids).int())


def run(machine: Machine, logits: Tensor, rows: list[int], lengths: list[int] | Tensor, state: State) -> list[int]:
    device = machine.device
    if isinstance(lengths, list):
        lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
    tokens = advance(logits.to(device), torch.tensor(rows, device=device), lengths, *state, machine.backend)
    assert tokens.dtype == torch.int64
    return tokens.tolist()


def first_largest(row: list[float]) -> int:
    """The expected token, in plain Python."""
    for token, value in enumerate(row):
        if value != value:
            return token
    return row.index(max(row))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 7, 2048, 2049, 5000])
def test_the_token_is_the_first_largest(machine: Machine, vocab_size: int, dtype: torch.dtype) -> None:
    logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(vocab_size)).to(dtype)
    logits[1] = logits[1].round()  # many equal logits
    logits[2] -= 100
    logits[3] = 0
    expected = [first_largest(row) for row in logits.tolist()]
    assert run(machine, logits, [0, 1, 2, 3], [1, 1, 1, 1], make_state(5, machine.device)) == expected


@pytest.mark.parametrize("position", [0, 1, 2047, 2048, 4095, 4096, 4999])
def test_the_largest_logit_is_found_at_any_position(machine: Machine, position: int) -> None:
    logits = torch.zeros(1, 5000)
    logits[0, position] = 1e-30
    assert run(machine, logits, [0], [1], make_state(2, machine.device)) == [position]


def test_the_lowest_id_wins_among_equal_logits_in_different_parts(machine: Machine) -> None:
    logits = torch.zeros(2, 5000)
    logits[0, [4999, 3000, 1500, 2900]] = 5.0
    logits[1, [1030, 3078]] = -0.0
    logits[1, :1030] = -1.0
    assert run(machine, logits, [0, 1], [1, 1], make_state(3, machine.device)) == [1500, 1030]


def test_unusable_logits_give_ids_in_range(machine: Machine) -> None:
    logits = torch.zeros(7, 3000)
    logits[0] = -INF
    logits[1] = NAN
    logits[2, 2500] = NAN
    logits[3, 700] = INF
    logits[3, 2800] = NAN
    logits[4] = INF
    logits[5, 1200] = torch.tensor(-0x400000, dtype=torch.int32).view(torch.float32)  # a NaN with a sign
    logits[6] = -INF
    logits[6, 2999] = -3e38
    expected = [0, 0, 2500, 2800, 0, 1200, 2999]
    assert run(machine, logits, list(range(7)), [1] * 7, make_state(8, machine.device)) == expected
    assert expected == [first_largest(row) for row in logits.tolist()]


def test_only_live_rows_are_written(machine: Machine) -> None:
    logits = torch.zeros(4, 3000)
    for row, token in enumerate((11, 1022, 2033, 44)):
        logits[row, token] = 1.0
    state = make_state(6, machine.device)
    assert run(machine, logits, [3, 0, 2, 4], [17, 9, 0, 1], state) == [11, 1022, 2033, 44]
    assert state.lists() == [
        [1022, 101, 102, 11, 44, 105],
        [9, 201, 202, 17, 1, 205],
        [10, 301, 302, 18, 2, 305],
    ]


@pytest.mark.parametrize("padding", [5, 1], ids=["padding row", "live row"])
def test_padding_writes_nothing_to_any_row(machine: Machine, padding: int) -> None:
    logits = torch.zeros(5, 10)
    logits[:, 3] = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0])
    state = make_state(6, machine.device)
    run(machine, logits, [padding, 1, padding, padding, padding], [0, 7, 0, 0, 0], state)
    assert state.lists() == [
        [100, 3, 102, 103, 104, 105],
        [200, 7, 202, 203, 204, 205],
        [300, 8, 302, 303, 304, 305],
    ]


def test_a_batch_of_padding_alone_writes_nothing(machine: Machine) -> None:
    state = make_state(3, machine.device)
    run(machine, torch.randn(4, 10), [2, 2, 2, 2], [0, 0, 0, 0], state)
    assert state.lists() == make_state(3).lists()


def test_lengths_may_be_a_view_of_seq_lens(machine: Machine) -> None:
    """The case of decode: rows[i] is i, and `lengths` is seq_lens[:n]."""
    state = make_state(5, machine.device)
    state.seq_lens.copy_(torch.tensor([4, 0, 9, 1, 0]))
    logits = torch.eye(3, 50)
    for step in range(3):
        assert run(machine, logits, [0, 1, 2], state.seq_lens[:3], state) == [0, 1, 2]
        assert state.positions.tolist() == [4 + step, 201, 9 + step, 203, 204]
        assert state.seq_lens.tolist() == [5 + step, 0, 10 + step, 1, 0]
    assert state.token_ids.tolist() == [0, 101, 2, 103, 104]


@pytest.mark.parametrize("tiles", [1, 2, 4, 8])
def test_programs_with_several_tiles_give_the_same_tokens(
    machine: Machine, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "tiles_per_program", lambda size, vocab_size: tiles)
    logits = torch.randn(6, 9 * 2048 + 5, generator=torch.Generator().manual_seed(1)).bfloat16()
    logits[3] = -INF
    logits[4, 18000:] = NAN
    logits[5, [2500, 7000]] = NAN  # not in a first tile
    expected = [first_largest(row) for row in logits.tolist()]
    assert run(machine, logits, list(range(6)), [1] * 6, make_state(7, machine.device)) == expected


@pytest.mark.parametrize(("size", "tiles"), [(1, 1), (16, 1), (32, 2), (64, 4), (256, 16), (4096, 16)])
def test_larger_batches_read_more_tiles_per_program(size: int, tiles: int) -> None:
    assert module.tiles_per_program(size, 128256) == tiles


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tiles", [1, 16])
def test_the_kernel_compiles_for_hopper(
    dtype: torch.dtype, tiles: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Triton compiles without a GPU. A batch of one and an unaligned view use the same program."""
    pytest.importorskip("triton")
    from tests import triton_tools as attention

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(module, "tiles_per_program", lambda size, vocab_size: tiles)
    launches = attention.record_launches(monkeypatch)
    for size in (1, 2, 3):
        state = make_state(size + 1)
        lengths = torch.ones(2 * size, dtype=torch.int32)[size % 2 :][:size]
        logits = torch.zeros(size, 128256, dtype=dtype)
        advance(logits, torch.arange(size), lengths, *state, "triton")
    programs = set()
    for kernel, args, options in launches:
        bind = attention.create_function_from_signature(
            kernel.signature, kernel.params, attention.make_backend(attention.HOPPER)
        )
        programs.add(str(bind(*args, **options)[1:]))
    assert (len(launches), len(programs)) == (6, 2)
    for kernel, args, options in launches[:2]:
        signature, constants, hints = {}, {}, {}
        for index, (param, arg) in enumerate(zip(kernel.params, args, strict=True)):
            signature[param.name] = "constexpr" if param.is_constexpr else attention.mangle_type(arg)
            if param.is_constexpr:
                constants[index,] = arg
            elif not param.do_not_specialize:
                hints[index,] = [["tt.divisibility", 16]]
        source = attention.ASTSource(kernel, signature, constants, hints)
        compiled = attention.triton_compile(source, target=attention.HOPPER, options=options)
        if kernel is module.ARGMAX.function:
            assert ".v4.b32" in compiled.asm["ptx"], "each thread should read 16 bytes at once"


def test_the_reference_reads_no_value_on_the_host() -> None:
    """Fake tensors hold no values: `.item()` or a mask as an index raises."""
    with FakeTensorMode():
        state = make_state(5)
        tokens = advance(torch.zeros(3, 50), torch.arange(3), state.seq_lens[:3], *state, "reference")
        assert tokens.shape == (3,)


def test_the_reference_does_not_import_triton() -> None:
    code = """
import sys
import torch
from tcdeploy.engine.step.advance import advance
state = torch.tensor([1, 2]), torch.tensor([0, 0]), torch.zeros(2, dtype=torch.int32)
tokens = advance(torch.eye(1, 9), torch.arange(1), torch.tensor([3], dtype=torch.int32), *state, "reference")
assert (tokens.tolist(), state[1].tolist(), "triton" in sys.modules) == ([0], [3, 0], False)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_replaying_a_captured_step_advances_the_state(backend: Literal["reference", "triton"]) -> None:
    state = State(*(tensor.cuda() for tensor in make_state(33)))
    state.seq_lens.copy_(torch.arange(33) % 5)
    logits, rows = torch.randn(32, 128256, device="cuda").bfloat16(), torch.arange(32, device="cuda")

    def step() -> Tensor:
        return advance(logits, rows, state.seq_lens[:32], *state, backend)

    graph = capture(step)
    before = state.seq_lens.clone()
    for _ in range(50):
        logits.copy_(torch.randn_like(logits))
        graph.replay()
    live = before[:32] > 0
    assert state.seq_lens.tolist() == (before[:32] + 50 * live).tolist() + [2]
    assert torch.equal(state.token_ids[:32][live], logits.argmax(dim=-1)[live])
    assert torch.equal(state.positions[:32][live], before[:32][live].long() + 49)


def capture(step: Callable[[], Tensor]) -> torch.cuda.CUDAGraph:
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph
