"""Constants and conversions for the arguments of the Triton attention kernels. Imports no Triton."""

from __future__ import annotations

from tcdeploy.torch_compat.triton.kernel import next_power_of_2

# Larger than any sequence, so the kernels need no case for "no window". Positions minus NO_WINDOW still fit int32.
NO_WINDOW = 2**30
LOG2_E = 1.4426950408889634


def padded_head_dim(dim: int) -> int:
    """The head size rounded up to what `tl.dot` accepts: a power of two, at least 16."""
    return max(16, next_power_of_2(dim))


def log2_score_scales(scale: float, softcap: float) -> tuple[float, float]:
    """(scale_log2, tanh_scale) of base-2 scores.

    A score is `scale_log2 * (q @ k)`, or `scale_log2 * tanh(tanh_scale * (q @ k))` with a softcap.
    """
    return (softcap * LOG2_E, scale / softcap) if softcap else (scale * LOG2_E, 0.0)
