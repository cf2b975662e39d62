"""The copy of a model with few layers, on which the programs of all layers are compiled."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Gemma3Config, Gemma3TextConfig, LlamaConfig

from tcdeploy.errors import ModelError
from tcdeploy.models.short_config import layers_to_keep, shorten_config


@pytest.mark.parametrize(
    ("kinds", "count"),
    [
        ("a", 1),
        ("aaaa", 2),  # the last layer has a program of its own
        ("abababab", 4),
        ("aaaaabaaaaab", 6 + 6),  # b must also be before the last layer
        ("aaaaabaaaaabaa", 7),
        ("dddmmmm", 5),
        ("ab", 2),
    ],
)
def test_the_first_layers_have_each_kind_before_the_last_one_and_the_last_kind_at_the_end(
    kinds: str, count: int
) -> None:
    assert layers_to_keep(kinds) == count
    assert kinds[count - 1] == kinds[-1] and set(kinds[:-1]) <= set(kinds[: count - 1])


def test_lists_with_one_entry_per_layer_are_shortened() -> None:
    layer_types = ["sliding_attention", "full_attention"] * 3
    config = Gemma3TextConfig(num_hidden_layers=6, layer_types=layer_types, sliding_window=8)
    short = shorten_config(config, 6, 4)
    assert (short.num_hidden_layers, short.layer_types) == (4, layer_types[:4])
    assert (config.num_hidden_layers, config.layer_types) == (6, layer_types), "the config itself is unchanged"
    assert type(config)(**short.to_dict()).num_hidden_layers == 4, "transformers accepts the short config"


def test_the_text_model_of_a_multimodal_config_is_shortened() -> None:
    config = Gemma3Config(text_config={"num_hidden_layers": 12})
    short: Any = shorten_config(config, 12, 7)
    assert (short.text_config.num_hidden_layers, len(short.text_config.layer_types)) == (7, 7)
    assert short.vision_config.num_hidden_layers == config.vision_config.num_hidden_layers


def test_a_config_with_another_number_of_layers_is_an_error() -> None:
    with pytest.raises(ModelError, match="does not state its 5 layers"):
        shorten_config(LlamaConfig(num_hidden_layers=4), 5, 2)
