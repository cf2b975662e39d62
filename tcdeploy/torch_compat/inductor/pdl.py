"""Programmatic dependent launch (PDL): a kernel that starts while its predecessor on the stream still runs.

A kernel launched with `launch_pdl` starts once every program of its predecessor has called `gdc_launch_dependents` or
exited. Its `gdc_wait` returns when all writes of the predecessor are visible. Two rules keep this safe:

- Our kernels wait before they access anything that a kernel of the same step writes, and before they write. Before the
  wait they may read weights (the role in programs/roles.py) and data written by an earlier step: early launch does not
  cross the end of a step, because a step's last kernels are launched without PDL.
- They let their successor launch only after their own wait, as Inductor's kernels do (`triton.enable_pdl`). When a
  kernel starts, everything before its predecessor is complete.
"""

from __future__ import annotations

import functools

import torch

from tcdeploy.torch_compat.internal import find, has_parameters, internal

GDC_FUNCTIONS = ("gdc_wait", "gdc_launch_dependents")


@internal("dependent launch", "triton.backends.nvidia.compiler.CUDAOptions.launch_pdl",
          "kernels do not overlap with the previous one on Hopper, so small decode steps are slower")  # fmt: skip
def supported() -> bool:
    cuda = find("triton.language:extra.cuda")
    return all(hasattr(cuda, name) for name in GDC_FUNCTIONS) and has_parameters(
        find("triton.backends.nvidia.compiler:CUDAOptions"), "launch_pdl"
    )


_recorded: bool | None = None  # what `supported` returned where the kernels were compiled


def use_recorded_support(is_supported: bool | None) -> None:
    """Let `supports_pdl` use this instead of `supported`, which imports Triton. None: use `supported`."""
    global _recorded
    _recorded = is_supported
    supports_pdl.cache_clear()


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Whether to launch with PDL: Hopper and later. False on a CPU, where tests run Triton's interpreter."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    return supported() if _recorded is None else _recorded
