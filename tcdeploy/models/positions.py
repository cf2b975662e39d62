"""Detects models that compute token positions themselves, by tracing one forward pass on fake tensors.

A prefill row packs several sequences and a decode step holds one token of each, so only `position_ids` has the right
positions. A model that counts tokens (`torch.arange(seq_len)`, a cumulative sum over a mask, the first rows of a table)
would generate wrong tokens without an error. So each tensor carries a set of origins, which operations propagate.

    DATA    token ids, and what is computed from them with the weights: hidden states, router logits
    GIVEN   position_ids, and rotary tables computed from them
    COUNT   positions that the model counts itself
    MIXED   floating-point data that was combined with COUNT: the model uses its own positions

A model is rejected if its logits or tensors passed to attention contain COUNT or MIXED. Three rules avoid false
positives, such as the counts by which a mixture of experts sorts tokens:

- Only a count of the row's length is COUNT, and that length is a prime that no model dimension equals.
- The result of a comparison has no origins.
- Indexing into data ignores the index's origins, since it moves data unchanged. Indexing into weights keeps them.

Not detected: positions that reach data only through comparisons or Python numbers, and operations other than attention
that combine neighbouring tokens, such as a convolution.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

DATA, GIVEN, COUNT, MIXED = 1, 2, 4, 8  # flags of a set of origins
RANGES = {"arange", "range", "linspace"}
WITHOUT_ORIGIN = {
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
    "new_zeros", "new_ones", "new_empty", "new_empty_strided", "new_full",
}  # fmt: skip
LOOKUPS = {  # operation: argument with the index
    "index": 1, "_unsafe_index": 1, "embedding": 1, "take": 1, "index_select": 2, "gather": 2,
}  # fmt: skip
WRITES = {
    "index_put": 1, "_unsafe_index_put": 1, "index_add": 2, "index_copy": 2, "index_fill": 2, "scatter": 2,
    "scatter_add": 2, "scatter_reduce": 2,
}  # fmt: skip


class PositionTracer:
    """Records the origins of each tensor of one forward pass over a row of `row_length` tokens.

    `record` is the observer of torch_compat/dynamo/dispatch_mode.py. Tensors without origins are weights and constants.
    """

    def __init__(self, row_length: int) -> None:
        self.row_length = row_length
        self.counts_tokens = False  # whether a tensor passed to `check` holds the model's own positions
        self._origins: dict[int, int] = {}  # by id of the tensor
        self._written: dict[int, int] = {}  # by id of the storage: what in-place operations wrote to it
        self._keep_alive: list[object] = []  # so that no id is reused

    def start(self, input_ids: Tensor, position_ids: Tensor) -> None:
        """Set the inputs of the forward pass, each [1, row_length]."""
        self._set(input_ids, DATA)
        self._set(position_ids, GIVEN)

    def check(self, *tensors: Tensor) -> None:
        """Note whether any of them depends on positions that the model counted."""
        self.counts_tokens |= any(self._get(tensor) & (COUNT | MIXED) for tensor in tensors)

    def copy_origins(self, result: Tensor, *operands: Tensor) -> None:
        """Treat `result` as computed from the operands."""
        self._set(result, _combine([self._get(tensor) for tensor in operands], result))

    def record(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        results = list(_tensors(result))
        if not results:
            return
        in_place = name.endswith("_")
        name = name.rstrip("_") if in_place else name
        for tensor in results:
            self._set(tensor, self._origins_of_result(name, args, kwargs, tensor))
        if in_place and isinstance(args[0], Tensor):
            storage = args[0].untyped_storage()
            self._keep_alive.append(storage)
            self._written[id(storage)] = self._written.get(id(storage), 0) | self._origins[id(results[0])]

    def _origins_of_result(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> int:
        if result.dtype == torch.bool or name in WITHOUT_ORIGIN:
            return 0
        if name in RANGES:
            return COUNT if result.numel() == self.row_length else 0
        if name == "cumsum" and self._counts_tokens(args, kwargs):
            return COUNT
        if name == "slice" and self._takes_first_rows(args, kwargs, result):
            return COUNT
        if name in LOOKUPS or name in WRITES:
            return self._origins_of_indexing(name, args, kwargs, result)
        return _combine([self._get(tensor) for tensor in _tensors((args, kwargs))], result)

    def _origins_of_indexing(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> int:
        number = LOOKUPS.get(name) or WRITES[name]
        operands = [self._get(tensor) for tensor in _tensors((args[:number], args[number + 1 :], kwargs))]
        moved = _combine(operands, result)
        if name in WRITES or moved & DATA:
            return moved
        index = [self._get(tensor) for tensor in _tensors(args[number : number + 1])]
        return _combine([moved, *index], result)

    def _counts_tokens(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a cumulative sum runs along the row over values other than hidden states."""
        values, dim = args[0], _dim(args, kwargs)
        is_hidden_state = values.is_floating_point() and self._get(values) & DATA
        return values.ndim > 0 and values.shape[dim] == self.row_length and not is_hidden_state

    def _takes_first_rows(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> bool:
        """Whether a table of weights or constants is cut to the length of the row."""
        table, dim = args[0], _dim(args, kwargs)
        is_cut = result.shape[dim] == self.row_length != table.shape[dim]
        return is_cut and not self._get(table) & (DATA | GIVEN)

    def _get(self, tensor: Tensor) -> int:
        origins = self._origins.get(id(tensor), 0)
        return origins | self._written.get(id(tensor.untyped_storage()), 0) if self._written else origins

    def _set(self, tensor: Tensor, origins: int) -> None:
        self._keep_alive.append(tensor)
        self._origins[id(tensor)] = origins


def _combine(operands: list[int], result: Tensor) -> int:
    """The union. Floating-point data combined with counts is MIXED."""
    origins = functools.reduce(operator.or_, operands, 0)
    if origins & COUNT and origins & DATA and result.is_floating_point():
        return (origins & ~COUNT) | MIXED
    return origins


def _dim(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[1] if len(args) > 1 else kwargs.get("dim", 0)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
