"""Keeps transformers from initialising modules whose tensors it has loaded.

After loading, `from_pretrained` calls `_init_weights` for each module, and the initialisation functions leave loaded
tensors unchanged. Kimi Linear's `_init_weights` takes the logarithm of what such a function returns, which fails for
tensors without values (traced_model.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tcdeploy.torch_compat.internal import find, has_parameters, internal

INITIALIZE = "transformers:PreTrainedModel._initialize_weights"


@internal(
    "initialisation", "transformers.PreTrainedModel._initialize_weights",
    "Kimi Linear is loaded by transformers, and has no packages",
)  # fmt: skip
def supported() -> bool:
    return has_parameters(find(INITIALIZE), "module")


def mark_as_loaded(tensor: Any) -> None:
    """Make transformers' initialisation functions leave the tensor unchanged."""
    tensor._is_hf_initialized = True


@contextlib.contextmanager
def skipping_loaded_modules() -> Iterator[None]:
    """During the block, a module is not initialised if it has parameters, all of them loaded, and no buffers."""
    if not supported():
        yield
        return
    from transformers import PreTrainedModel

    initialize = PreTrainedModel._initialize_weights

    def initialize_missing(self: Any, module: Any, *args: Any) -> None:
        parameters, buffers = list(module.parameters(recurse=False)), list(module.buffers(recurse=False))
        if buffers or not parameters or not all(getattr(each, "_is_hf_initialized", False) for each in parameters):
            initialize(self, module, *args)

    PreTrainedModel._initialize_weights = initialize_missing
    try:
        yield
    finally:
        PreTrainedModel._initialize_weights = initialize
