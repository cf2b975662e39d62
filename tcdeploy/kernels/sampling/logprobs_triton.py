"""Log-probabilities in Triton kernels: three launches, for any number of alternatives.

The first finds the largest logit of each tile (`advance_triton.ARGMAX`). The second sums each tile's weights in integer
units relative to the row's largest logit, and lists the tile's k best tokens. The third adds the units, merges the
lists and takes the logarithm. As in sampling, the results have the same bits on a CPU and on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tcdeploy.kernels.sampling.advance_triton import ARGMAX, MAX_TOKEN_ID, WARPS
from tcdeploy.kernels.sampling.reference import Logprobs
from tcdeploy.kernels.sampling.sample_triton import OPTIONS, TILE
from tcdeploy.kernels.sampling.weights import unit_bits
from tcdeploy.torch_compat.triton.kernel import Kernel, next_power_of_2

MODULE = "tcdeploy.kernels.sampling.logprob_kernels"
LIST, MERGE = Kernel(MODULE, "_logprob_list_kernel"), Kernel(MODULE, "_logprob_merge_kernel")
MAX_LISTED = 32  # alternatives of a row; a power of two


def logprobs(logits: Tensor, tokens: Tensor, k: int) -> Logprobs:
    """As `sampling.logprobs` (engine/step/sampling.py); logits are contiguous, and k is at most MAX_LISTED."""
    (size, vocab_size), device = logits.shape, logits.device
    assert logits.is_contiguous() and k <= MAX_LISTED
    parts = -(-vocab_size // TILE)
    bests = torch.empty(size, parts, dtype=torch.int64, device=device)
    ARGMAX.launch((parts, size), bests, logits, vocab_size, 1, parts, TILE, MAX_TOKEN_ID, num_warps=WARPS)
    units = torch.empty(size, parts, dtype=torch.int64, device=device)
    listed = torch.empty(size, parts, max(k, 1), dtype=torch.int64, device=device)
    constants, bits = (vocab_size, TILE, parts, next_power_of_2(parts)), unit_bits(vocab_size)
    LIST.launch((parts, size), units, listed, logits, bests, k, *constants, bits, **OPTIONS)
    chosen = torch.empty(size, dtype=torch.float32, device=device)
    top_ids = torch.empty(size, k, dtype=torch.int64, device=device)
    top_logprobs = torch.empty(size, k, dtype=torch.float32, device=device)
    MERGE.launch(
        (size,), chosen, top_ids, top_logprobs, units, listed, logits, bests, tokens, k, *constants, bits, MAX_LISTED,
        **OPTIONS,
    )  # fmt: skip
    return Logprobs(chosen, top_ids, top_logprobs)
