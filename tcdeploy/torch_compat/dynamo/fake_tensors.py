"""Build and run a model without memory for its weights.

The probe uses FakeTensorMode: tensors with shape, dtype and device but no data. Without it, tensors on the meta device
take its place, which some model types cannot run on; the probe refuses those.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch

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


def has_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values: it is neither fake nor on the meta device."""
    kind = find(FAKE_TENSOR)
    return not tensor.is_meta and (kind is None or not isinstance(tensor, kind))
