"""Stops allocating from the pool of a failed CUDA graph capture, which torch's `CUDAGraph.capture_end` does not do.

If a capture is invalid, `capture_end` raises, and the caching allocator still counts the capture as running. In torch
2.11, freeing any `torch.cuda.MemPool` then aborts the process: `captures_underway.empty() INTERNAL ASSERT FAILED`.
"""

from __future__ import annotations

import contextlib
from typing import Any

from tcdeploy.torch_compat.internal import find, internal

END_ALLOCATION = "torch:_C._cuda_endAllocateToPool"


@internal(
    "failed captures", "torch._C._cuda_endAllocateToPool",
    "after a CUDA graph that could not be captured, the process may end when the model is closed",
)  # fmt: skip
def supported() -> bool:
    return find(END_ALLOCATION) is not None


def end_allocation(pool: Any, device_index: int) -> None:
    """Stop allocating from `pool`, a torch.cuda.MemPool, after a failed capture."""
    if supported():
        with contextlib.suppress(RuntimeError):  # capture_end had already ended the allocation
            find(END_ALLOCATION)(device_index, pool.id)
