"""What may be compiled when: context managers around torch.compiler.set_stance.

`current_stance` returns the same setting for ahead-of-time programs, which torch's stance does not affect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch

from tcdeploy.errors import RecompileError, ThresholdError, UsageError
from tcdeploy.planning.plan import Plan
from tcdeploy.torch_compat.dynamo import compile_refusal
from tcdeploy.torch_compat.dynamo.compile_counters import is_compiler_imported
from tcdeploy.torch_compat.dynamo.compile_threads import without_compile_workers

Stance = Literal["compile", "eager", "fail"]
_stance: Stance = "compile"


def current_stance() -> Stance:
    """Whether a missing program is compiled, avoided by running eagerly, or an error."""
    return _stance


@contextlib.contextmanager
def force_eager() -> Iterator[None]:
    """Run compiled modules uncompiled."""
    with _set_stance("eager", "force_eager"):
        yield


@contextlib.contextmanager
def fail_on_recompile() -> Iterator[None]:
    """Make every compilation an error. Raises RecompileError with torch's reason."""
    try:
        with _set_stance("fail", "fail_on_recompile"):
            yield
    except RuntimeError as error:
        if "fail_on_recompile" in str(error):
            raise RecompileError(
                f"a step would have compiled after warm-up: {error}",
                "warm a bucket for this shape: tcdeploy warm MODEL --buckets ... --batch-sizes ...",
            ) from error
        raise


@contextlib.contextmanager
def refuse_compilation(plan: Plan) -> Iterator[None]:
    """Raise ThresholdError for each compilation in the block, by Inductor, the C++ compiler or Triton."""
    if is_compiler_imported() and not compile_refusal.supported():
        symbol = compile_refusal.supported.symbol
        raise UsageError(
            f"--no-compile cannot be used, because this version of torch moved {symbol}", "omit --no-compile"
        )
    with without_compile_workers(), naming_refusal(plan, "the start"), compile_refusal.refusing():
        yield


@contextlib.contextmanager
def naming_refusal(plan: Plan, user: str) -> Iterator[None]:
    """Translate CompilationRefused to ThresholdError. `user`: what needs the program, such as a bucket's name."""
    try:
        yield
    except compile_refusal.CompilationRefused as refused:
        raise ThresholdError(
            f"{user} needs {refused.what} that is not in the cache folder {plan.cache_dir}, and --no-compile was given",
            f"nothing was compiled; tcdeploy cache why {plan.cache_dir} {plan.model} shows what differs",
        ) from None


@contextlib.contextmanager
def _set_stance(stance: Stance, torch_stance: str = "") -> Iterator[None]:
    """To set torch's own stance would import Dynamo, so it is not set before something else has imported that."""
    global _stance
    sets_torch = torch_stance and is_compiler_imported()
    previous, _stance = _stance, stance
    try:
        with torch.compiler.set_stance(torch_stance) if sets_torch else contextlib.nullcontext():
            yield
    finally:
        _stance = previous
