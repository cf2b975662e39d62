"""Remove an attention function from transformers' registry.

transformers.AttentionInterface can register a function and has no public way to remove one. Without this, the probe's
function stays registered until the process ends; a later probe replaces it, and only models with that attention name
are affected. The dictionary that holds the functions is keyed by `attn_implementation`.
"""

from __future__ import annotations

from tcdeploy.torch_compat.internal import Internal, find

REGISTRY = "transformers:AttentionInterface._global_mapping"


def supported() -> bool:
    return isinstance(find(REGISTRY), dict)


INTERNAL = Internal(
    "attention registry",
    "transformers",
    "AttentionInterface._global_mapping",
    "the probe's attention function stays registered until the process ends",
    supported,
)


def unregister_attention(attn_implementation: str) -> None:
    if supported():
        find(REGISTRY).pop(attn_implementation, None)
