"""The attention implementation of a model, and of modules that compute attention in a method `_attn`.

transformers does not set the implementation of a model whose modelling file does not use its AttentionInterface.
models/convert/attention_interface.py makes modules of such models use the interface.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from tcdeploy.torch_compat.internal import find, has_parameters, internal

CAN_SET = "transformers:PreTrainedModel._can_set_attn_implementation"


@internal(
    "attention outside of the interface", "transformers.PreTrainedModel._can_set_attn_implementation",
    "models whose attention is not transformers' AttentionInterface, such as GPT-J, are refused",
)  # fmt: skip
def supported() -> bool:
    return has_parameters(find(CAN_SET))


def uses_interface(model_class: Any) -> bool:
    """Whether a class of transformers, or code from a repository (None), can have any attention implementation."""
    return model_class is None or not supported() or bool(model_class._can_set_attn_implementation())


def allow_setting(model: Any) -> None:
    """Let `model.set_attn_implementation` have an effect."""
    model._can_set_attn_implementation = _yes


def implementation_of(config: Any) -> str:
    """The name of the attention function that modules with this config look up."""
    name: str = config._attn_implementation
    return name


def replace_method(module: Any, method: Callable[..., Any]) -> None:
    """Let `module` call `method(module, query, key, value, ...)` as its `_attn`."""
    module._attn = types.MethodType(method, module)


def call_own_method(module: Any, *args: Any) -> Any:
    """What the `_attn` of the module's class returns."""
    return type(module)._attn(module, *args)


def _yes() -> bool:
    return True
