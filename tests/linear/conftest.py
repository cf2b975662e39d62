"""The device that the kernels' tests run on: a GPU, or the CPU with Triton's interpreter."""

from __future__ import annotations

from tests.attention.paged import device

__all__ = ["device"]
