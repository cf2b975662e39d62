"""Removes the data-dependent branch of dynamic rope and longrope.

transformers switches the rotary frequencies of the whole batch when its longest position exceeds a limit. Planning
limits the context to this length (`Architecture.rope_limit`), so the comparison is unnecessary. For dynamic rope (and
for longrope before transformers 5.23) it reads a position on the host in each step, which a CUDA graph cannot contain.
"""

from __future__ import annotations

from typing import Any

from torch import nn

CHANGING_TYPES = ("dynamic", "longrope")
STATIC = "default"


def freeze_rope(model: nn.Module) -> None:
    """Change `rope_type` of each rotary embedding, which transformers reads in every forward pass.

    Modules of code from a repository are not changed, because it may read `rope_type` for other purposes.
    """
    for module in model.modules():
        if not type(module).__module__.startswith("transformers."):
            continue
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str):
            setattr(module, "rope_type", _static(rope_type))  # noqa: B010 - nn.Module declares other attribute types
        elif isinstance(rope_type, dict):  # one per type of layer
            setattr(module, "rope_type", {name: _static(kind) for name, kind in rope_type.items()})  # noqa: B010


def _static(rope_type: Any) -> Any:
    return STATIC if isinstance(rope_type, str) and any(kind in rope_type for kind in CHANGING_TYPES) else rope_type
