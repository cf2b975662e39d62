"""Ends a step on the device: takes the argmax of each row and writes the next step's inputs.

The next step is launched before the host has read any token, so the step itself writes token id, position and length
of each decode row into static tensors. The last row is the padding row. A row of length 0 (padding, or a chunk that
does not end its prompt) changes no decode row.

There are two equivalent backends: `reference` is plain torch, `triton` is in advance_triton.py.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tcdeploy.kernels.sampling import advance_triton


def advance(
    logits: Tensor, rows: Tensor, lengths: Tensor, token_ids: Tensor, positions: Tensor, seq_lens: Tensor,
    backend: Literal["reference", "triton"],
) -> Tensor:  # fmt: skip
    """The greedy token of each row of logits [n, vocab], as [n] int64: the lowest id among equal logits.

    The decode rows are token_ids and positions [max batch + 1] int64 and seq_lens [max batch + 1] int32. If lengths[i]
    ([n] int32) is not 0, then for r = rows[i]: token_ids[r] = token, positions[r] = lengths[i], seq_lens[r] =
    lengths[i] + 1. Such rows must be distinct. Rows of length 0 change nothing, whatever rows[i] is. `lengths` may be a
    view of `seq_lens` if rows[i] is i. No host synchronisation; can be captured once it has run.
    """
    if backend == "triton":
        return advance_triton.advance(logits, rows, lengths, token_ids, positions, seq_lens)
    tokens = logits.argmax(dim=-1)
    is_live = lengths > 0
    targets = torch.where(is_live, rows, token_ids.shape[0] - 1)
    updates = [(token_ids, tokens), (positions, lengths.long()), (seq_lens, lengths + 1)]
    for column, values in updates:  # all values are computed by now, because lengths may be a view of seq_lens
        column[targets] = torch.where(is_live, values, column[-1])  # the padding row keeps its value
    return tokens
