"""Gluon, Triton's language with explicit layouts, in which a kernel itself waits for the tensor cores.

`tl.dot` waits for its product before the next step of a loop, if an operand is in registers. In Gluon a product runs
while the kernel makes the operand of the next one. Triton calls Gluon experimental, so names may move.
"""

from __future__ import annotations

import functools

import torch

from tcdeploy.torch_compat.internal import find, has_parameters, internal

HOPPER_FUNCTIONS = "triton.experimental.gluon.language.nvidia.hopper"
CAPABILITY = (9, 0)  # the compute capability of the GPUs with wgmma instructions


@internal("asynchronous products", "triton.experimental.gluon",
          "on Hopper, products of int4 weights with many rows are slower")  # fmt: skip
def supported() -> bool:
    functions = find(HOPPER_FUNCTIONS)
    return (
        has_parameters(getattr(functions, "warpgroup_mma", None), "a", "b", "acc", "is_async")
        and has_parameters(getattr(functions, "warpgroup_mma_wait", None), "num_outstanding", "deps")
        and has_parameters(find(f"{HOPPER_FUNCTIONS}:async_copy.async_copy_global_to_shared"), "pointer", "mask")
    )


_recorded: bool | None = None  # what `supported` returned where the kernels were compiled


def use_recorded_support(is_supported: bool | None) -> None:
    """Let `supports_wgmma` use this instead of `supported`, which imports Triton. None: use `supported`."""
    global _recorded
    _recorded = is_supported
    supports_wgmma.cache_clear()


@functools.cache
def supports_wgmma(device: torch.device) -> bool:
    """Whether kernels in Gluon can use the tensor cores of this device through wgmma instructions."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != CAPABILITY:
        return False
    return supported() if _recorded is None else _recorded
