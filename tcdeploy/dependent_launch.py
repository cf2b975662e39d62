"""Programmatic dependent launch: a kernel that begins while the one before it on the stream still runs.

Launched with `launch_pdl`, a kernel's programs start once every program of the kernel before has said that they may
(`gdc_launch_dependents`) or has left. Its `gdc_wait` returns when all that the earlier kernel wrote can be read. What
keeps this safe without looking at the neighbours, which may be Inductor's (config `triton.enable_pdl`) or anyone's:

- A kernel waits before it touches what the kernel before it may write or read.
- It lets the next one launch only after its own wait, so all that came before the neighbour is complete when we start.
  Hence what two kernels back wrote may be read before the wait.
"""

from __future__ import annotations

import functools

import torch


@functools.cache
def launches_early(device: torch.device) -> bool:
    """Whether the GPU has dependent launch: Hopper and later. A CPU is Triton's interpreter, in tests."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
