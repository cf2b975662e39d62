"""Tensors of a scheme follow stacked experts through transformers' joins, or there is a reason why they cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import tcdeploy.kernels.linear.ops  # noqa: F401 - registers the schemes
from tcdeploy.models.convert.scheme_experts import CannotFollowError, join_scheme_tensors
from tcdeploy.models.convert.scheme_weight import SchemeExperts
from tcdeploy.models.formats.quantised_weight import LayerScheme, QuantisedWeight
from tcdeploy.models.weights.sources import Source, WeightSource
from tcdeploy.planning.schemes import SCHEMES

ROWS, COLUMNS = 256, 128


def stand_in(name: str, scheme: str = "fp8_block", shape: tuple[int, int] = (ROWS, COLUMNS)) -> QuantisedWeight:
    """A weight whose tensors have the names NAME.SUFFIX."""
    described = SCHEMES[scheme]
    tensors = described.quantise(torch.empty(shape, device="meta"), 32)
    sources = tuple(
        WeightSource(item.dtype, tuple(tensor.shape), ["tensor", f"{name}.{item.suffix}"])
        for item, tensor in zip(described.tensors, tensors, strict=True)
    )
    return QuantisedWeight((), shape, [], scheme, sources)


def named(name: str) -> Source:
    return ["tensor", name]


WEIGHTS = {
    **{name: stand_in(name) for name in ("g0", "g1", "u0", "u1")},
    "rows": stand_in("rows", "fp8_channel"),
    "partial": stand_in("partial", shape=(192, COLUMNS)),
    "int4": stand_in("int4", "int4_bfloat16"),
    "int4 of other groups": QuantisedWeight(
        (), (ROWS, COLUMNS), [], "int4_bfloat16",
        (WeightSource("uint8", (ROWS, COLUMNS // 2), []), WeightSource("bfloat16", (ROWS, 1), [])),
    ),
    "permuted": stand_in("permuted", "int4_bfloat16_permuted"),
    "without scheme": QuantisedWeight((), (ROWS, COLUMNS), [], reason="MXFP8 has no kernel"),
}  # fmt: skip
PAIRS: list[Source] = [["cat", 0, [named(f"g{expert}"), named(f"u{expert}")]] for expert in range(2)]


def test_scales_follow_stacked_experts_of_joined_rows() -> None:
    joined = join_scheme_tensors(["stack", 0, PAIRS], WEIGHTS, is_transposed=False)
    weight, scale = joined.tensors
    assert (joined.scheme, weight.shape, scale.shape) == ("fp8_block", (2, 2 * ROWS, COLUMNS), (2, 4, 1))
    assert weight.source == ["stack", 0, [["cat", 0, [named("g0.weight"), named("u0.weight")]],
                                          ["cat", 0, [named("g1.weight"), named("u1.weight")]]]]  # fmt: skip
    names = [[named(f"{kind}{expert}.weight_scale") for kind in "gu"] for expert in range(2)]
    assert scale.source == ["stack", 0, [["cat", 0, pair] for pair in names]]


def test_rows_of_stacks_are_joined_at_the_dimension_of_rows() -> None:
    stacks: list[Source] = [["stack", 0, [named(f"{kind}0"), named(f"{kind}1")]] for kind in "gu"]
    joined = join_scheme_tensors(["cat", 1, stacks], WEIGHTS, is_transposed=False)
    assert [(tensor.shape, tensor.source[:2]) for tensor in joined.tensors] == [
        ((2, 2 * ROWS, COLUMNS), ["cat", 1]), ((2, 4, 1), ["cat", 1])
    ]  # fmt: skip


@pytest.mark.parametrize(
    "source",
    [
        ["permute", [0, 2, 1], ["stack", 0, PAIRS]],
        ["stack", 0, [["permute", [1, 0], pair] for pair in PAIRS]],
        ["stack", 0, [["cat", 1, [["permute", [1, 0], part] for part in pair[2]]] for pair in PAIRS]],
    ],
)
def test_a_transposed_stack_has_the_tensors_of_the_matrices_as_they_are_stored(source: Source) -> None:
    assert join_scheme_tensors(source, WEIGHTS, is_transposed=True) == join_scheme_tensors(
        ["stack", 0, PAIRS], WEIGHTS, is_transposed=False
    )._replace(is_transposed=True)


def test_experts_that_are_stored_together_are_transposed() -> None:
    tensors = (WeightSource("uint8", (4, ROWS, 64), named("b")), WeightSource("uint8", (4, ROWS, 4), named("s")))
    weights = {"experts": QuantisedWeight((), (4, COLUMNS, ROWS), [], "mxfp4", tensors)}
    assert join_scheme_tensors(named("experts"), weights, is_transposed=True).tensors == tensors
    with pytest.raises(CannotFollowError, match="the order of the elements"):
        join_scheme_tensors(named("experts"), weights, is_transposed=False)


REFUSED: dict[str, tuple[Source, str]] = {
    "dense experts among them": (["stack", 0, [named("g0"), named("dense")]], "experts of a layer are not quantised"),
    "no scheme": (["stack", 0, [named("without scheme")]], "MXFP8 has no kernel"),
    "schemes": (["stack", 0, [named("g0"), named("rows")]], "different schemes or groups"),
    "groups": (["stack", 0, [named("int4"), named("int4 of other groups")]], "different schemes or groups"),
    "schemes of gate and up": (["stack", 0, [["cat", 0, [named("g0"), named("rows")]]]], "different schemes or groups"),
    "groups of gate and up": (
        ["stack", 0, [["cat", 0, [named("int4"), named("int4 of other groups")]]]], "different schemes or groups",
    ),
    "partial blocks": (["stack", 0, [["cat", 0, [named("partial")] * 2]]], "not whole blocks of 128"),
    "columns": (["stack", 0, [["cat", 1, [named("g0"), named("u0")]]]], "joins columns"),
    "permuted columns": (["stack", 0, [named("permuted")]], "its own order of columns"),
    "slices": (["stack", 0, [["slice", 0, 0, 128, named("g0")]]], "the order of the elements"),
    "another shape": (["reshape", [2, 128, 128], named("g0")], "the order of the elements"),
    "one matrix": (named("g0"), "the order of the elements"),
    "transposed": (["permute", [0, 2, 1], ["stack", 0, PAIRS]], "the order of the elements"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_scales_cannot_follow_is_named(name: str) -> None:
    source, reason = REFUSED[name]
    with pytest.raises(CannotFollowError, match=reason):
        join_scheme_tensors(source, WEIGHTS, is_transposed=False)


def test_partial_blocks_of_whole_matrices_can_be_stacked() -> None:
    joined = join_scheme_tensors(["stack", 0, [named("partial")] * 3], WEIGHTS, is_transposed=False)
    assert [tensor.shape for tensor in joined.tensors] == [(3, 192, COLUMNS), (3, 2, 1)]


def experts_of(scheme: str, group_size: int, matrices: Sequence[Tensor]) -> SchemeExperts:
    parts: Any = [SCHEMES[scheme].quantise(matrix, group_size) for matrix in matrices]
    return SchemeExperts(SCHEMES[scheme], [torch.stack(pieces) for pieces in zip(*parts, strict=True)], len(matrices))


@pytest.mark.parametrize(
    ("scheme", "group_size"), [("fp8_block", 0), ("fp8_channel", 0), ("int8", 32), ("int4_bfloat16", 32), ("mxfp4", 0)]
)
def test_experts_state_their_sizes_scheme_and_groups(scheme: str, group_size: int) -> None:
    matrices = [torch.randn(192, 64) for _ in range(3)]
    experts = experts_of(scheme, group_size, matrices)
    assert (experts.experts, experts.rows, experts.in_features) == (3, 192, 64)
    described = experts.layer_scheme
    assert described.scheme == scheme
    if group_size:
        assert described == LayerScheme(scheme, group_size)
    tensors = SCHEMES[scheme].quantise(matrices[1], group_size)
    assert torch.equal(experts.dequantised(torch.float32)[1], SCHEMES[scheme].dequantise(tensors, torch.float32))
