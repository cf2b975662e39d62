"""What may be compiled when: context managers around torch.compiler.set_stance.

`current_stance` returns the same setting for ahead-of-time programs, which torch's stance does not affect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch

from tcdeploy.errors import RecompileError
from tcdeploy.torch_compat.compile_counters import is_compiler_imported

Stance = Literal["compile", "eager", "fail"]
_stance: Stance = "compile"


def current_stance() -> Stance:
    """Whether a missing program is compiled, avoided by running eagerly, or an error."""
    return _stance


@contextlib.contextmanager
def force_eager() -> Iterator[None]:
    """Run compiled modules uncompiled."""
    with _torch_stance("force_eager"), _set_stance("eager"):
        yield


@contextlib.contextmanager
def fail_on_recompile() -> Iterator[None]:
    """Make every compilation an error. Raises RecompileError with torch's reason."""
    try:
        with _torch_stance("fail_on_recompile"), _set_stance("fail"):
            yield
    except RuntimeError as error:
        if "fail_on_recompile" in str(error):
            raise RecompileError(
                f"a step would have compiled after warm-up: {error}",
                "warm a bucket for this shape: tcdeploy warm MODEL --buckets ... --batch-sizes ...",
            ) from error
        raise


def _torch_stance(stance: str) -> contextlib.AbstractContextManager[object]:
    """torch's own stance. To set it would import Dynamo, so it is not set before something else has imported that."""
    stance_context: contextlib.AbstractContextManager[object] = (
        torch.compiler.set_stance(stance) if is_compiler_imported() else contextlib.nullcontext()
    )
    return stance_context


@contextlib.contextmanager
def _set_stance(stance: Stance) -> Iterator[None]:
    global _stance
    previous, _stance = _stance, stance
    try:
        yield
    finally:
        _stance = previous
