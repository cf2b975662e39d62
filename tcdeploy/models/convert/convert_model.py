"""Converts a loaded model: static rotary embeddings, packed linear layers. Also runs on traced tensors."""

from __future__ import annotations

from transformers import PreTrainedModel

from tcdeploy.models.convert.packed_linears import pack_linears
from tcdeploy.models.convert.static_rope import freeze_rope


def convert_model(model: PreTrainedModel, packed_linears: tuple[tuple[str, ...], ...]) -> PreTrainedModel:
    """Convert `model` in place, and return it in eval mode. `packed_linears`: as in Architecture."""
    model.requires_grad_(False)
    freeze_rope(model)
    pack_linears(model, packed_linears)
    return model.eval()
