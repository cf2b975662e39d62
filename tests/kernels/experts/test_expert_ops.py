"""The ops of experts as torch.compile sees them, and in plain torch: equal to a loop over pairs."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from tcdeploy.kernels.experts import reference
from tcdeploy.kernels.experts.grouped_mm import multiply_sorted, takes
from tcdeploy.kernels.experts.grouping import max_blocks, sort_pairs, tables
from tcdeploy.kernels.experts.ops import eager_expert_linear, expert_linear, group_pairs
from tcdeploy.kernels.experts.reference import expert_shape, multiply_by_expert, multiply_padded
from tcdeploy.kernels.experts.tiles import block_rows
from tests.kernels.experts.expert_cases import (
    DENSE,
    EXPERT_CASES,
    EXPERTS,
    ROUTINGS,
    K,
    N,
    Product,
    expected,
    expert_tensors,
    product,
    scheme_of,
)
from tests.kernels.linear.matmul_cases import assert_agrees

OPCHECKED = ("dense", "fp8_channel", "int4 permuted with zeros", "nvfp4")  # 1 to 4 tensors, fp8 or not
each_case = pytest.mark.parametrize("case", EXPERT_CASES)
each_routing = pytest.mark.parametrize("routing", ROUTINGS)


def run(case: Product) -> torch.Tensor:
    return expert_linear(case.x, case.expert_ids, group_pairs(case.expert_ids, EXPERTS), *case[2:])


@each_case
@each_routing
def test_the_product_on_a_cpu_is_that_of_a_loop_over_pairs(case: str, routing: str) -> None:
    for row_per_pair, with_bias in ((False, True), (True, False)):
        arguments = product(case, ROUTINGS[routing], with_bias, row_per_pair, torch.float32)
        y = run(arguments)
        assert y.is_contiguous() and y.shape == (arguments.expert_ids.numel(), 32)
        assert_close(y, expected(arguments), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", DENSE)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@each_routing
def test_sorted_pairs_have_the_products_of_a_loop_over_pairs(case: str, device: str, routing: str) -> None:
    for row_per_pair, with_bias in ((False, True), (True, False)):
        cpu = product(case, ROUTINGS[routing], with_bias, row_per_pair)
        x, ids, (weight,), bias, _ = cpu
        x, ids, weight, bias = (None if tensor is None else tensor.to(device) for tensor in (x, ids, weight, bias))
        y = multiply_sorted(x, ids, sort_pairs(ids, EXPERTS, 8), weight, bias)
        assert y.is_contiguous()
        assert_agrees(y.cpu(), expected(cpu))


def test_few_pairs_and_quantised_experts_are_not_sorted() -> None:
    weight = torch.empty(128, 16, 16, dtype=torch.bfloat16)
    assert [takes(pairs, [weight], "") for pairs in (1, 3072, 3073)] == [False, False, True]
    assert not takes(3073, [weight.half()], "") and not takes(3073, [weight], "fp8_channel")


@each_case
def test_inputs_wider_than_the_weights_are_not_rounded(case: str) -> None:
    narrow = product(case, ROUTINGS["three slots"])
    wide = narrow._replace(x=torch.randn(narrow.x.shape))
    y = run(wide)
    assert y.dtype == torch.float32
    assert_close(y, expected(wide), rtol=1e-4, atol=1e-5 * expected(wide).abs().max().item())


@each_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_inputs_of_16_bits_give_results_of_16_bits(case: str, dtype: torch.dtype) -> None:
    arguments = product(case, ROUTINGS["three slots"], dtype=dtype, with_bias=False)
    y = run(arguments)
    assert y.dtype == dtype
    precise = expected(arguments).double()
    assert (y - precise).norm() < 0.01 * precise.norm(), "the dense weight of an expert has 8 bits of mantissa"


def test_the_bias_or_weight_of_another_expert_is_noticed() -> None:
    arguments = product("fp8_channel", ROUTINGS["one token"], dtype=torch.float32)
    y = run(arguments)
    assert arguments.bias is not None
    with pytest.raises(AssertionError):
        assert_agrees(y.bfloat16(), expected(arguments._replace(bias=arguments.bias.roll(1, 0))).bfloat16())
    for index in range(2):
        tensors = [
            tensor.view(torch.uint8).roll(1, 0).view(tensor.dtype) if i == index else tensor
            for i, tensor in enumerate(arguments.tensors)
        ]
        with pytest.raises(AssertionError):
            assert_agrees(y.bfloat16(), expected(arguments._replace(tensors=tensors)).bfloat16())


@pytest.mark.parametrize("case", EXPERT_CASES)
@pytest.mark.parametrize("routing", ["three slots", "some experts idle"])
def test_groups_may_be_padded(case: str, routing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    arguments = product(case, ROUTINGS[routing], dtype=torch.float32)
    unpadded = multiply_by_expert(*arguments)
    monkeypatch.setattr(reference, "_multiply_groups", multiply_padded)
    torch.testing.assert_close(multiply_by_expert(*arguments), unpadded, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", EXPERT_CASES)
@pytest.mark.parametrize("routing", ["three slots", "some experts idle"])
def test_weights_may_be_dequantised_in_several_parts(case: str, routing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = product(case, ROUTINGS[routing], dtype=torch.float32)
    whole = multiply_by_expert(*arguments)
    monkeypatch.setattr(reference, "DEQUANTISED_ELEMENTS", 2 * N * K)
    assert torch.equal(multiply_by_expert(*arguments), whole)
    assert_agrees(whole.bfloat16(), expected(arguments).bfloat16())


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in OPCHECKED else pytest.mark.long) for case in EXPERT_CASES]
)
def test_opcheck_passes(case: str) -> None:
    for row_per_pair in (False, True):
        arguments = product(case, ROUTINGS["three slots"], dtype=torch.float32, row_per_pair=row_per_pair)
        groups = group_pairs(arguments.expert_ids, EXPERTS)
        has_fp8 = any(tensor.dtype == torch.float8_e4m3fn for tensor in arguments.tensors)
        checks = ("test_schema",) if not has_fp8 else ()  # which cannot compare fp8
        checks += ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(
            expert_linear.overload, (arguments.x, arguments.expert_ids, groups, *arguments[2:]), test_utils=checks
        )
        torch.library.opcheck(eager_expert_linear.overload, tuple(arguments), test_utils=checks)
    torch.library.opcheck(group_pairs.overload, (arguments.expert_ids, EXPERTS))


def test_the_ops_take_a_symbolic_number_of_tokens() -> None:
    """Blocks of more rows must not add a guard: the shape of the groups does not depend on them."""

    def layer(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return expert_linear(x, ids, group_pairs(ids, EXPERTS), tensors, None, scheme)

    tensors, scheme = expert_tensors("mxfp4"), scheme_of("mxfp4")
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (3, 40, 700):
        x, ids = torch.randn(tokens, 192), torch.randint(EXPERTS, (tokens, 2))
        with torch.compiler.set_stance("default" if tokens == 3 else "fail_on_recompile"):
            assert torch.equal(compiled(x, ids), layer(x, ids))


@each_case
def test_the_shape_of_the_weight_of_an_expert_follows_from_the_tensors(case: str) -> None:
    assert expert_shape(expert_tensors(case), scheme_of(case)) == (32, 192)


# Groups


@each_routing
@pytest.mark.parametrize("rows", [8, 16, 64])
def test_every_pair_is_in_one_block_of_its_expert(routing: str, rows: int) -> None:
    expert_ids = torch.tensor(ROUTINGS[routing])
    pairs, ids = expert_ids.numel(), expert_ids.flatten().tolist()
    order, expert, first, stop = (
        table.tolist() for table in tables(sort_pairs(expert_ids, EXPERTS, rows), pairs, EXPERTS)
    )
    blocks = [
        (owner, order[start : min(start + rows, end)])
        for owner, start, end in zip(expert, first, stop, strict=True)
        if start < end
    ]
    assert sorted(pair for _, block in blocks for pair in block) == [*range(pairs)]
    assert all(ids[pair] == owner for owner, block in blocks for pair in block)
    assert [owner for owner, _ in blocks] == sorted(
        owner for owner in range(EXPERTS) for _ in range(-(-ids.count(owner) // rows))
    )
    assert len(blocks) <= max_blocks(pairs, EXPERTS, rows) <= len(expert)
    is_used = [start < end for start, end in zip(first, stop, strict=True)]
    assert is_used == sorted(is_used, reverse=True), "empty blocks are last"
    assert all(0 <= owner < EXPERTS for owner in expert)


def test_the_worst_routing_fills_all_blocks() -> None:
    ids = [*range(EXPERTS), *[0] * 48, 1]
    groups = sort_pairs(torch.tensor(ids)[:, None], EXPERTS, 16)
    _, _, first, stop = tables(groups, len(ids), EXPERTS)
    assert int((first < stop).sum()) == max_blocks(len(ids), EXPERTS, 16) == EXPERTS + 3


@pytest.mark.parametrize(("pairs", "experts", "rows"), [
    (1, 128, 8), (512, 128, 8), (513, 128, 16), (1280, 128, 16), (1281, 128, 32), (3072, 128, 32), (3073, 128, 64),
    (24576, 128, 64), (24577, 128, 128), (16384, 32, 128),
])  # fmt: skip
def test_blocks_are_as_long_as_the_pairs_of_an_average_expert(pairs: int, experts: int, rows: int) -> None:
    assert block_rows(pairs, experts) == rows


def test_idle_experts_are_not_dequantised() -> None:
    """Their tensors may hold anything."""
    arguments = product("fp8_channel", [[1, 1]], dtype=torch.float32)
    scale = arguments.tensors[1].clone()
    scale[[0, 2, 3, 4]] = float("nan")
    y = multiply_by_expert(*arguments._replace(tensors=[arguments.tensors[0], scale]))
    assert_close(y, expected(arguments), rtol=1e-5, atol=1e-5)
