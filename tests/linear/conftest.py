"""What the linear kernels' tests run on (a GPU, or the CPU with Triton's interpreter), and where they write."""

from __future__ import annotations

from tests.attention.paged import device
from tests.linear.matmul_cases import poisoned_outputs

__all__ = ["blocks", "device"]
