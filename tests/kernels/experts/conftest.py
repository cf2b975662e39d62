"""Fixtures of the tests of experts: the device, and outputs inside NaN guard blocks."""

from __future__ import annotations

from tests.kernels.linear.matmul_cases import poisoned_outputs
from tests.triton_tools import device

__all__ = ["device", "poisoned_outputs"]
