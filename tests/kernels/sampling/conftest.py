"""The device of the sampling kernels' tests: a GPU, or the CPU with Triton's interpreter."""

from __future__ import annotations

from tests.triton_tools import device

__all__ = ["device"]
