"""Sampling in Triton kernels, without a sort: two launches for rows that only draw.

WEIGH sums the weights of each tile of a row, in integer units, and DRAW inverts the cumulative distribution: one
program per row finds the tile, and then the token in it. An earlier launch, CHANGE, applies biases, penalties and masks
to the rows that have any: it writes the changed logits in float32, and the largest rank of each tile.

Top-k and top-p need a limit: the rank of the last token that is kept, where a rank orders tokens by logit, and equal
logits by id. First the limit is bracketed. For a k of at most LISTED_K, the tokens are divided into 1,000 to 2,000
groups, and the k-th largest of the groups' maxima is a lower end with few tokens above it (GROUP, BOUND). For a larger
k, and for top-p, SEARCH counts the tokens at or above 32 pivots, or adds their weights in float32; a second SEARCH
divides the bracket, and MEASURE adds the exact units at or above each of its ends. Then COLLECT lists the tokens in the
bracket, the candidates, and SELECT finds the limit among them. If there are more than CAPACITY, or the approximate sums
were wrong, SELECT reads the whole row, which takes milliseconds. This happens with thousands of equal logits at the
limit, and with a top-p within 2e-5 of 1.

The batch's `Features` decide which launches are needed. In a launch, the kernel decides from a row's parameters whether
to process it. The constants do not depend on the batch, so each kernel is compiled once for a model.

Rejected: sorting (docs/performance-log.md), and one launch with a barrier between programs, which Triton lacks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tcdeploy.kernels.sampling.rows import MAX_LISTED_TOP_K, Features, SamplingRows
from tcdeploy.kernels.sampling.weights import unit_bits
from tcdeploy.torch_compat.triton.kernel import Kernel, next_power_of_2

MODULE, FILTERS = "tcdeploy.kernels.sampling.sample_kernels", "tcdeploy.kernels.sampling.filter_kernels"
SEARCH, MEASURE = Kernel(FILTERS, "_sample_search_kernel"), Kernel(FILTERS, "_sample_measure_kernel")
COLLECT = Kernel(FILTERS, "_sample_collect_kernel")
SELECT = Kernel("tcdeploy.kernels.sampling.limit_kernels", "_sample_select_kernel")
GROUP, BOUND = Kernel(FILTERS, "_sample_group_kernel"), Kernel(FILTERS, "_sample_bound_kernel")
CHANGE = Kernel(MODULE, "_sample_change_kernel")
WEIGH, DRAW = Kernel(MODULE, "_sample_weigh_kernel"), Kernel(MODULE, "_sample_draw_kernel")
TILE = 2048  # tokens that one program reads
BLOCK = 1024  # candidates that SELECT reads at once
LEVELS = 2
PIVOTS, MEASURES = 32, 4  # as in filter_kernels.py
SEARCH_TILE = 1024  # tokens that one warp of the search reads at once
TARGET_PROGRAMS = 16384  # per launch of the search: in a large batch each program reads several tiles
MAX_TILES = 8
CAPACITY = 4096  # candidates of a row
LISTED_K = MAX_LISTED_TOP_K
MIN_GROUPS = 1024  # groups of tokens whose maxima bound a small k
FEW = 256  # up to this number, each candidate is compared with all, COLUMNS of them at a time
COLUMNS = 32
# Weights must have the same bits on every device, so multiplications and additions are not contracted.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
SEARCH_OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}  # sums over one warp need no barrier


def sample(
    logits: Tensor, sampling: SamplingRows, rows: Tensor, positions: Tensor, features: Features, masks: Tensor | None,
    greedy: Tensor,
) -> Tensor:  # fmt: skip
    """As `sampling.sample` (engine/step/sampling.py); logits are contiguous."""
    size, vocab_size = logits.shape
    assert logits.is_contiguous()
    parts = -(-vocab_size // TILE)
    constants = (vocab_size, TILE, parts, next_power_of_2(parts))
    changed = torch.empty(0, dtype=torch.float32, device=logits.device)
    bests = torch.empty(size, parts, dtype=torch.int64, device=logits.device)
    if features.change_logits:
        changed = torch.empty(size, vocab_size, dtype=torch.float32, device=logits.device)
        _change(changed, bests, logits, sampling, rows, positions, features, masks)
    source = (logits, changed, bests)
    row_columns = (greedy, rows, sampling.changes_logits, sampling.temperature, sampling.top_k, sampling.top_p)
    has_changes, has_filters = int(features.change_logits), int(features.filters)
    limits = torch.empty(size, dtype=torch.int64, device=logits.device)
    for is_count, is_used in ((1, features.small_top_k or features.large_top_k), (0, features.wide_top_p)):
        if features.filters and is_used:
            _find_limits(limits, source, row_columns, features, constants, is_count)
    part_units = torch.empty(size, parts, dtype=torch.int64, device=logits.device)
    bits = unit_bits(vocab_size)
    WEIGH.launch(
        (parts, size), part_units, *source, limits, *row_columns, sampling.min_p, has_changes, has_filters,
        *constants, bits, **OPTIONS,
    )  # fmt: skip
    tokens = torch.empty(size, dtype=torch.int64, device=logits.device)
    DRAW.launch(
        (size,), tokens, part_units, *source, limits, greedy, rows, positions, *row_columns[2:], sampling.min_p,
        sampling.seeds, has_changes, has_filters, *constants, bits, **OPTIONS,
    )  # fmt: skip
    return tokens


def _change(
    changed: Tensor, bests: Tensor, logits: Tensor, sampling: SamplingRows, rows: Tensor, positions: Tensor,
    features: Features, masks: Tensor | None,
) -> None:  # fmt: skip
    (size, parts), vocab_size = bests.shape, logits.shape[1]
    words = torch.empty(0, dtype=torch.int32, device=logits.device) if masks is None else masks
    CHANGE.launch(
        (parts, size), changed, bests, logits, rows, positions, sampling.changes_logits,
        sampling.repetition, sampling.presence, sampling.frequency, sampling.output_counts, sampling.in_prompt,
        sampling.bias_ids, sampling.bias_values, sampling.bias_ends, words,
        int(features.penalties), int(features.biases), int(masks is not None),
        vocab_size, TILE, parts, sampling.bias_ids.shape[1], -(-vocab_size // 32), **OPTIONS,
    )  # fmt: skip


def _find_limits(
    limits: Tensor, source: tuple[Tensor, ...], row_columns: tuple[Tensor, ...], features: Features,
    constants: tuple[int, ...], is_count: int,
) -> None:  # fmt: skip
    """Write the rank of the last token that top-k (`is_count`) or top-p keeps, of rows to which the filter applies."""
    size, device, (vocab_size, _, parts, parts_padded) = len(limits), limits.device, constants
    bits, num_sums = unit_bits(vocab_size), size * LEVELS * PIVOTS
    has_small_k, has_search = is_count and features.small_top_k, not is_count or features.large_top_k
    zeros = torch.zeros(num_sums // 2 + size * MEASURES, dtype=torch.int64, device=device)
    sums, measures = zeros[: num_sums // 2].view(torch.float32), zeros[num_sums // 2 :]
    bounds = torch.empty(size, LEVELS + 1, 2, dtype=torch.float32, device=device)
    candidates = torch.empty(size, CAPACITY, dtype=torch.int64, device=device)
    inputs: tuple[Tensor | int, ...] = (limits, *source, *row_columns, int(features.change_logits), is_count)
    tiles = _tiles_per_program(size, vocab_size)
    grid = (-(-vocab_size // (tiles * SEARCH_TILE)), size)
    search_constants = (tiles, vocab_size, SEARCH_TILE, parts, parts_padded)
    if has_small_k:
        _bound_small_k(bounds, inputs[1:-1], constants)
    if has_search:
        for level in range(LEVELS):
            SEARCH.launch(grid, sums, bounds, *inputs, level, *search_constants, LEVELS, LISTED_K, **SEARCH_OPTIONS)
        MEASURE.launch(
            grid, measures, sums, bounds, *inputs, *search_constants, bits, LEVELS, LISTED_K, **SEARCH_OPTIONS
        )
    COLLECT.launch(
        (parts, size), candidates, measures, bounds, *inputs, *constants, LEVELS, LISTED_K, CAPACITY, **OPTIONS
    )
    SELECT.launch(
        (size,), limits, candidates, measures, bounds, *inputs[1:], vocab_size, BLOCK, parts, parts_padded, bits,
        LEVELS, LISTED_K, CAPACITY, FEW, COLUMNS, vocab_size.bit_length(), **OPTIONS,
    )  # fmt: skip


def _bound_small_k(bounds: Tensor, inputs: tuple[Tensor | int, ...], constants: tuple[int, ...]) -> None:
    """Write to `bounds` the bracket of each row with a k of at most LISTED_K."""
    size, device, (vocab_size, _, parts, parts_padded) = len(bounds), bounds.device, constants
    group = 1 << max(0, (vocab_size // MIN_GROUPS).bit_length() - 1)
    groups = -(-vocab_size // group)
    group_maxima = torch.empty(size, groups, dtype=torch.float32, device=device)
    GROUP.launch((parts, size), group_maxima, *inputs, *constants, LISTED_K, group, groups, **OPTIONS)
    BOUND.launch(
        (size,), bounds, group_maxima, *inputs, vocab_size, parts, parts_padded, LEVELS, LISTED_K, groups,
        next_power_of_2(groups), **OPTIONS,
    )  # fmt: skip


def _tiles_per_program(size: int, vocab_size: int) -> int:
    """Tiles that a program of the search reads: one in a small batch, to use all multiprocessors."""
    return max(1, min(MAX_TILES, size * vocab_size // (SEARCH_TILE * TARGET_PROGRAMS)))
