"""What the linear kernels' tests run on (a GPU, or the CPU with Triton's interpreter), and where they write."""

from __future__ import annotations

from tests.attention.paged import device

__all__ = ["poisoned_outputs", "device"]
