"""Integer weights of 2 to 8 bits in int32 words, with a scale and perhaps a zero point per group of columns.

    w[n, k] = (values[n, k] - zeros[n, group of k]) * scales[n, group of k]

Values and zero points are unsigned. The formats differ in the dimension along which words are filled, the order in a
word, and what is stored as a zero point:

                        values                   zero points                  scales        filled
    compressed-tensors  weight_packed [n, k/8]   weight_zero_point [n/8, g]   [n, g]        along k, n
    GPTQ, AutoRound     qweight [k/8, n]         qzeros [g, n/8]              [g, n]        along k, n
    AWQ                 qweight [k, n/8]         qzeros [g, n/8]              [g, n]        along n, n, reordered

for 4 bits. A weight without zero points has the zero in the middle of the range. `g_idx` [k] is the group of each
column. If the columns of a group are not consecutive ("act-order"), columns are sorted by group while the weight is
loaded.

A weight of 4 bits becomes a scheme `int4`. A weight of 8 bits becomes `int8` if it has no zero points and its
columns are in order. All others are dequantised.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import torch

from tcdeploy.models.formats.quantised_weight import (
    FLOATS,
    Layer,
    QuantisedWeight,
    check_groups,
    converted,
    num_elements,
    weight_in_scheme,
)
from tcdeploy.models.weights.reader import StoredTensor, read_tensor
from tcdeploy.models.weights.sources import Source, evaluate
from tcdeploy.planning.dtypes import dtype_name
from tcdeploy.planning.schemes import int4_scheme_name

WORD_BITS = 32
BITS = (4, 8, 3, 2)  # of a value
UNUSED = ("input_scale", "output_scale", "input_zero_point", "bias_scale")


class PackedWeight(NamedTuple):
    """A weight [rows, columns], from which `in_scheme` makes a scheme.

    values: the source of [rows, columns] in uint8. bytes_in_order: of the same values in the bytes of int4 [rows,
    columns / 2] or int8 [rows, columns], if the checkpoint can be read so. scales: [rows, groups]; their tensor is
    `scale_suffix`. zeros: [rows, groups] in uint8, None if all are `zero`. groups: the group of each column
    [columns], None if the columns of each group are consecutive.
    """

    layer: Layer
    names: tuple[str, ...]
    bits: int
    rows: int
    columns: int
    values: Source
    bytes_in_order: Source | None
    scales: Source
    scale_suffix: str
    zeros: Source | None
    groups: Source | None

    @property
    def zero(self) -> int:
        return 1 << self.bits - 1


def in_scheme(weight: PackedWeight) -> QuantisedWeight:
    layer, shape, scales = weight.layer, (weight.rows, weight.columns), (weight.layer.name(weight.scale_suffix),)
    if weight.bits == 4 and weight.columns % 2 == 0:
        packed = weight.bytes_in_order or converted("nibbles", (weight.rows, weight.columns // 2), [weight.values])
        sources = [packed, weight.scales]
        if weight.zeros is not None:
            sources.append(weight.zeros)
        if weight.groups is not None:
            sources[0] = converted("sorted_nibbles", (weight.rows, weight.columns // 2), [packed, weight.groups])
            columns = converted("sorted_columns", (weight.columns,), [weight.groups])
            sources.append(columns)
        dtype = dtype_name(layer.tensors[weight.scale_suffix].dtype)
        name = int4_scheme_name(dtype, weight.zeros is not None, weight.groups is not None)
        return weight_in_scheme(layer, weight.names, name, sources, scales)
    if weight.bits == 8 and weight.zeros is None and weight.groups is None:
        values = converted("without_offset", shape, [weight.bytes_in_order or weight.values], weight.zero)
        return weight_in_scheme(layer, weight.names, "int8", [values, weight.scales], scales)
    parts = [weight.values, weight.scales]
    parts += [source for source in (weight.zeros, weight.groups) if source is not None]
    dense = converted("grouped_values", shape, parts, *(() if weight.zeros is not None else (weight.zero,)))
    kind = " with zero points" * (weight.zeros is not None) + " in another order of columns" * bool(weight.groups)
    return QuantisedWeight(weight.names, shape, dense, reason=f"{weight.bits} bits{kind} have no kernel", scales=scales)


def find_compressed_weight(
    layer: Layer, possible_bits: Collection[int] = BITS, needs_g_idx: bool = False
) -> QuantisedWeight | None:
    """A weight of compressed-tensors in the format pack-quantized. Raises ModelError for impossible tensors.

    possible_bits: those that the config states. Words of 7-bit values have the shape of words of 8-bit ones.
    needs_g_idx: the config says that the columns are in the order of activations.
    """
    packed = layer.tensors.get("weight_packed")
    if packed is None or packed.dtype != torch.int32:
        return None
    shape = layer.require("weight_shape", (torch.int64, torch.int32), (2,))
    rows, columns = read_tensor(shape).tolist()
    fitting = (bits for bits in BITS if bits in possible_bits and packed.shape == (rows, _words(columns, bits)))
    bits = next(fitting, 0)
    if not bits:
        allowed = " or ".join(map(str, sorted(possible_bits)))
        problem = f"cannot be a weight [{rows}, {columns}], the values of weight_shape, with {allowed} bits"
        raise layer.wrong("weight_packed", problem)
    scale = layer.require("weight_scale", FLOATS)
    groups = scale.shape[-1] if len(scale.shape) == 2 else 1
    check_groups(layer, "weight_scale", columns, groups)
    if num_elements(scale) == 1:
        scales = ["reshape", [rows, 1], converted("repeated", (rows,), [layer.source("weight_scale")], rows)]
    else:
        layer.require("weight_scale", FLOATS, (rows, groups))
        scales = layer.source("weight_scale")
    zeros = None
    if "weight_zero_point" in layer.tensors:
        layer.require("weight_zero_point", (torch.int32,), (_words(rows, bits), groups))
        zeros = converted("unpacked", (rows, groups), [layer.source("weight_zero_point")], bits, 0, rows)
    in_order = None
    if columns * bits % WORD_BITS == 0 and bits in (4, 8):
        in_order = ["view", "uint8", [rows, columns * bits // 8], layer.name("weight_packed")]
    return in_scheme(PackedWeight(
        layer=layer, bits=bits, rows=rows, columns=columns,
        names=layer.names(
            ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", *UNUSED)
        ),
        values=converted("unpacked", (rows, columns), [layer.source("weight_packed")], bits, 1, columns),
        bytes_in_order=in_order, scales=scales, scale_suffix="weight_scale", zeros=zeros,
        groups=_groups_out_of_order(layer, "weight_g_idx", columns, groups, needs_g_idx),
    ))  # fmt: skip


def find_gptq_weight(layer: Layer, zero_offset: int, needs_g_idx: bool = False) -> QuantisedWeight | None:
    """A weight of GPTQ or AutoRound. zero_offset: what is added to stored zero points, 0 for gptq_v2 and otherwise 1.

    needs_g_idx: the config says that the columns are in the order of activations (`desc_act`).
    """
    if "qweight" not in layer.tensors:
        return None
    scales = layer.require("scales", FLOATS)
    if len(scales.shape) != 2:
        raise layer.wrong("scales", "must have a row for each group")
    groups, rows = scales.shape
    zero_words = layer.require("qzeros", (torch.int32,)).shape
    bits = next((bits for bits in BITS if zero_words == (groups, _words(rows, bits))), 0)
    if not bits:
        raise layer.wrong("qzeros", f"does not fit scales {[*scales.shape]}")
    columns = math.prod(layer.require("qweight", (torch.int32,)).shape[:1]) * WORD_BITS // bits
    layer.require("qweight", (torch.int32,), (_words(columns, bits), rows))
    check_groups(layer, "scales", columns, groups)
    by_group = converted("unpacked", (groups, rows), [layer.source("qzeros")], bits, 1, rows, zero_offset)
    zeros = None if _is_symmetric(layer, by_group, bits, zero_offset) else ["permute", [1, 0], by_group]
    in_order = None
    if bits in (4, 8) and columns * bits % WORD_BITS == 0:
        words = _words(columns, bits)
        in_bytes = ["view", "uint8", [words, rows, WORD_BITS // 8], layer.name("qweight")]
        in_order = ["reshape", [rows, words * WORD_BITS // 8], ["permute", [1, 0, 2], in_bytes]]
    values = converted("unpacked", (columns, rows), [layer.source("qweight")], bits, 0, columns)
    return in_scheme(PackedWeight(
        layer=layer, names=layer.names(("qweight", "qzeros", "scales", "g_idx", *UNUSED)), bits=bits, rows=rows,
        columns=columns, values=["permute", [1, 0], values], bytes_in_order=in_order,
        scales=["permute", [1, 0], layer.source("scales")], scale_suffix="scales", zeros=zeros,
        groups=_groups_out_of_order(layer, "g_idx", columns, groups, needs_g_idx),
    ))  # fmt: skip


def _is_symmetric(layer: Layer, zeros: Source, bits: int, zero_offset: int) -> bool:
    """Whether all zero points are in the middle of the range.

    Raises ModelError if all of them are off by one: the weight is symmetric, and stored in the other version of the
    format, which has equal shapes.
    """
    values, middle = evaluate(zeros, _by_name(layer)), 1 << bits - 1
    neighbour = middle + 1 if zero_offset else middle - 1
    if bool((values == neighbour).all()):
        problem = "has zero points that are off by one for the checkpoint_format or packing_format in config.json"
        raise layer.wrong("qzeros", problem)
    return bool((values == middle).all())


def find_awq_weight(layer: Layer) -> QuantisedWeight | None:
    """A weight of AWQ in the layout `gemm`, which has 4 bits."""
    if "qweight" not in layer.tensors:
        return None
    scales = layer.require("scales", FLOATS)
    columns = layer.require("qweight", (torch.int32,)).shape[0]
    if len(scales.shape) != 2:
        raise layer.wrong("scales", "must have a row for each group")
    groups, rows = scales.shape
    check_groups(layer, "scales", columns, groups)
    layer.require("qweight", (torch.int32,), (columns, _words(rows, 4)))
    zeros = layer.find("qzeros")
    if zeros:
        layer.require("qzeros", (torch.int32,), (groups, _words(rows, 4)))
    values = converted("awq_values", (columns, rows), [layer.source("qweight")])
    return in_scheme(PackedWeight(
        layer=layer, names=layer.names(("qweight", "qzeros", "scales", *UNUSED)), bits=4, rows=rows, columns=columns,
        values=["permute", [1, 0], values],
        bytes_in_order=converted("awq_nibbles", (rows, columns // 2), [layer.source("qweight")]),
        scales=["permute", [1, 0], layer.source("scales")], scale_suffix="scales",
        zeros=["permute", [1, 0], converted("awq_values", (groups, rows), [layer.source("qzeros")])] if zeros else None,
        groups=None,
    ))  # fmt: skip


def _words(count: int, bits: int) -> int:
    """The number of int32 words that hold `count` values."""
    return -(-count * bits // WORD_BITS)


def _by_name(layer: Layer) -> dict[str, StoredTensor]:
    return {layer.name(suffix): stored for suffix, stored in layer.tensors.items()}


def _groups_out_of_order(layer: Layer, suffix: str, columns: int, groups: int, is_required: bool) -> Source | None:
    """The group of each column, None if the columns of each group are consecutive.

    is_required: whether several groups are an error if the tensor is missing. Raises ModelError for that, and for
    groups of different sizes.
    """
    if suffix not in layer.tensors and (groups == 1 or not is_required):
        return None
    stored = layer.require(suffix, (torch.int32, torch.int64), (columns,))
    of_column = read_tensor(stored).long()
    if bool((of_column == -1).all()):  # compressed-tensors stores it so if the order was not changed
        return None
    in_order = torch.arange(columns) * groups // columns
    if not torch.equal(of_column.sort().values, in_order):
        raise layer.wrong(suffix, f"must give {columns // groups} columns to each of {groups} groups")
    return None if torch.equal(of_column, in_order) else layer.source(suffix)
