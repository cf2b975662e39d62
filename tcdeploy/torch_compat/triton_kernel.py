"""Launches our Triton kernels, whose modules are imported at the first launch.

The code that prepares a launch is separate from the kernel, so that it can be imported without Triton.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any


class Kernel:
    """A kernel by its module and name."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    @functools.cached_property
    def function(self) -> Any:
        """Triton's JITFunction. Imports Triton."""
        return getattr(importlib.import_module(self.module), self.name)

    def launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Launch the kernel with positional arguments, on the current stream.

        `options` are Triton's: num_warps, num_stages, launch_pdl. They must be given in the same order at each call.
        """
        self.function[grid](*args, **options)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below a positive number. Triton's tensors have such sizes."""
    return 1 << (number - 1).bit_length()
