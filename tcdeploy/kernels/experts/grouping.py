"""Groups the (token, slot) pairs of a step by expert, in blocks for the kernels. Does not import Triton.

A *pair* is token * top_k + slot. The groups are one int32 tensor with four tables, which `tables` separates:

    order   [pairs]   the pairs, sorted by expert
    expert  [blocks]  the expert of each block
    first   [blocks]  the index in `order` of the block's first pair
    stop    [blocks]  the index in `order` after the last pair of the block's expert

A block has up to `rows` pairs: order[first : min(first + rows, stop)]. Blocks of one expert are consecutive. How many
blocks there are depends on the routing, which the host does not know when it launches a kernel, so the tables have the
largest possible length and the other blocks are empty: first == stop.

The pairs of a decode batch are grouped by one program, which sorts them (`_group_pairs_kernel`). More pairs are grouped
by one program per expert, which searches all pairs for its own (`_group_many_pairs_kernel`). Both are one launch. The
reference, `sort_pairs`, is torch.sort and 14 other operations, which take longer than the products of a few tokens.

Rejected: a padded order, in which each block has its own `rows` entries. With 8 rows and one pair to an expert, it is
8 times as long, and every program would read it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tcdeploy.kernels.experts.tiles import GEMV_PAIRS, MIN_BLOCK_ROWS, block_rows
from tcdeploy.torch_compat.inductor.pdl import supports_pdl
from tcdeploy.torch_compat.triton.kernel import Kernel, next_power_of_2

GROUP_PAIRS = Kernel("tcdeploy.kernels.experts.experts_kernel", "_group_pairs_kernel")
GROUP_MANY_PAIRS = Kernel("tcdeploy.kernels.experts.experts_kernel", "_group_many_pairs_kernel")
MAX_SORTED_PAIRS, MAX_SORTED_EXPERTS = 1024, 512  # of `_group_pairs_kernel`, whose one program holds all of them
MIN_KERNEL_SIZE = 32  # of its tensors: one element for each thread of a warp
CHUNK, ENTRIES = 2048, 64  # pairs and blocks per loop step of `_group_many_pairs_kernel`
GROUPING_WARPS, MANY_WARPS = 4, 8


class GroupTables(NamedTuple):
    """The parts of the tensor of groups, all int32; see the module's docstring."""

    order: Tensor  # [pairs]
    expert: Tensor  # [blocks]
    first: Tensor  # [blocks]
    stop: Tensor  # [blocks]


def table_length(pairs: int, num_experts: int) -> int:
    """The length of each table of blocks: no routing makes more blocks. `pairs` may be symbolic."""
    return pairs // MIN_BLOCK_ROWS + num_experts


def groups_length(pairs: int, num_experts: int) -> int:
    """Elements of the tensor of groups. Does not depend on the rows of a block, so it adds no guard to a program."""
    return pairs + 3 * table_length(pairs, num_experts)


def max_blocks(pairs: int, num_experts: int, rows: int) -> int:
    """The number of entries, from the first, that may hold blocks.

    The worst routing gives each expert one pair, and all further pairs to one expert, as whole blocks.
    `_group_many_pairs_kernel` may also leave an empty block after those of each expert.
    """
    experts = min(pairs, num_experts)
    return num_experts + pairs // rows if is_multi_program(pairs, num_experts) else experts + (pairs - experts) // rows


def tables(groups: Tensor, pairs: int, num_experts: int) -> GroupTables:
    length = table_length(pairs, num_experts)
    return GroupTables(*groups.split([pairs, length, length, length]))


def is_multi_program(pairs: int, num_experts: int) -> bool:
    """Whether `_group_many_pairs_kernel` groups the pairs."""
    return pairs > MAX_SORTED_PAIRS or num_experts > MAX_SORTED_EXPERTS


def group_by_expert(expert_ids: Tensor, num_experts: int) -> Tensor:
    """The groups, in blocks of block_rows(pairs, num_experts).

    On a GPU the groups of up to GEMV_PAIRS pairs are not written, because the GEMV does not read them.
    """
    pairs = expert_ids.numel()
    rows = block_rows(pairs, num_experts)
    if not expert_ids.is_cuda:
        return sort_pairs(expert_ids, num_experts, rows)
    if pairs <= GEMV_PAIRS:
        return expert_ids.new_empty(groups_length(pairs, num_experts), dtype=torch.int32)
    return launch_grouping(expert_ids, num_experts, rows)


def launch_grouping(expert_ids: Tensor, num_experts: int, rows: int) -> Tensor:
    """The groups, written by a kernel. Entries of the tables of blocks after max_blocks(...) are undefined."""
    pairs, use_pdl = expert_ids.numel(), supports_pdl(expert_ids.device)
    assert expert_ids.is_contiguous()
    groups = expert_ids.new_empty(groups_length(pairs, num_experts), dtype=torch.int32)
    blocks, pdl_options = table_length(pairs, num_experts), {"launch_pdl": True} if use_pdl else {}
    if is_multi_program(pairs, num_experts):
        GROUP_MANY_PAIRS.launch(
            (num_experts,), groups, expert_ids, pairs, blocks, CHUNK, ENTRIES, rows, use_pdl,
            num_warps=MANY_WARPS, **pdl_options,
        )  # fmt: skip
        return groups
    sizes = [max(next_power_of_2(size), MIN_KERNEL_SIZE) for size in (pairs, num_experts, blocks)]
    GROUP_PAIRS.launch(
        (1,), groups, expert_ids, pairs, blocks, *sizes, rows, use_pdl, num_warps=GROUPING_WARPS, **pdl_options
    )
    return groups


def sort_pairs(expert_ids: Tensor, num_experts: int, rows: int) -> Tensor:
    """The groups in plain torch: empty blocks are last."""
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
