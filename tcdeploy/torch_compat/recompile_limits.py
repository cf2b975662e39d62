"""Raise the number of programs that torch keeps for one function.

torch stops compiling a function at 8 programs. A plan has one for each bucket, variant and kind of region. The limits
are read from torch.compiler.config where it has them, else from torch._dynamo.config, which holds them in torch 2.11.
Without either, torch's own limits hold, and a plan with many buckets fails to warm with torch's error.
"""

from __future__ import annotations

from typing import Any

from tcdeploy.torch_compat.internal import Internal, find

CONFIGS = ("torch.compiler.config", "torch._dynamo.config")
LIMITS = ("recompile_limit", "accumulated_recompile_limit")


def supported() -> bool:
    return _config() is not None


INTERNAL = Internal(
    "recompile limits",
    "torch",
    "torch._dynamo.config.recompile_limit",
    "torch's own limits hold, and a plan with many buckets may fail to warm",
    supported,
)


def raise_recompile_limits(per_function: int, accumulated: int) -> None:
    """Set both limits to at least these values."""
    config = _config()
    if config is not None:
        for name, limit in zip(LIMITS, (per_function, accumulated), strict=True):
            setattr(config, name, max(limit, getattr(config, name)))


def _config() -> Any:
    return next((config for config in map(find, CONFIGS) if all(hasattr(config, name) for name in LIMITS)), None)
