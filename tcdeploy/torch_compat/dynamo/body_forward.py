"""Reuse the output of a model's body across several calls of the whole model.

Scoring a prompt applies the LM head in chunks. transformers has no public way to run the head, with what a family does
around it (scaling, soft-capping), on hidden states that exist already. So the body's `forward` is replaced on the
instance while the chunks are computed. This relies on a causal LM calling `base_model` as a module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from tcdeploy.torch_compat.internal import find, internal, mentions


@internal("prompt log-probabilities", "transformers.PreTrainedModel.base_model",
          "scoring a long prompt runs the model once per chunk of logits")  # fmt: skip
def supported() -> bool:
    """Whether modules look up `forward` on the instance, and causal LMs name their body."""
    return mentions(getattr(nn.Module, "_call_impl", None), "forward") and isinstance(
        find("transformers:PreTrainedModel.base_model"), property
    )


@contextlib.contextmanager
def reuse_body_output(model: nn.Module) -> Iterator[None]:
    """Within the block, the body runs at the first call of `model`, and later calls get its output again."""
    body: Any = model.base_model if supported() else model
    if body is model or "forward" in vars(body):
        yield
        return
    forward = body.forward
    outputs: list[Any] = []

    def first_output(*args: Any, **kwargs: Any) -> Any:
        if not outputs:
            outputs.append(forward(*args, **kwargs))
        return outputs[0]

    body.forward = first_output
    try:
        yield
    finally:
        del body.forward
