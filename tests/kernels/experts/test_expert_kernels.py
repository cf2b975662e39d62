"""The kernels of experts agree with a loop over pairs in float64, for each scheme, routing and tile.

The values of a weight are exact in the kernels, and sums are float32, so the tolerance is that of the output's
rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tcdeploy.kernels.experts import matmul as experts_matmul
from tcdeploy.kernels.experts.grouped_mm import takes
from tcdeploy.kernels.experts.grouping import launch_grouping, max_blocks, sort_pairs, tables
from tcdeploy.kernels.experts.matmul import is_supported, matmul
from tcdeploy.kernels.experts.ops import expert_linear, group_pairs
from tcdeploy.kernels.experts.reference import multiply_by_expert
from tcdeploy.kernels.experts.tiles import (
    CODE_GEMV_TILES,
    DECODE_GEMM_TILES,
    GEMV_TILES,
    PREFILL_GEMM_TILES,
    TRANSPOSED_GEMV_TILES,
    Tile,
    block_rows,
    fit_gemm,
    gemm_tile,
    gemv_tile,
)
from tcdeploy.kernels.linear.scheme_tiles import MAX_SUMS
from tests.kernels.experts.expert_cases import (
    DENSE,
    EXPERT_CASES,
    ROUTINGS,
    Product,
    expected,
    expert_tensors,
    product,
    scheme_of,
)
from tests.kernels.linear.matmul_cases import assert_agrees, assert_reads_only
from tests.kernels.linear.scheme_cases import CASES
from tests.kernels.linear.test_scheme_matmul import FAULTS
from tests.triton_tools import triton_interpreter

MANY_TOKENS = 1500
KERNELS = {"gemv": GEMV_TILES[0], "gemm": DECODE_GEMM_TILES[0], "sliced gemm": DECODE_GEMM_TILES[1]}
MAIN_CASES = (*DENSE, "fp8_channel", "fp8_block", "int4 with zeros", "nvfp4")  # one of each way to read values
each_case = pytest.mark.parametrize("case", EXPERT_CASES)
each_main_case = pytest.mark.parametrize("case", MAIN_CASES)
each_kernel = pytest.mark.parametrize("kernel", KERNELS)


def run(case: Product, tile: Tile | None = None) -> Tensor:
    experts = case.tensors[0].shape[0]
    groups = sort_pairs(case.expert_ids, experts, block_rows(case.expert_ids.numel(), experts))
    return matmul(case.x, case.expert_ids, groups, case.tensors, case.bias, case.scheme, tile)


# Arithmetic


@each_case
@each_kernel
def test_every_scheme_agrees_and_writes_only_its_rows(
    case: str, kernel: str, device: str, poisoned_outputs: list[Tensor]
) -> None:
    for row_per_pair, with_bias in ((False, True), (True, False)):
        arguments = product(case, ROUTINGS["three tokens"], with_bias, row_per_pair, device=device)
        assert_agrees(run(arguments, KERNELS[kernel]), expected(arguments))
        assert poisoned_outputs[-1].shape[1] == 32
        assert poisoned_outputs[-1][6:].isnan().all(), "rows past the pairs were written"


@pytest.mark.parametrize("case", ["dense", "fp8_block", "mxfp4"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing_agrees(case: str, routing: str, device: str, poisoned_outputs: list[Tensor]) -> None:
    arguments = product(case, ROUTINGS[routing], device=device)
    pairs = arguments.expert_ids.numel()
    for kernel, tile in KERNELS.items():
        if kernel != "gemv" or pairs <= 16:
            assert_agrees(run(arguments, tile), expected(arguments))
            assert poisoned_outputs[-1][pairs:].isnan().all(), "rows past the pairs were written"


@each_case
@each_kernel
def test_inputs_may_be_float16_and_slices(case: str, kernel: str, device: str) -> None:
    arguments = product(case, ROUTINGS["one token"], dtype=torch.float16, device=device)
    packed = torch.cat([arguments.x * 2, arguments.x, arguments.x], 1)
    for columns in (packed[:, 192:384], torch.cat([arguments.x[:, :3], packed], 1)[:, 195:387]):
        assert_agrees(run(arguments._replace(x=columns), KERNELS[kernel]), expected(arguments))


@pytest.mark.parametrize("case", [*DENSE, "fp8_channel", "fp8_block", "int8 by group", "int4", "mxfp4", "nvfp4"])
@pytest.mark.parametrize(("n", "k"), [(144, 320), (16, 64), (32, 1088)])
def test_sizes_need_not_be_multiples_of_a_tile(
    case: str, n: int, k: int, device: str, poisoned_outputs: list[Tensor]
) -> None:
    for tile in KERNELS.values():
        arguments = product(case, [[2, 0]], device=device, experts=3, n=n, k=k)
        assert_agrees(run(arguments, tile), expected(arguments))
        assert poisoned_outputs[-1][2:].isnan().all()


@each_main_case
@pytest.mark.parametrize(
    "tile",
    [*GEMV_TILES, *CODE_GEMV_TILES[1:], *TRANSPOSED_GEMV_TILES, *DECODE_GEMM_TILES, *PREFILL_GEMM_TILES],
    ids=lambda tile: tile.name,
)
def test_every_tile_agrees(case: str, tile: Tile, device: str) -> None:
    if tile in TRANSPOSED_GEMV_TILES and case not in DENSE:
        return
    arguments = product(case, [[1, 0]], device=device, experts=2, n=32, k=576)
    assert_agrees(run(arguments, tile), expected(arguments))


@each_main_case
@pytest.mark.parametrize(("tokens", "rows"), [(8, 8), (20, 16), (45, 32), (130, 64), (400, 128)])
def test_blocks_of_every_length_agree(case: str, tokens: int, rows: int, device: str) -> None:
    routing = [[int(token % 3 == 0)] for token in range(tokens)]
    arguments = product(case, routing, device=device, experts=2, n=32, k=128)
    assert block_rows(tokens, 2) == rows
    assert_agrees(run(arguments, gemm_tile(rows)), expected(arguments))


@each_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_all_codes_have_their_values(kernel: str, dtype: torch.dtype, device: str) -> None:
    """One column of the input is 1 and the others are 0, so that the product is a column of the weight, exactly."""
    codes = torch.arange(256, dtype=torch.uint8)
    tensors = {
        "": [torch.randn(256).to(dtype)],
        "fp8_channel": [codes.view(torch.float8_e4m3fn), torch.full((256,), 0.5)],
        "int8": [codes.view(torch.int8), torch.full((256, 1), 0.5)],
        "int4_bfloat16": [codes, torch.full((256, 1), 0.5, dtype=torch.bfloat16)],
        "int4_float16_zeros": [codes, torch.full((256, 1), 0.5).half(), (codes % 17)[:, None]],
        "mxfp4": [codes, torch.full((256, 2), 128, dtype=torch.uint8)],
        "nvfp4": [codes, torch.full((256, 4), 2.0).to(torch.float8_e4m3fn), torch.full((256,), 0.5)],
    }
    x = torch.zeros(1, 64, dtype=dtype)
    x[0, 9] = 1
    expert_ids = torch.tensor([[1]])
    for scheme, (column, *scales) in tensors.items():
        width = 32 if "4" in scheme else 64
        weight = column.view(torch.uint8 if column.itemsize == 1 else dtype)[:, None].repeat(1, width)
        if scheme == "fp8_channel":
            weight[weight & 127 == 127] = 0  # NaN
        parts = [
            torch.stack([torch.zeros_like(part), part]) for part in (weight.view(column.dtype).contiguous(), *scales)
        ]
        case = Product(x.to(device), expert_ids.to(device), [part.to(device) for part in parts], None, scheme)
        y = run(case, KERNELS[kernel])
        assert_close(y, expected(case), rtol=0, atol=0)
        assert scheme == "int8" or len(y.unique()) >= 15


@each_kernel
def test_the_smallest_and_the_largest_exponent_of_mxfp4_have_their_values(kernel: str, device: str) -> None:
    """0 is 2**-127, and 255 is NaN."""
    weight = torch.full((1, 16, 32), 0x22, dtype=torch.uint8)  # ones
    scale = torch.tensor([[[0, 127]] * 8 + [[255, 127]] * 8], dtype=torch.uint8)
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    x[0, 0] = 2.0**120
    case = Product(
        x.to(device), torch.tensor([[0]], device=device), [weight.to(device), scale.to(device)], None, "mxfp4"
    )
    y = run(case, KERNELS[kernel])
    assert (y[:, :8] == 2.0**-7).all() and y[:, 8:].isnan().all()


@each_case
@each_kernel
def test_the_kernels_read_only_their_inputs(case: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permuted inputs are a copy. k is no multiple of a step, and the last row of the last expert is read."""
    if "permuted" in case:
        return
    k = 192 if case in ("int4 by row", "int8 by row", "int4 with zeros", "int8 by group") else 160
    arguments = product(case, [[4, 4], [4, 3]], n=48, k=k)
    groups = sort_pairs(arguments.expert_ids, 5, 8)
    readable = (arguments.x, arguments.expert_ids, groups, arguments.bias, *arguments.tensors)
    with triton_interpreter(monkeypatch), assert_reads_only(monkeypatch, *readable) as loads:  # type: ignore[arg-type]
        y = matmul(*arguments[:2], groups, *arguments[2:], KERNELS[kernel])
    assert_agrees(y, expected(arguments))
    assert sum(loads) >= 48 * k


# Mistakes that the tolerance must not hide


def of_experts(change: Callable[[list[Tensor]], list[Tensor]]) -> Callable[[list[Tensor]], list[Tensor]]:
    """A mistake in the tensors of one weight, in those of each expert."""

    def change_all(tensors: list[Tensor]) -> list[Tensor]:
        changed = [change(list(parts)) for parts in zip(*tensors, strict=True)]
        return [torch.stack(parts) for parts in zip(*changed, strict=True)]

    return change_all


def of_the_next_expert(index: int) -> Callable[[list[Tensor]], list[Tensor]]:
    def roll(tensor: Tensor) -> Tensor:
        return tensor.view(torch.uint8).roll(-1, 0).view(tensor.dtype) if tensor.itemsize == 1 else tensor.roll(-1, 0)

    def change(tensors: list[Tensor]) -> list[Tensor]:
        return [roll(tensor) if i == index % len(tensors) else tensor for i, tensor in enumerate(tensors)]

    return change


EXPERT_FAULTS: dict[str, tuple[list[str], Callable[[list[Tensor]], list[Tensor]]]] = {
    **{name: (cases, of_experts(change)) for name, (cases, change) in FAULTS.items()},
    "weight of another expert": ([*EXPERT_CASES], of_the_next_expert(0)),
    "scale of another expert": ([*CASES], of_the_next_expert(1)),
    "zero point of another expert": ([case for case in CASES if "zeros" in case], of_the_next_expert(2)),
    "global scale of another expert": (["nvfp4"], of_the_next_expert(2)),
    "permutation of another expert": ([case for case in CASES if "permuted" in case], of_the_next_expert(-1)),
}


@pytest.mark.parametrize(
    ("fault", "case"), [(fault, case) for fault, (cases, _) in EXPERT_FAULTS.items() for case in cases]
)
def test_a_mistake_exceeds_the_tolerance(fault: str, case: str) -> None:
    """Without the kernels: a result with the mistake differs enough for the tests above."""
    arguments = product(case, ROUTINGS["one token"], with_bias=False, n=160 if case == "fp8_block" else 32)
    mistaken = arguments._replace(tensors=EXPERT_FAULTS[fault][1](arguments.tensors))
    with pytest.raises(AssertionError):
        assert_agrees(expected(mistaken), expected(arguments))


# Groups


def blocks_of(groups: Tensor, pairs: int, experts: int, rows: int) -> list[tuple[int, int, int]]:
    """Expert, first and stop of the blocks that are not empty, of those that the GEMM's programs look at."""
    _, *block_tables = (table.tolist() for table in tables(groups, pairs, experts))
    return [block for block in list(zip(*block_tables, strict=True))[: max_blocks(pairs, experts, rows)]
            if block[1] < block[2]]  # fmt: skip


@pytest.mark.parametrize(("experts", "rows"), [(5, 8), (32, 64), (128, 8)])
@pytest.mark.parametrize("tokens", [1, 9, 101, 500])
def test_the_grouping_kernels_equal_sorting(tokens: int, experts: int, rows: int, device: str) -> None:
    """500 tokens are grouped by the kernel of many pairs."""
    torch.manual_seed(tokens)
    pairs = tokens * 3
    routings = [torch.randint(experts, (tokens, 3)), torch.full((tokens, 3), experts - 1), torch.zeros(tokens, 3)]
    for routing in routings:
        expert_ids = routing.long().to(device)
        actual = launch_grouping(expert_ids, experts, rows)
        reference = sort_pairs(expert_ids, experts, rows)
        assert torch.equal(actual[:pairs], reference[:pairs])
        assert blocks_of(actual, pairs, experts, rows) == blocks_of(reference, pairs, experts, rows)


@pytest.mark.parametrize("tokens", [3, 600])
def test_the_gemm_follows_the_groups_of_the_kernels(tokens: int, device: str) -> None:
    arguments = product("dense", [[token % 3, 2] for token in range(tokens)], device=device, experts=3, n=16, k=64)
    rows = block_rows(2 * tokens, 3)
    groups = launch_grouping(arguments.expert_ids, 3, rows)
    y = matmul(*arguments[:2], groups, *arguments[2:], gemm_tile(rows))
    assert_agrees(y, expected(arguments))


def test_many_pairs_of_few_experts_fill_the_tables(device: str) -> None:
    """The last expert has a pair after as many whole blocks as possible; more than ENTRIES of them."""
    expert_ids = torch.cat([torch.arange(5), torch.full((2051,), 4)])[:, None].to(device)
    groups = launch_grouping(expert_ids, 5, 8)
    blocks = blocks_of(groups, 2056, 5, 8)
    assert [block[0] for block in blocks] == [0, 1, 2, 3, *[4] * 257]
    assert blocks[-1] == (4, 4 + 256 * 8, 2056)
    assert groups[:5].tolist() == [0, 1, 2, 3, 4] and groups[5:2056].tolist() == [*range(5, 2056)]


# Where the kernels are used, and their tiles


@pytest.mark.parametrize(
    ("case", "n", "k", "dtype", "expected_support"),
    [
        ("dense", 48, 80, torch.bfloat16, True),
        ("dense transposed", 48, 80, torch.float16, True),
        ("dense", 40, 80, torch.bfloat16, False),
        ("dense", 48, 72, torch.bfloat16, False),
        ("dense", 48, 80, torch.float32, False),
        ("fp8_channel", 48, 80, torch.bfloat16, True),
        ("fp8_channel", 48, 88, torch.bfloat16, False),
        ("fp8_block", 144, 320, torch.float16, True),
        ("mxfp4", 48, 96, torch.bfloat16, True),
        ("mxfp4", 40, 96, torch.bfloat16, False),
        ("nvfp4", 48, 96, torch.bfloat16, True),
        ("int4 permuted with zeros", 48, 192, torch.bfloat16, True),
    ],
)
def test_shapes_that_the_kernels_take(
    case: str, n: int, k: int, dtype: torch.dtype, expected_support: bool
) -> None:  # fmt: skip
    assert is_supported(scheme_of(case), dtype, expert_tensors(case, 2, n, k, dtype)) == expected_support


def test_weights_that_the_kernels_do_not_take() -> None:
    dense = torch.zeros(2, 32, 64, dtype=torch.bfloat16)
    weight, scale = expert_tensors("fp8_channel")
    assert is_supported("", torch.bfloat16, [dense])
    assert not is_supported("", torch.float16, [dense]), "the inputs have another dtype"
    assert not is_supported("", torch.bfloat16, [dense[:, ::2, ::2]]), "no dimension is contiguous"
    assert not is_supported("fp8_channel", torch.bfloat16, [weight.mT.contiguous().mT, scale])
    for rows, is_taken in ((1 << 16, False), ((1 << 16) - 16, True)):  # an expert of 2 GiB
        weight = torch.empty(1, rows, 1 << 15, dtype=torch.float8_e4m3fn, device="meta")
        scale = torch.empty(1, rows, dtype=torch.float32, device="meta")
        assert is_supported("fp8_channel", torch.bfloat16, [weight, scale]) == is_taken
    assert not is_supported("int4_bfloat16", torch.bfloat16, expert_tensors("int4", k=96 * 5)[:1] + [
        torch.ones(5, 32, 10, dtype=torch.bfloat16)]), "groups of 48 columns do not begin with 16 bytes"  # fmt: skip


def test_the_sums_of_a_block_fit_registers_and_slices_have_one_scale() -> None:
    for tile in (*DECODE_GEMM_TILES, *PREFILL_GEMM_TILES):
        for rows in (8, 16, 32, 64, 128):
            for group in (16, 32, 64, 96, 128, 2880, 1 << 30):
                block_n, width, slices, num_stages = fit_gemm(tile, rows, group)
                assert block_n * slices * rows <= MAX_SUMS * tile.num_warps or slices == 1
                assert slices == 1 or slices >= tile.num_warps
                assert (group % width == 0 or group == 16) and 32 <= width <= 128 and block_n >= 16
                assert 3 <= num_stages <= 8


@pytest.mark.parametrize(("rows", "name"), [(8, "n64_k128"), (32, "n64_k128"), (64, "n128_k64"), (128, "n128_k64_w8")])
def test_the_tile_of_the_gemm_depends_on_the_rows_of_a_block(rows: int, name: str) -> None:
    assert gemm_tile(rows).name == name


@pytest.mark.parametrize(("row_bytes", "per_byte", "is_dense", "is_transposed", "name"), [
    (4096, 1, True, False, "n8_b2048"), (1536, 1, True, False, "n8_b512"), (4096, 1, True, True, "n32_b128_s4"),
    (2048, 1, False, False, "n4_b2048"),
    (1024, 1, False, False, "n4_b1024"), (1440, 2, False, False, "n4_b512"), (384, 2, False, False, "n8_b1024"),
])  # fmt: skip
def test_the_tile_of_the_gemv_depends_on_the_row_and_its_format(
    row_bytes: int, per_byte: int, is_dense: bool, is_transposed: bool, name: str
) -> None:
    assert gemv_tile(row_bytes, per_byte, is_dense, is_transposed).name == name


# On a GPU


@pytest.mark.gpu
@each_case
@pytest.mark.parametrize(("n", "k"), [(1536, 2048), (576, 2880)])
@pytest.mark.parametrize("tokens", [1, 3, 16, 100, MANY_TOKENS])
def test_a_graph_of_the_ops_follows_the_routing_on_a_gpu(case: str, n: int, k: int, tokens: int) -> None:
    routings = torch.rand(2, tokens, 16, generator=torch.Generator().manual_seed(tokens)).topk(4).indices.cuda()
    has_bias = tokens < MANY_TOKENS  # torch's grouped GEMM of many pairs rounds the product before the bias
    arguments = product(case, routings[0].tolist(), has_bias, device="cuda", experts=16, n=n, k=k)
    expert_ids = arguments.expert_ids

    def layer() -> Tensor:
        return expert_linear(arguments.x, expert_ids, group_pairs(expert_ids, 16), *arguments[2:])

    def reference() -> Tensor:
        return multiply_by_expert(arguments.x.double(), *arguments[1:]).bfloat16()

    assert_agrees(layer(), reference())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer()
    expert_ids.copy_(routings[1])
    graph.replay()
    assert torch.equal(y, layer())
    assert_agrees(y, reference())


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["dense", "dense transposed"])
def test_the_bias_of_many_pairs_is_added_to_the_rounded_product(case: str) -> None:
    routing = torch.rand(MANY_TOKENS, 16, generator=torch.Generator().manual_seed(1)).topk(4).indices
    x, expert_ids, tensors, bias, scheme = product(case, routing.tolist(), device="cuda", experts=16, n=1536, k=2048)
    groups = group_pairs(expert_ids, 16)
    assert takes(expert_ids.numel(), tensors, scheme) and bias is not None
    y = expert_linear(x, expert_ids, groups, tensors, bias, scheme)
    assert torch.equal(y, expert_linear(x, expert_ids, groups, tensors, None, scheme) + bias[expert_ids.flatten()])


@pytest.mark.gpu
def test_weights_without_a_kernel_are_captured_too() -> None:
    arguments = product("dense", ROUTINGS["three slots"], device="cuda", dtype=torch.float32)
    groups = group_pairs(arguments.expert_ids, 5)
    eager = expert_linear(*arguments[:2], groups, *arguments[2:])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = expert_linear(*arguments[:2], groups, *arguments[2:])
    graph.replay()
    assert_close(y, eager)


def test_a_gpu_without_fp8_dequantises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for case, is_accepted in (("dense", True), ("fp8_channel", False), ("nvfp4", False), ("mxfp4", True)):
        arguments = product(case, ROUTINGS["one token"])
        assert experts_matmul.accepts(arguments.scheme, arguments.x, arguments.tensors) == is_accepted
