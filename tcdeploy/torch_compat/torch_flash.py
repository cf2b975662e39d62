"""FlashAttention-2 as torch ships it: the private op aten::_flash_attention_forward.

The public torch.nn.attention.varlen API starts with torch 2.13 and differs between versions; the op has the same
arguments in torch 2.11 to 2.13. Without it, the backend torch-flash cannot be chosen (planning/attention.py).
"""

from __future__ import annotations

from typing import Any

from tcdeploy.planning.backends import TORCH_FLASH
from tcdeploy.torch_compat.internal import Internal, find

OP = "torch:ops.aten._flash_attention_forward"
ARGUMENTS = [
    "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask",
    "scale", "window_size_left", "window_size_right",
]  # fmt: skip


def supported() -> bool:
    """Whether the op's first arguments are those that are passed here."""
    schema = getattr(find(f"{OP}.default"), "_schema", None)
    return schema is not None and [argument.name for argument in schema.arguments][: len(ARGUMENTS)] == ARGUMENTS


INTERNAL = Internal(
    TORCH_FLASH,
    "torch",
    "aten::_flash_attention_forward",
    "the attention backend torch-flash cannot be used",
    supported,
)


def flash_attention_forward(*args: Any, **kwargs: Any) -> Any:
    """The op itself: output [tokens, heads, head_dim], log-sum-exp [heads, tokens], and what its backward needs."""
    return find(OP)(*args, **kwargs)
