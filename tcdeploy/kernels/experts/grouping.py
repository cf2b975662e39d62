"""Which (token, slot) pairs belong to which expert, in blocks for the kernels. Does not import Triton.

A *pair* is token * top_k + slot. `group_pairs` writes one int32 tensor with four tables, which `tables` separates:

    order   [pairs]   the pairs, sorted by expert
    expert  [blocks]  of each block
    first   [blocks]  where the block's pairs begin in `order`
    stop    [blocks]  where the pairs of its expert end in `order`

A block has up to `rows` pairs: order[first : min(first + rows, stop)]. Blocks of one expert are consecutive. How many
blocks there are depends on the routing, which the host does not know when it launches a kernel, so the tables have the
largest possible length and the unused blocks at the end are empty: first == stop.

Rejected: a padded order, in which each block has its own `rows` entries. With 16 rows and one pair to an expert, it is
16 times as long, and every program would read it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MIN_BLOCK_ROWS = 16


class GroupTables(NamedTuple):
    """The parts of the tensor of groups, all int32; see the module's docstring."""

    order: Tensor  # [pairs]
    expert: Tensor  # [blocks]
    first: Tensor  # [blocks]
    stop: Tensor  # [blocks]


def table_length(pairs: int, num_experts: int) -> int:
    """Entries of each table of blocks. No routing makes more blocks. `pairs` may be symbolic."""
    return pairs // MIN_BLOCK_ROWS + num_experts


def groups_length(pairs: int, num_experts: int) -> int:
    """Elements of the tensor of groups. Does not depend on the rows of a block, so it adds no guard to a program."""
    return pairs + 3 * table_length(pairs, num_experts)


def most_blocks(pairs: int, num_experts: int, rows: int) -> int:
    """How many blocks the worst routing makes: one pair for every expert, and the others as whole blocks of one."""
    experts = min(pairs, num_experts)
    return experts + (pairs - experts) // rows


def tables(groups: Tensor, pairs: int, num_experts: int) -> GroupTables:
    length = table_length(pairs, num_experts)
    return GroupTables(*groups.split([pairs, length, length, length]))


def sort_pairs(expert_ids: Tensor, num_experts: int, rows: int) -> Tensor:
    """The groups for blocks of `rows` pairs, in plain torch. Copies nothing to the host, so graphs can capture it."""
    ids, pairs = expert_ids.flatten(), expert_ids.numel()
    sorted_ids, order = ids.sort(stable=True)
    experts = torch.arange(num_experts, device=ids.device)
    starts = torch.searchsorted(sorted_ids, experts)
    stops = torch.searchsorted(sorted_ids, experts, right=True)
    ends = ((stops - starts + rows - 1) // rows).cumsum(0)  # of the blocks of each expert
    blocks = torch.arange(table_length(pairs, num_experts), device=ids.device)
    expert = torch.searchsorted(ends, blocks, right=True).clamp(max=num_experts - 1)
    blocks_to_end = ends[expert] - blocks  # 1 for an expert's last block; 0 or less for unused blocks
    blocks_of = (stops - starts + rows - 1) // rows
    stop = stops[expert]
    first = torch.where(blocks_to_end > 0, starts[expert] + (blocks_of[expert] - blocks_to_end) * rows, stop)
    return torch.cat([order, expert, first, stop]).int()
