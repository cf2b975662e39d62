"""Programmatic dependent launch: a kernel that begins while the one before it on the stream still runs.

Launched with `launch_pdl`, a kernel's programs start once every program of the kernel before has said that they may
(`gdc_launch_dependents`) or has left. Its `gdc_wait` returns when all that the earlier kernel wrote can be read. What
keeps this safe:

- A kernel of ours waits before it touches anything that a kernel of the same step writes, and before it writes. Before
  the wait it may read weights (passes/nodes.py, `is_weight`), and what an earlier step left: no early launch reaches
  across a step's end, whose last kernels do not launch so.
- It lets the next kernel launch only after its own wait, as Inductor's kernels do (config `triton.enable_pdl`): when a
  kernel starts, all that came before its neighbour is complete.
"""

from __future__ import annotations

import functools

import torch


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Whether the GPU has dependent launch: Hopper and later. A CPU is Triton's interpreter, in tests."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
