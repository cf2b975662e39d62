"""What may be compiled when: context managers around torch.compiler.set_stance."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

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
