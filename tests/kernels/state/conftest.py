"""The device fixture of the tests of state: a GPU, or the CPU with Triton's interpreter."""

from __future__ import annotations

from tests.triton_tools import device

__all__ = ["device"]
