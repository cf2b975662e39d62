"""Names of torch's dtypes. Plans, start records and ops state a dtype by its name, so this module imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Such as "bfloat16"; `getattr(torch, name)` is the dtype."""
    return str(dtype).removeprefix("torch.")
