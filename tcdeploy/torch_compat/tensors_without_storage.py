"""Makes tensors that have a shape, a dtype and a device but no memory, for subclasses that define all operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from tcdeploy.torch_compat.internal import find, internal

if TYPE_CHECKING:
    from torch import Tensor

MAKE_WRAPPER = "torch:Tensor._make_wrapper_subclass"
T = TypeVar("T", bound="Tensor")


@internal("traced weights", "torch.Tensor._make_wrapper_subclass",
          "transformers loads the weights, and no start is possible from packages alone")  # fmt: skip
def supported() -> bool:
    return find(MAKE_WRAPPER) is not None


def make_wrapper(kind: type[T], like: Tensor, device: str) -> T:
    """A tensor of class `kind` that claims to be on `device`, with the shape, strides and dtype of `like`."""
    result: T = find(MAKE_WRAPPER)(kind, like.shape, strides=like.stride(), dtype=like.dtype, device=device)
    return result
