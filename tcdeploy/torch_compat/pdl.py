"""Programmatic dependent launch (PDL): a kernel that starts while its predecessor on the stream still runs.

A kernel launched with `launch_pdl` starts once every program of its predecessor has called `gdc_launch_dependents` or
exited. Its `gdc_wait` returns when all writes of the predecessor are visible. Two rules keep this safe:

- Our kernels wait before they access anything that a kernel of the same step writes, and before they write. Before the
  wait they may read weights (`is_weight` in passes/nodes.py) and data written by an earlier step: early launch does not
  cross the end of a step, because a step's last kernels are launched without PDL.
- They let their successor launch only after their own wait, as Inductor's kernels do (`triton.enable_pdl`). When a
  kernel starts, everything before its predecessor is complete.
"""

from __future__ import annotations

import functools

import torch


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Whether the GPU supports PDL (compute capability 9.0, Hopper, and later). False on CPU."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
