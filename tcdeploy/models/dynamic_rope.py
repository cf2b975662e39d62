"""Stops dynamic rope from recomputing the rotary frequencies at run time.

With dynamic rope (`rope_type: dynamic`), transformers compares the longest position of each batch with
`max_position_embeddings`, beyond which it recomputes the frequencies, for the whole batch and for those that follow.
Up to that length they are the ones that the module was built with. Planning limits the context to it
(`Architecture.longrope_limit`), so the comparison, which reads a position on the host in each step, is left out.
"""

from __future__ import annotations

from torch import nn

DYNAMIC, STATIC = "dynamic", "default"


def freeze_dynamic_rope(model: nn.Module) -> None:
    """Change `rope_type` of each rotary embedding, which transformers reads in every forward pass.

    The frequencies were computed when the module was built, and stay as they are.
    """
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str) and DYNAMIC in rope_type:
            setattr(module, "rope_type", STATIC)  # noqa: B010 - nn.Module declares other types of attributes
        elif isinstance(rope_type, dict):  # one per type of layer
            static = {name: STATIC if DYNAMIC in str(kind) else kind for name, kind in rope_type.items()}
            setattr(module, "rope_type", static)  # noqa: B010
