"""A config with the first layers of a model, whose programs cover those of all layers.

Layers of a kind share their programs, so these can be compiled on a copy that has only a few layers. The first layers
are kept rather than one of each kind, because a model may derive the kind of a layer from its number.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from tcdeploy.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def layers_to_keep(kinds: Sequence[Hashable]) -> int:
    """The smallest number of first layers that have all programs of a model, whose layers have these kinds.

    The last layer returns only the sampled rows, so its program differs from those of other layers of its kind.
    """
    others = set(kinds[:-1])
    counts = range(1, len(kinds) + 1)
    return next(count for count in counts if kinds[count - 1] == kinds[-1] and others <= set(kinds[: count - 1]))


def shorten_config(config: PreTrainedConfig, num_layers: int, count: int) -> PreTrainedConfig:
    """A copy of the config with the first `count` of its `num_layers` layers.

    Lists with one entry per layer are shortened too. Raises ModelError if the config does not state `num_layers`.
    """
    short = copy.deepcopy(config)
    text = short.get_text_config(decoder=True)
    if getattr(text, "num_hidden_layers", None) != num_layers:
        message = f"the config of {config.model_type} does not state its {num_layers} layers, so it cannot be shortened"
        raise ModelError(message, "serve it with --start warm")
    for name, value in text.to_dict().items():
        if isinstance(value, list) and len(value) == num_layers and hasattr(text, name):
            setattr(text, name, value[:count])
    text.num_hidden_layers = count
    return short
