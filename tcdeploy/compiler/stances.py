"""What may be compiled when: context managers around torch.compiler.set_stance and Inductor's workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch._inductor.config

from tcdeploy.errors import RecompileError


@contextlib.contextmanager
def force_eager() -> Iterator[None]:
    """Run compiled modules uncompiled."""
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def fail_on_recompile() -> Iterator[None]:
    """Make every compilation an error. Raises RecompileError with torch's reason."""
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            yield
    except RuntimeError as error:
        if "fail_on_recompile" in str(error):
            raise RecompileError(
                f"a step would have compiled after warm-up: {error}",
                "warm a bucket for this shape: tcdeploy warm MODEL --buckets ... --batch-sizes ...",
            ) from error
        raise


@contextlib.contextmanager
def without_compile_workers() -> Iterator[None]:
    """Load cached programs in this process, without Inductor's compile workers.

    A kernel that a worker returns has been pickled, and a pickled triton.Config loses Inductor's note that coordinate
    descent has tuned it. Every start would tune it again (Triton 3.6 and 3.7; tests/torch_compat/test_triton_cache.py
    fails when the note survives).
    """
    with torch._inductor.config.patch(compile_threads=1):
        yield
