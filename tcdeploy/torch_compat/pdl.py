"""Programmatic dependent launch (PDL): a kernel that starts while the previous one on the stream still runs.

A kernel launched with Triton's `launch_pdl` starts once every program of the previous kernel has called
`gdc_launch_dependents` or has exited. Its `gdc_wait` returns when all writes of earlier kernels are visible. Two rules
keep this safe:

- A kernel waits before it reads anything that a kernel of the same step writes, and before it writes. Before the wait
  it may read weights (passes/nodes.py, `is_weight`) and results of an earlier step: the last kernels of a step do not
  launch dependents, so no early launch crosses a step.
- A kernel launches its dependents only after its own wait, as Inductor's kernels do (config `triton.enable_pdl`).
  When a kernel starts, everything before its predecessor is complete.

Without the launch option or the device functions, kernels are launched in the ordinary way.
"""

from __future__ import annotations

import functools

import torch

from tcdeploy.torch_compat.internal import Internal, find, has_parameters, is_installed

GDC_FUNCTIONS = ("gdc_wait", "gdc_launch_dependents")


def supported() -> bool:
    """True also where Triton is not installed: nothing is lost there."""
    if not is_installed("triton"):
        return True
    cuda = find("triton.language:extra.cuda")
    return all(hasattr(cuda, name) for name in GDC_FUNCTIONS) and has_parameters(
        find("triton.backends.nvidia.compiler:CUDAOptions"), "launch_pdl"
    )


INTERNAL = Internal(
    "dependent launch",
    "triton",
    "CUDAOptions.launch_pdl",
    "kernels do not overlap with the previous one on Hopper, so small decode steps are slower",
    supported,
)


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Whether to launch with PDL: Hopper and later. False on a CPU, where tests run Triton's interpreter."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0) and supported()
