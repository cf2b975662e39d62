"""The interface of a step's forward pass, from its inputs to logits, and its implementation for jit programs.

`PackagedForward` (programs/packages.py) and `AotForward` (programs/aot.py) implement it for ahead-of-time programs.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from tcdeploy.kernels.attention.metadata import AttentionMetadata, Step, StepHolder


class StepInputs(NamedTuple):
    """The inputs of a step, and how its rows are selected.

    rows: [outputs] int64: indices into the step's tokens, of those whose logits are computed; None: all tokens.
    selects_in_last_layer: whether the last layer returns only these rows. Otherwise they are selected before the head
        if the model's forward takes `logits_to_keep`, else after it.
    """

    input_ids: Tensor  # [1, tokens] int64
    position_ids: Tensor  # [1, tokens] int64
    step: Step
    rows: Tensor | None = None
    selects_in_last_layer: bool = False


class ModelForward(Protocol):
    """Computes the logits [outputs, vocab] of a step."""

    def __call__(self, inputs: StepInputs) -> Tensor: ...


class TransformersForward:
    """Calls the model's own forward, with a family's scaling and soft-capping. Its regions may be compiled in place."""

    def __init__(self, model: nn.Module, step_holder: StepHolder) -> None:
        self.model, self._step_holder = model, step_holder
        self.supports_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(self, inputs: StepInputs) -> Tensor:
        head_rows = None if inputs.selects_in_last_layer else inputs.rows
        kwargs: dict[str, Any] = {}
        if self.supports_logits_to_keep:  # 0 keeps all rows
            kwargs["logits_to_keep"] = 0 if head_rows is None else head_rows
        self._step_holder.step = inputs.step
        try:
            output = self.model(input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False, **kwargs)
        finally:
            self._step_holder.step = None
        logits: Tensor = output.logits[0]
        return logits if head_rows is None or kwargs else logits[head_rows]


def step_tensors(inputs: StepInputs) -> dict[str, Tensor]:
    """The tensors of a step by their names in a step program (step_program.py), without the prefix `step/`."""
    tensors = {"input_ids": inputs.input_ids, "position_ids": inputs.position_ids}
    tensors |= metadata_tensors(inputs.step.attention_metadata)
    if inputs.rows is not None:
        tensors["rows"] = inputs.rows
    return tensors


def metadata_tensors(metadata: AttentionMetadata) -> dict[str, Tensor]:
    """The tensors of `step_tensors` that attention reads, such as `prefill.slot_mapping`."""
    phases = [(phase, tensors) for phase, tensors in metadata._asdict().items() if tensors is not None]
    named = {f"{phase}.{name}": tensor for phase, tensors in phases for name, tensor in tensors._asdict().items()}
    return {name: tensor for name, tensor in named.items() if tensor is not None}
