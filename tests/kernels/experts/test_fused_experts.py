"""Products of few pairs, with SwiGLU or with the weighted sum, agree with those in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tcdeploy.kernels.experts import matmul as experts_matmul
from tcdeploy.kernels.experts.matmul import is_fusable, is_summable, matmul, sum_experts
from tcdeploy.kernels.experts.ops import expert_linear_sum, gated_expert_linear
from tcdeploy.kernels.experts.tiles import (
    CODE_GEMV_TILES,
    DENSE_GEMV_TILES,
    GEMV_TILES,
    SCHEME_SUM_TILES,
    SUM_TILES,
    ExpertGemvTile,
    ExpertSumTile,
    SchemeSumTile,
)
from tests.kernels.experts.expert_cases import (
    DENSE,
    EXPERT_CASES,
    EXPERTS,
    Product,
    expected,
    expert_tensors,
    product,
    scheme_of,
)
from tests.kernels.linear.matmul_cases import assert_agrees, assert_reads_only
from tests.triton_tools import compile_for_hopper, record_launches, spilled_bytes, triton_interpreter

ROUTINGS = {
    "one pair": [[3]],
    "one token": [[4, 1, 0]],
    "two tokens": [[3, 0], [4, 3]],
    "top_k 8": [[4, 1, 0, 2, 3, 1, 1, 0]],
}
MAIN_CASES = (*DENSE, "fp8_channel", "fp8_block", "int4 with zeros", "mxfp4", "nvfp4")
UNPERMUTED = [case for case in EXPERT_CASES if "permuted" not in case]
each_routing = pytest.mark.parametrize("routing", ROUTINGS)


def wide(arguments: Product) -> Product:
    return arguments._replace(x=arguments.x.double())


def gated(arguments: Product) -> Tensor:
    gate, up = expected(wide(arguments)).chunk(2, 1)
    return (torch.nn.functional.silu(gate) * up).to(arguments.x.dtype)


class Sum:
    """The arguments of `expert_linear_sum`, and its result in float64."""

    def __init__(self, routing: list[list[int]], weights: str = "dense", *, with_extras: bool = True, n: int = 32,
                 k: int = 192, device: str = "cpu", factor_dtype: torch.dtype = torch.bfloat16) -> None:  # fmt: skip
        case = product(weights, routing, with_extras, row_per_pair=True, n=n, k=k, device=device)
        self.x, self.ids, self.tensors, self.bias, self.scheme = case
        self.factors = torch.rand(self.ids.shape).to(device, factor_dtype)
        self.addend = torch.randn(len(self.ids), n).to(device, torch.bfloat16) if with_extras else None
        total = (expected(wide(case)) * self.factors.double().view(-1, 1)).view(*self.ids.shape, -1).sum(1)
        self.expected = (total if self.addend is None else total + self.addend.double()).bfloat16()

    @property
    def args(self) -> tuple[Tensor, Tensor, Tensor, list[Tensor], Tensor | None, Tensor | None, str]:
        return self.x, self.ids, self.factors, self.tensors, self.bias, self.addend, self.scheme


# SwiGLU


@pytest.mark.parametrize("case", MAIN_CASES)
@each_routing
def test_swiglu_of_the_halves_agrees(case: str, routing: str, device: str, poisoned_outputs: list[Tensor]) -> None:
    arguments = product(case, ROUTINGS[routing], device=device, n=64)
    x, ids, tensors, bias, scheme = arguments
    assert_agrees(matmul(x, ids, None, tensors, bias, scheme, gated=True), gated(arguments))
    assert poisoned_outputs[-1].shape[1] == 32
    assert poisoned_outputs[-1][ids.numel() :].isnan().all(), "rows past the pairs were written"


@pytest.mark.parametrize("tile", DENSE_GEMV_TILES, ids=lambda tile: tile.name)
def test_swiglu_agrees_with_every_dense_tile(tile: ExpertGemvTile, device: str) -> None:
    arguments = product("dense", [[1, 0]], device=device, experts=2, n=64, k=576)
    x, ids, tensors, bias, scheme = arguments
    assert_agrees(matmul(x, ids, None, tensors, bias, scheme, tile, True), gated(arguments))
    plain = product("dense", [[1, 0]], device=device, experts=2, n=48, k=576)
    assert_agrees(matmul(*plain[:2], None, *plain[2:], tile), expected(plain))


@pytest.mark.parametrize(
    ("case", "tile"),
    [("fp8_block", tile) for tile in GEMV_TILES] + [("mxfp4", tile) for tile in CODE_GEMV_TILES],
    ids=str,
)
def test_swiglu_agrees_with_every_tile_of_quantised_weights(case: str, tile: ExpertGemvTile, device: str) -> None:
    arguments = product(case, [[1, 0]], device=device, experts=2, n=160, k=320)
    x, ids, tensors, bias, scheme = arguments
    assert_agrees(matmul(x, ids, None, tensors, bias, scheme, tile, True), gated(arguments))


@pytest.mark.parametrize("case", DENSE)
@pytest.mark.parametrize("k", [192, 576])
def test_the_normalised_row_agrees(case: str, k: int, device: str) -> None:
    """The row is so small that eps matters. Without the norm's weights or eps the tolerance is exceeded."""
    arguments = product(case, ROUTINGS["one token"], device=device, n=64, k=k)
    norm = torch.rand(k).to(device, torch.bfloat16) + 0.5
    small = arguments.x * 0.02
    eps = float(small.float().pow(2).mean())
    wide_row = small.double()
    normed = wide_row * torch.rsqrt(wide_row.pow(2).mean(-1, keepdim=True) + eps) * norm.double()
    gate, up = expected(arguments._replace(x=normed)).chunk(2, 1)
    expected_y = (torch.nn.functional.silu(gate) * up).bfloat16()
    op_arguments = (small, *arguments[1:])
    x, ids, tensors, bias, scheme = op_arguments
    y = matmul(x, ids, None, tensors, bias, scheme, gated=True, norm=norm, eps=eps)
    assert_agrees(y, expected_y)
    assert_agrees(gated_expert_linear(x, ids, tensors, bias, scheme, norm, eps), expected_y)
    for other_norm, other_eps in ((torch.ones_like(norm), eps), (norm, 0.0)):
        with pytest.raises(AssertionError):
            assert_agrees(gated_expert_linear(x, ids, tensors, bias, scheme, other_norm, other_eps), expected_y)


@pytest.mark.parametrize("case", UNPERMUTED)
def test_the_op_of_swiglu_agrees_on_a_cpu_and_passes_opcheck(case: str) -> None:
    arguments = product(case, ROUTINGS["two tokens"], n=64)
    op_arguments = (arguments.x, arguments.expert_ids, *arguments[2:])
    y = gated_expert_linear(*op_arguments)
    assert_agrees(y, gated(arguments))
    has_fp8 = any(tensor.dtype == torch.float8_e4m3fn for tensor in arguments.tensors)
    checks = ("test_schema",) if not has_fp8 else ()  # which cannot compare fp8
    torch.library.opcheck(gated_expert_linear.overload, op_arguments, test_utils=(*checks, "test_faketensor"))


def test_products_that_take_swiglu() -> None:
    for case in EXPERT_CASES:
        tensors = expert_tensors(case, n=64)
        assert is_fusable(scheme_of(case), 16, torch.bfloat16, tensors) == ("permuted" not in case)
        assert not is_fusable(scheme_of(case), 17, torch.bfloat16, tensors)
    assert not is_fusable("", 8, torch.bfloat16, expert_tensors("dense", n=48)), "a tile of 16 rows would be partial"


# The weighted sum


@pytest.mark.parametrize("tile", SUM_TILES, ids=lambda tile: tile.name)
@each_routing
def test_the_weighted_sum_agrees(
    tile: ExpertSumTile, routing: str, device: str, poisoned_outputs: list[Tensor]
) -> None:
    for with_extras in (True, False):
        case = Sum(ROUTINGS[routing], with_extras=with_extras, device=device)
        assert_agrees(sum_experts(*case.args, tile), case.expected)
        assert poisoned_outputs[-1][len(case.ids) :].isnan().all(), "rows past the tokens were written"


@pytest.mark.parametrize("weights", UNPERMUTED[2:])
@each_routing
def test_the_weighted_sum_of_quantised_experts_agrees(
    weights: str, routing: str, device: str, poisoned_outputs: list[Tensor]
) -> None:
    """fp8_block: the last block of rows of each expert is partial."""
    case = Sum(ROUTINGS[routing], weights, n=48, device=device)
    assert_agrees(sum_experts(*case.args), case.expected)
    assert poisoned_outputs[-1][len(case.ids) :].isnan().all(), "rows past the tokens were written"


@pytest.mark.parametrize("tile", SCHEME_SUM_TILES, ids=lambda tile: tile.name)
@pytest.mark.parametrize("weights", ["fp8_block", "int4 with zeros", "mxfp4"])
@pytest.mark.parametrize("k", [192, 576, 1152])
def test_the_weighted_sum_agrees_with_every_tile_of_quantised_weights(
    tile: SchemeSumTile, weights: str, k: int, device: str
) -> None:
    case = Sum([[4, 1, 0]], weights, with_extras=False, n=160, k=k, device=device)
    assert_agrees(sum_experts(*case.args, tile), case.expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of numpy
def test_unused_slots_do_not_make_nan_of_infinity(device: str) -> None:
    """Three slots are padded to four, and the last one multiplies the last pair again."""
    case = Sum(ROUTINGS["one token"], "mxfp4", with_extras=False, device=device)
    case.tensors[1][0, 3, 0] = 254  # 2**127
    case.x.mul_(1 << 12)
    y = sum_experts(*case.args)
    assert y[0, 3].isinf() and y[0, :3].isfinite().all() and y[0, 4:].isfinite().all()


@pytest.mark.parametrize("k", [64, 320, 768, 1024])
def test_the_sum_takes_any_multiple_of_64_columns(k: int, device: str) -> None:
    case = Sum(ROUTINGS["one token"], k=k, device=device, factor_dtype=torch.float32)
    assert_agrees(sum_experts(*case.args), case.expected)


def test_swiglu_reads_only_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """k is no multiple of a step, and the last row of the last expert is read."""
    case, norm = product("dense", [[4, 3]], n=64, k=80), torch.rand(80).bfloat16()
    readable = (case.x, case.expert_ids, case.tensors[0], case.bias, norm)
    with triton_interpreter(monkeypatch), assert_reads_only(monkeypatch, *readable):  # type: ignore[arg-type]
        y = matmul(case.x, case.expert_ids, None, case.tensors, case.bias, "", gated=True, norm=norm, eps=1e-6)
    assert y.isfinite().all()


@pytest.mark.parametrize(
    ("weights", "k"), [("dense", 192), ("fp8_block", 1072), ("int4 with zeros", 1152), ("mxfp4", 1120)]
)
def test_the_sum_reads_only_its_inputs(weights: str, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Sum([[4, 4, 3], [4, 0, 1]], weights, k=k)
    readable = (case.x, case.ids, case.factors, *case.tensors, case.bias, case.addend)
    with triton_interpreter(monkeypatch), assert_reads_only(monkeypatch, *readable):  # type: ignore[arg-type]
        y = sum_experts(*case.args)
    assert_agrees(y, case.expected)


def test_factors_of_another_pair_exceed_the_tolerance() -> None:
    case = Sum(ROUTINGS["two tokens"])
    with pytest.raises(AssertionError):
        assert_agrees(expert_linear_sum(*case.args[:2], case.factors.roll(1, 1), *case.args[3:]), case.expected)


@pytest.mark.parametrize("weights", ["dense", "int4 with zeros", "mxfp4"])
def test_the_op_of_the_sum_agrees_on_a_cpu_and_passes_opcheck(weights: str) -> None:
    for with_extras in (True, False):
        case = Sum(ROUTINGS["two tokens"], weights, with_extras=with_extras)
        assert_agrees(expert_linear_sum(*case.args), case.expected)
        torch.library.opcheck(expert_linear_sum.overload, case.args)


def test_products_that_can_be_summed() -> None:
    for case in EXPERT_CASES:
        tensors, scheme = expert_tensors(case), scheme_of(case)
        is_taken = case != "dense transposed" and "permuted" not in case
        assert is_summable(scheme, 16, torch.bfloat16, tensors) == is_taken
        assert not is_summable(scheme, 17, torch.bfloat16, tensors)
    dense = expert_tensors("dense")
    assert not is_summable("", 8, torch.float16, dense)
    assert not is_summable("", 8, torch.bfloat16, expert_tensors("dense", k=160))


# Compiled for Hopper


@pytest.mark.parametrize(
    ("weights", "tile"),
    [("dense", tile) for tile in SUM_TILES] + [("fp8_channel", None), ("int4 with zeros", None), ("mxfp4", None)],
    ids=str,
)
def test_the_sum_loads_weights_before_it_waits_for_the_previous_kernel(
    weights: str, tile: ExpertSumTile | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(experts_matmul, "supports_pdl", lambda _: True)
    launches = record_launches(monkeypatch)
    sum_experts(*Sum(ROUTINGS["top_k 8"], weights, k=768).args, tile)
    kernel = compile_for_hopper(launches[0], runs_ptxas=False)
    before, after = kernel.asm["ptx"].split("griddepcontrol.wait")
    assert before.count("evict_first") and "st.global" not in before
    assert kernel.metadata.launch_pdl and after.index("griddepcontrol.launch_dependents") < after.index("ld.global")
    assert spilled_bytes(kernel.asm["ptx"], tmp_path) == 0


@pytest.mark.gpu
def test_graph_replays_of_both_products_equal_eager_launches() -> None:
    """The second product reads the ids before the first one has ended."""
    up, down = (torch.randn(EXPERTS, n, k, device="cuda").bfloat16() / k**0.5 for n, k in ((1536, 2048), (2048, 768)))
    x, factors = torch.randn(1, 2048, device="cuda").bfloat16(), torch.rand(1, 4, device="cuda").bfloat16()
    ids = torch.zeros(1, 4, device="cuda", dtype=torch.int64)
    norm = torch.rand(2048, device="cuda").bfloat16()

    def chain() -> Tensor:
        total = x
        for _ in range(8):
            states = gated_expert_linear(total, ids, [up], None, "", norm, 1e-6)
            total = expert_linear_sum(states, ids, factors, [down], None, total, "")
        return total

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = chain()
    for seed in range(3):
        torch.manual_seed(seed)
        ids.copy_(torch.randperm(EXPERTS)[:4])
        torch.cuda.synchronize()
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        eager = chain()
        assert torch.equal(replayed, eager) and eager.isfinite().all()
