"""Stops dynamic rope and longrope from changing the rotary frequencies at run time.

transformers compares the longest position of each batch with a limit, beyond which it uses other frequencies for the
whole batch: `max_position_embeddings` for dynamic rope, `original_max_position_embeddings` for longrope. Up to the
limit they are those that the module was built with. Planning limits the context to it (`Architecture.rope_limit`),
so the comparison is left out. For dynamic rope, and with transformers before 5.23 for longrope, it reads a position on
the host in each step, which no CUDA graph can contain.
"""

from __future__ import annotations

from typing import Any

from torch import nn

CHANGING_TYPES = ("dynamic", "longrope")
STATIC = "default"


def freeze_rope(model: nn.Module) -> None:
    """Change `rope_type` of each rotary embedding, which transformers reads in every forward pass.

    The frequencies were computed when the module was built, and stay as they are.
    """
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str):
            setattr(module, "rope_type", _static(rope_type))  # noqa: B010 - nn.Module declares other attribute types
        elif isinstance(rope_type, dict):  # one per type of layer
            setattr(module, "rope_type", {name: _static(kind) for name, kind in rope_type.items()})  # noqa: B010


def _static(rope_type: Any) -> Any:
    return STATIC if isinstance(rope_type, str) and any(kind in rope_type for kind in CHANGING_TYPES) else rope_type
