"""Sets the attention implementation of models that do not use transformers' AttentionInterface.

transformers does not set it if the modelling file of a model does not use the interface. Modules of such models are
made to use it by models/convert/attention_interface.py, which replaces, for example, their method `_attn`.
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
    """Whether transformers sets any attention implementation in models of the class.

    True for code from a repository (None), and if transformers' check is missing (`supported`).
    """
    return model_class is None or not supported() or bool(model_class._can_set_attn_implementation())


def allow_setting(model: Any) -> None:
    """Make `model.set_attn_implementation` set any implementation."""
    model._can_set_attn_implementation = _yes


def implementation_of(config: Any) -> str:
    """The name of the attention function that modules with this config look up."""
    name: str = config._attn_implementation
    return name


def replace_method(module: Any, method: Callable[..., Any]) -> None:
    """Let `module` call `method(module, query, key, value, ...)` as its `_attn`."""
    module._attn = types.MethodType(method, module)


def call_own_method(module: Any, *args: Any) -> Any:
    """Call the `_attn` of the module's class, although `replace_method` replaced that of the module."""
    return type(module)._attn(module, *args)


def _yes() -> bool:
    return True
