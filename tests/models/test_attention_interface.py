"""Converted attention modules give the same logits through the AttentionInterface as with their own code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tcdeploy.errors import UnsupportedModelError
from tcdeploy.models.auto_classes import model_class
from tcdeploy.models.convert.attention_interface import with_interface
from tcdeploy.models.probe import probe_model
from tcdeploy.planning.architecture import Architecture
from tests.coverage.small_configs import HEAD_DIM, HEADS, WINDOW, small_config

NAME = "plain-attention"
TOKENS = 2 * WINDOW + 5
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gptj": ("gptj", {}),
    "codegen": ("codegen", {}),
    "gpt_neo": ("gpt_neo", {}),
    "gpt_neox_japanese": ("gpt_neox_japanese", {}),
    "openai-gpt": ("openai-gpt", {}),
    "xglm": ("xglm", {}),
    "falcon with one KV head": ("falcon", {"multi_query": True}),
    "falcon with a KV head per query head": ("falcon", {"multi_query": False}),
    "falcon with grouped queries": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
}
each_case = pytest.mark.parametrize("case", CASES)


def plain_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float,
    sliding_window: int | None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    assert attention_mask is None
    key, value = (states.repeat_interleave(query.shape[1] // states.shape[1], dim=1) for states in (key, value))
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])
    seen = (distance >= 0) & (distance < (sliding_window or len(distance)))
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2), None


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    ALL_ATTENTION_FUNCTIONS[NAME] = plain_attention
    yield
    del ALL_ATTENTION_FUNCTIONS[NAME]


def config_of(case: str) -> Any:
    model_type, values = CASES[case]
    config = small_config(model_type)
    for name, value in values.items():
        setattr(config, name, value)
    return config


def models_of(case: str) -> tuple[Any, Any]:
    """transformers' model with eager attention, and the same model converted, with the implementation NAME."""

    def build(implementation: str) -> Any:
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config_of(case), attn_implementation=implementation).eval()
        for parameter in model.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.15)  # so that attention weights differ clearly
        return model

    return build("eager"), with_interface(model_class(config_of(case), trust_remote_code=False), NAME, build)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    ids = torch.arange(TOKENS)[None] * 7 % 230 + 3
    result: Tensor = model(input_ids=ids, position_ids=torch.arange(TOKENS)[None], use_cache=False).logits
    return result


@each_case
def test_logits_equal_those_of_the_models_own_code(case: str) -> None:
    expected, model = models_of(case)
    assert_close(logits(model), logits(expected), atol=2e-5, rtol=1e-4)
    model.set_attn_implementation("eager")
    assert torch.equal(logits(model), logits(expected)), "the reference of the parity check runs the model's own code"


@each_case
def test_another_scale_changes_logits(case: str) -> None:
    def scaled(*args: Any, scaling: float, **kwargs: Any) -> Any:
        return plain_attention(*args, scaling=1.05 * scaling, **kwargs)

    ALL_ATTENTION_FUNCTIONS[NAME] = scaled
    expected, model = models_of(case)
    assert (logits(model) - logits(expected)).abs().max() > 1e-3


def test_windows_are_passed() -> None:
    assert [spec.window for spec in probed("gpt_neo").attention_layers] == [0, WINDOW, 0, WINDOW]


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_of_no_tokens_is_refused(window: int) -> None:
    config = config_of("gpt_neo")
    config.window_size = window
    with pytest.raises(UnsupportedModelError, match=f"window_size is {window}"):
        probe_model(config)


def probed(case: str) -> Architecture:
    return probe_model(config_of(case)).architecture


@pytest.mark.parametrize(
    ("case", "kv_heads"),
    [
        ("falcon with one KV head", 1), ("falcon with a KV head per query head", HEADS),
        ("falcon with grouped queries", 2),
    ],
)  # fmt: skip
def test_keys_are_cached_once_for_a_group(case: str, kv_heads: int) -> None:
    specs = probed(case).attention_layers
    assert {(spec.heads, spec.kv_heads, spec.head_dim) for spec in specs} == {(HEADS, kv_heads, HEAD_DIM)}


def test_falcon_with_alibi_is_refused() -> None:
    config = config_of("falcon with one KV head")
    config.alibi = True
    with pytest.raises(UnsupportedModelError, match="never calls"):
        probe_model(config)
