"""Chooses the experts of each token: the largest scores of a row and their softmax, in one launch.

torch.topk is two kernels, and the softmax before it and the normalisation after it are two more. Each of them takes
longer than reading a row. Here one warp holds a row in registers and takes its maximum `top_k` times. Further warps do
the same, and each prefetches a share of the chosen experts' weights while memory is idle: router and experts of a layer
of Qwen3 30B-A3B in FP8 take 16.7 instead of 17.3 us (H200).

Softmax does not change the order, so columns are chosen by their logits. Chosen probabilities divided by their sum are
the softmax of the chosen logits, which is what gpt-oss computes.

Order: NaN is larger than all numbers, as for torch.topk. Of equal scores, that of the lower column is first; torch does
not define which it returns. Probabilities may be equal where logits differ, so torch may choose other columns whose
probabilities are equal in float32. The chosen columns of a row always differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tcdeploy.torch_compat.inductor.pdl import supports_pdl
from tcdeploy.torch_compat.triton.kernel import Kernel, next_power_of_2

TOP_K = Kernel("tcdeploy.kernels.experts.routing_kernel", "_top_k_kernel")
SOFTMAX_KINDS = ("none", "all", "selected")
MAX_COLUMNS = 1024  # a thread holds 32 of them
MAX_TOP_K = 32  # unrolled steps
# Programs per row if they prefetch weights, and the bytes that one of them prefetches of each half of an expert.
PREFETCH_PROGRAMS, PROGRAM_BYTES = 64, 4096
MIN_KERNEL_SIZE = 32  # of the kernel's tensors: one element for each thread of a warp
# By name, since ops cannot take a dtype (custom_op.py).
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def is_supported(columns: int, top_k: int, dtype: torch.dtype) -> bool:
    """Whether the kernel takes rows of this many scores in this dtype."""
    return 0 < top_k <= min(columns, MAX_TOP_K) and columns <= MAX_COLUMNS and dtype in DTYPES.values()


def adjacent_columns(scores: Tensor) -> Tensor:
    """The scores themselves, or a copy, in which the columns of a row are adjacent. A single column has any stride."""
    return scores if scores.shape[1] == 1 or scores.stride(1) == 1 else scores.contiguous()


def launch_top_k(
    scores: Tensor, top_k: int, softmax: str, dtype: torch.dtype, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`top_k` of ops.py by the kernel."""
    rows, columns = scores.shape
    assert softmax in SOFTMAX_KINDS and is_supported(columns, top_k, scores.dtype)
    assert columns == 1 or scores.stride(1) == 1
    values = scores.new_empty(rows, top_k, dtype=dtype)
    indices = scores.new_empty(rows, top_k, dtype=torch.int64)
    use_pdl = supports_pdl(scores.device)
    sizes = [max(next_power_of_2(size), MIN_KERNEL_SIZE) for size in (columns, top_k)]
    programs, expert_size = 1, 0
    if weights is not None:
        assert len(weights) == columns and weights.is_contiguous()
        expert_size = weights.stride(0)
        programs = min(PREFETCH_PROGRAMS, expert_size * weights.itemsize // 2 // PROGRAM_BYTES) if use_pdl else 0
        weights, programs = (weights, programs) if programs else (None, 1)
    TOP_K.launch(
        (rows, programs), values, indices, scores, weights, columns, scores.stride(0), expert_size, top_k, softmax,
        *sizes, use_pdl,
        num_warps=1, **({"launch_pdl": True} if use_pdl else {}),
    )  # fmt: skip
    return values, indices


def plain_top_k(scores: Tensor, top_k: int, softmax: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same in plain torch: the CPU path. A stable sort puts the lower of two equal columns first."""
    wide = scores.float()
    values, indices = (wide + 0.0).sort(dim=-1, descending=True, stable=True)
    values, indices = values[:, :top_k], indices[:, :top_k].contiguous()
    if softmax == "selected":
        values = values.softmax(-1)
    elif softmax == "all":
        values = wide.softmax(-1).gather(1, indices)
    return values.to(dtype).contiguous(), indices
