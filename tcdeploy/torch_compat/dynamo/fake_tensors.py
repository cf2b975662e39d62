"""Build and run a model without memory for its weights.

FakeTensorMode makes tensors with shape, dtype and device but no data. Where torch lacks it, tensors on the meta device
take its place, which some model types cannot run on; the probe refuses those. On meta tensors the probe takes half
as long, so it tries these first (`only_meta_tensors`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch

from tcdeploy.torch_compat.dynamo.dispatch_mode import observe_operations
from tcdeploy.torch_compat.internal import find, has_parameters, internal

FAKE_TENSOR_MODE = "torch._subclasses.fake_tensor:FakeTensorMode"
FAKE_TENSOR = "torch._subclasses.fake_tensor:FakeTensor"
LOGGER = "torch._subclasses.fake_tensor"


@internal("fake tensors", "torch._subclasses.fake_tensor.FakeTensorMode",
          "models are probed on the meta device, and some types may be refused")  # fmt: skip
def supported() -> bool:
    return has_parameters(find(FAKE_TENSOR_MODE), "allow_non_fake_inputs")


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """Within the block, new tensors hold no data. torch's log messages about them are silenced."""
    logger = logging.getLogger(LOGGER)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    mode = find(FAKE_TENSOR_MODE)(allow_non_fake_inputs=True) if supported() else torch.device("meta")
    try:
        with mode:
            yield
    finally:
        logger.setLevel(level)


class OtherTensorError(Exception):
    """A tensor of an operation is not on the meta device."""


@contextlib.contextmanager
def only_meta_tensors() -> Iterator[None]:
    """Within the block, new tensors are on the meta device. Raises OtherTensorError at an operation on another tensor.

    Without the error, tensors have only shapes and dtypes, which meta and fake tensors compute with the same functions.
    """

    def check(name: str, *operands: Any) -> None:
        if not all(tensor.is_meta for tensor in _tensors(operands)):
            raise OtherTensorError(name)

    with torch.device("meta"), observe_operations(check):
        yield


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors([*value.values()])


def has_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values: it is neither fake nor on the meta device."""
    kind = find(FAKE_TENSOR)
    return not tensor.is_meta and (kind is None or not isinstance(tensor, kind))
