"""Build, run and load a model without memory for its weights.

The probe uses FakeTensorMode: tensors with shape, dtype and device but no data. Without it, tensors on the meta device
take its place, which some model types cannot run on; the probe refuses those.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tcdeploy.torch_compat.internal import find, has_parameters, internal

FAKE_TENSOR_MODE = "torch._subclasses.fake_tensor:FakeTensorMode"
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


class _AllEqual(TorchFunctionMode):
    """Answers `torch.equal`, which needs values: transformers compares tied tensors if a checkpoint has both."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return True if func is torch.equal else func(*args, **(kwargs or {}))


@contextlib.contextmanager
def fake_loading() -> Iterator[None]:
    """Like `fake_tensors`, for transformers' `from_pretrained` with a state dict, which then loads in one thread."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"  # read by transformers at each load
    earlier = os.environ.get(name)
    os.environ[name] = "1"
    try:
        with fake_tensors(), _AllEqual():
            yield
    finally:
        if earlier is None:
            del os.environ[name]
        else:
            os.environ[name] = earlier
