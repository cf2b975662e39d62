"""Finds the weights that GGUF files store in another form than transformers expects.

These are blocks of quantised values, stacked experts, and permuted rows of q and k. Blocks are rows of bytes
(weights/gguf_values.py). Two types of blocks become a scheme, so such weights stay quantised in device memory:

    Q8_0  int8 with groups of 32 columns; the scales become float32
    Q4_0  int4 with groups of 32 columns and scales in float16; the nibbles are put in the order of columns

Weights of all other types are dequantised. A thread converts the rows of a weight in pieces, because an embedding of
128,256 rows would take 2 GB in float32.

In the architecture `llama`, the rows of the two halves of a head of q or k alternate: row 2i is row i of the first
half, and row 2i + 1 is row i of the second. They are reordered as bytes, before they are converted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from tcdeploy.models.formats.quantised_weight import Layer, QuantisedWeight, converted
from tcdeploy.models.weights.gguf_file import TYPES_BY_NAME
from tcdeploy.models.weights.gguf_names import FAMILIES
from tcdeploy.models.weights.reader import StoredTensor
from tcdeploy.models.weights.sources import Source, WeightSource
from tcdeploy.planning.dtypes import dtype_name
from tcdeploy.planning.schemes import int4_scheme_name

GROUP = 32  # columns of a block of Q8_0 and Q4_0
PIECE_ELEMENTS = 2 << 20  # 16 << 20 took 1.4 times the CPU time, because new memory is mapped for each piece
SCHEMES_BY_TYPE = {"Q8_0": "int8", "Q4_0": int4_scheme_name("float16", zeros=False, permuted=False)}
# The names of an expert's projections in checkpoints of Mixtral, and in all others, by the name of the stack
EXPERT_PARTS = {"gate_exps": ("w1", "gate_proj"), "up_exps": ("w3", "up_proj"), "down_exps": ("w2", "down_proj")}
GATE_UP = "gate_up_exps"  # a stack of gate and up
EXPERTS = ".experts"  # the end of the path of stacked experts
Settings = Mapping[str, Any]


def find_gguf_weights(settings: Settings, layer: Layer) -> dict[str, QuantisedWeight]:
    """The tensors of a layer that are stored in another form. Raises ModelError for impossible shapes.

    settings: as gguf_config.py makes them.
    """
    family = FAMILIES[settings["architecture"]]
    if layer.path.endswith(EXPERTS):
        return _interleaved_experts(layer) if family.has_interleaved_experts else _experts(layer)
    heads = settings["heads"].get(layer.path.rpartition(".")[2], 0) if family.has_permuted_heads else 0
    weights: dict[str, QuantisedWeight] = {}
    for suffix, stored in layer.tensors.items():
        if family.norm_offset and layer.path.endswith("norm") and suffix == "weight":
            dense = converted("reduced", stored.shape, [layer.source(suffix)], family.norm_offset)
            weights[suffix] = QuantisedWeight((layer.name(suffix),), stored.shape, dense)
        elif layer.path.endswith("shared_expert_gate") and len(stored.shape) == 1 and not stored.block_type:
            shape = (1, *stored.shape)
            weights[suffix] = QuantisedWeight((layer.name(suffix),), shape, ["reshape", [*shape], layer.source(suffix)])
        elif stored.block_type or heads:
            weights[suffix] = _matrix(layer, suffix, stored, heads)
    return weights


def _matrix(layer: Layer, suffix: str, stored: StoredTensor, heads: int) -> QuantisedWeight:
    """A weight [rows, columns], or a bias [rows] of permuted heads."""
    if len(stored.shape) > 2 or (len(stored.shape) < 2 and stored.block_type):
        raise layer.wrong(suffix, "must have rows and columns")
    count = stored.shape[0]
    if heads and count % (2 * heads):
        raise layer.wrong(suffix, f"must have the rows of {heads} heads")
    return _Rows(layer.name(suffix), stored, 0, count, count // heads if heads else 0).weight()


def _experts(layer: Layer) -> dict[str, QuantisedWeight]:
    """The weights of single experts, which transformers stacks again."""
    is_mixtral = "block_sparse_moe" in layer.path
    return {
        f"{number}.{EXPERT_PARTS[part][0 if is_mixtral else 1]}.weight": stack.expert(number).weight()
        for part, stack in _stacks(layer).items()
        for number in range(stack.experts)
    }


def _interleaved_experts(layer: Layer) -> dict[str, QuantisedWeight]:
    """The experts of gpt-oss. Gate and up are one tensor [experts, inputs, 2 * rows] with alternating columns."""
    stacks, weights = _stacks(layer), dict[str, QuantisedWeight]()
    for name, parts in (("gate_up_proj", ("gate_exps", "up_exps")), ("down_proj", ("down_exps",))):
        each = [stacks[part] for part in parts]
        experts, rows, columns = each[0].experts, len(parts) * each[0].rows, each[0].expert(0).columns
        if any((stack.experts, stack.rows) != (experts, each[0].rows) for stack in each):
            raise layer.wrong(parts[-1], f"must have the shape of {parts[0]}")
        by_expert: list[Source] = []
        for number in range(experts):
            alternating: Source = ["stack", 1, [stack.expert(number).values() for stack in each]]
            by_expert.append(["permute", [0, 2, 1], ["reshape", [1, rows, columns], alternating]])
        names = tuple(dict.fromkeys(stack.name for stack in each))
        reason = f"{each[0].expert(0).reason} for experts of gpt-oss" if each[0].stored.block_type else ""
        weights[name] = QuantisedWeight(names, (experts, columns, rows), ["cat", 0, by_expert], reason=reason)
        biases = [stack.bias for stack in each]
        if all(biases):
            names = tuple(dict.fromkeys(f"{stack.name}_bias" for stack in each))
            source: Source = ["reshape", [experts, rows], ["stack", 2, biases]]
            weights[f"{name}_bias"] = QuantisedWeight(names, (experts, rows), source)
    return weights


class _Stack(NamedTuple):
    """A projection of all experts of a layer. An expert has `stride` rows, of which `rows` from `offset` on are used.

    bias: the source of the biases [experts, rows], or an empty list.
    """

    name: str
    stored: StoredTensor
    rows: int
    stride: int
    offset: int
    bias: Source

    @property
    def experts(self) -> int:
        return self.stored.shape[0]

    def expert(self, number: int) -> _Rows:
        return _Rows(self.name, self.stored, number * self.stride + self.offset, self.rows, 0)


def _stacks(layer: Layer) -> dict[str, _Stack]:
    """The stacks, by all keys of EXPERT_PARTS. Gate and up may be one tensor, with gate's rows first in each expert.

    Raises ModelError for a part that is missing or in two tensors, and for impossible shapes.
    """
    stacks: dict[str, _Stack] = {}
    for suffix, stored in layer.tensors.items():
        if suffix.endswith("_bias"):
            continue
        if len(stored.shape) != 3 or (suffix == GATE_UP and stored.shape[1] % 2):
            raise layer.wrong(suffix, "must be the weights [experts, rows, columns] of a layer")
        parts = ("gate_exps", "up_exps") if suffix == GATE_UP else (suffix,)
        stride, rows = stored.shape[1], stored.shape[1] // len(parts)
        for index, part in enumerate(parts):
            if part in stacks:
                raise layer.wrong(suffix, f"must not be there beside {stacks[part].name}")
            bias = _bias(layer, suffix, stored.shape[:2])
            if bias and suffix == GATE_UP:
                bias = ["slice", 1, index * rows, (index + 1) * rows, bias]
            stacks[part] = _Stack(layer.name(suffix), stored, rows, stride, index * rows, bias)
    for part in EXPERT_PARTS:
        if part not in stacks:
            layer.require(part, ())
    return stacks


def _bias(layer: Layer, suffix: str, shape: tuple[int, ...]) -> Source:
    """The biases of a stack: empty if there are none. shape: [experts, rows]."""
    stored = layer.tensors.get(f"{suffix}_bias")
    if stored is None:
        return []
    if stored.shape != shape:
        raise layer.wrong(f"{suffix}_bias", f"must have the shape {[*shape]}")
    return layer.source(f"{suffix}_bias")


class _Rows(NamedTuple):
    """Rows of a stored tensor whose dimensions before the last are flattened. head_rows: of a head, 0: not permuted."""

    name: str
    stored: StoredTensor
    first: int
    num_rows: int
    head_rows: int

    @property
    def columns(self) -> int:
        if len(self.stored.shape) == 1:
            return 1
        kind = TYPES_BY_NAME.get(self.stored.block_type)
        return self.stored.shape[-1] // kind.num_bytes * kind.columns if kind else self.stored.shape[-1]

    @property
    def reason(self) -> str:
        """Why the dense weight is computed; "" if the file stores it."""
        return f"{self.stored.block_type} of GGUF has no kernel" if self.stored.block_type else ""

    def weight(self) -> QuantisedWeight:
        shape = (self.num_rows,) if len(self.stored.shape) == 1 else (self.num_rows, self.columns)
        names, scheme = (self.name,), SCHEMES_BY_TYPE.get(self.stored.block_type)
        if scheme is None:
            return QuantisedWeight(names, shape, self.values(), reason=self.reason)
        return QuantisedWeight(names, shape, self.values(), scheme, self._scheme_tensors())

    def values(self) -> Source:
        """The dense weight, in pieces that fit into the memory of a thread."""
        block_type, row_shape = self.stored.block_type, self.stored.shape[1:][-1:]
        pieces: list[Source] = []
        for piece in self._pieces():
            source = piece._viewed(dtype_name(self.stored.dtype), row_shape)
            if block_type:
                source = converted("gguf_values", (piece.num_rows, self.columns), [source], block_type)
            pieces.append(source)
        return _joined(pieces)

    def _scheme_tensors(self) -> tuple[WeightSource, WeightSource]:
        """The codes and the scales. A block begins with its scale."""
        blocks, num_bytes = self.columns // GROUP, TYPES_BY_NAME[self.stored.block_type].num_bytes
        is_int8 = self.stored.block_type == "Q8_0"
        dtypes = ("int8", "float32") if is_int8 else ("uint8", "float16")
        row_codes = self.columns if is_int8 else self.columns // 2
        codes: list[Source] = []
        scales: list[Source] = []
        for piece in self._pieces():
            if is_int8:
                values: Source = ["slice", 2, 2, num_bytes, piece._viewed("int8", (blocks, num_bytes))]
                codes.append(["reshape", [piece.num_rows, row_codes], values])
            else:
                rows = piece._viewed("uint8", (blocks * num_bytes,))
                codes.append(converted("q4_0_nibbles", (piece.num_rows, row_codes), [rows]))
            scale: Source = ["slice", 2, 0, 1, piece._viewed("float16", (blocks, num_bytes // 2))]
            scales.append(["reshape", [piece.num_rows, blocks], scale])
        shapes = ((self.num_rows, row_codes), (self.num_rows, blocks))
        sources = (_joined(codes), _joined(scales))
        first, second = (WeightSource(*item) for item in zip(dtypes, shapes, sources, strict=True))
        return first, second

    def _pieces(self) -> list[_Rows]:
        unit = self.head_rows or 1
        size = max(1, PIECE_ELEMENTS // (unit * self.columns)) * unit
        begins = range(0, self.num_rows, size)
        return [self._replace(first=self.first + begin, num_rows=min(size, self.num_rows - begin)) for begin in begins]

    def _viewed(self, dtype: str, row_shape: tuple[int, ...]) -> Source:
        """The rows, viewed as a dtype and with this shape each. Permuted rows of heads are put in their usual order."""
        total = math.prod(self.stored.shape[:-1]) if len(self.stored.shape) > 1 else self.stored.shape[0]
        source: Source = ["view", dtype, [total, *row_shape], self.name]
        if self.num_rows < total:
            source = ["slice", 0, self.first, self.first + self.num_rows, source]
        if not self.head_rows:
            return source
        shape = [self.num_rows // self.head_rows, self.head_rows // 2, 2, *row_shape]
        order = [0, 2, 1, *range(3, len(shape))]
        return ["reshape", [self.num_rows, *row_shape], ["permute", order, ["reshape", shape, source]]]


def _joined(pieces: list[Source]) -> Source:
    return pieces[0] if len(pieces) == 1 else ["cat", 0, pieces]
