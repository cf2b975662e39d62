"""Loads CUDA's libraries and kernels in a thread, while a start does something else.

CUDA creates its context, loads cuBLAS and loads the kernel of each operator when they are first used. A start needs all
of them. These calls mostly do not hold the GIL.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

import torch

from tcdeploy.engine.check.parity import compare_logits, greedy_tokens, outlier_rows

ROWS, COLUMNS = 8, 256
log = logging.getLogger("tcdeploy.engine")


@contextlib.contextmanager
def initializing_gpu() -> Iterator[None]:
    """Initialise the current GPU, if there is one, while the block runs.

    Errors are only logged: the block's next CUDA call raises them.
    """
    if not torch.cuda.is_available():
        yield
        return
    thread = threading.Thread(target=_initialize, name="gpu-initialization")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _initialize() -> None:
    try:
        _use_libraries(torch.device("cuda"))
        torch.cuda.synchronize()
    except Exception as error:  # such as a busy or broken GPU, which the start reports at its next call
        log.debug("the GPU could not be initialised in advance: %s", error)


@torch.no_grad()
def _use_libraries(device: torch.device) -> None:
    """A product of cuBLAS, and the operators of the parity check."""
    x = torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16, device=device)
    torch.mm(x, x.T)
    logits = x.float()
    sample = torch.ones(ROWS, 2, dtype=torch.float64)
    compared = (logits, logits, logits, "bfloat16", "float32", sample)
    compare_logits(*compared)
    outlier_rows(*compared)
    greedy_tokens([[0]], x)
