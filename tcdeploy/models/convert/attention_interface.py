"""Makes attention modules that do not use transformers' AttentionInterface call its functions.

Such modules compute attention in their own code. The modules in `METHODS` do so in a method `_attn(query, key, value,
attention_mask)`, which is replaced. Falcon and XGLM do so in `forward`; the functions in `FORWARDS` replace it, and
call the module's own projections. With the implementations "eager" and "sdpa", as in the reference of the parity check,
a module runs its own code.

The implementation is also set in other models that do not use the interface. Their modules get no causal mask then, but
the probe refuses such models, because they never call the attention function.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tcdeploy.torch_compat.transformers.attention_setting import (
    allow_setting,
    call_own_method,
    implementation_of,
    replace_method,
    uses_interface,
)

EAGER, OWN_CODE = "eager", ("eager", "sdpa")  # OWN_CODE: implementations with which modules run their own code
ATTRIBUTE = "tcdeploy_interface"  # holds the Interface of a module whose `_attn` or `forward` is replaced


class Interface(NamedTuple):
    """What a module passes to the attention function."""

    config: Any  # of the model; it names the current implementation
    scaling: float  # factor of the scores
    window: int | None = None  # tokens that a query attends to; None: all
    transposed_keys: bool = False  # `_attn` gets keys as [batch, heads, head_dim, tokens]


def _scaled(module: Any, config: Any) -> Interface:
    return Interface(config, 1 / module.scale_attn)


def _gpt_neo(module: Any, config: Any) -> Interface:
    if module.attention_type != "local":
        return Interface(config, 1.0)
    if config.window_size < 1:  # the module's own code then gives all earlier tokens the same weight
        raise ValueError(f"window_size is {config.window_size}, and layers of local attention need 1 or more")
    return Interface(config, 1.0, config.window_size)


def _gpt_neox_japanese(module: Any, config: Any) -> Interface:
    return Interface(config, 1 / module.norm_factor)


def _openai_gpt(module: Any, config: Any) -> Interface:
    scaling = (module.split_size // module.n_head) ** -0.5 if module.scale else 1.0
    return Interface(config, scaling, transposed_keys=True)


METHODS: dict[str, Callable[[Any, Any], Interface]] = {
    "modeling_gptj.GPTJAttention": _scaled, "modeling_codegen.CodeGenAttention": _scaled,
    "modeling_gpt_neo.GPTNeoSelfAttention": _gpt_neo, "modeling_openai.Attention": _openai_gpt,
    "modeling_gpt_neox_japanese.GPTNeoXJapaneseAttention": _gpt_neox_japanese,
}  # fmt: skip


def with_interface(model_class: Any, implementation: str, build: Callable[[str], Any]) -> Any:
    """Build a model that uses the attention implementation `implementation`.

    `build` makes the model with an implementation. `model_class`: its class; None if that comes from a repository.
    """
    if uses_interface(model_class):
        return build(implementation)
    model = build(EAGER)
    use_interface(model)
    try:
        model.set_attn_implementation(implementation)
    except ValueError:  # "sdpa" for a model that has only eager attention
        model.set_attn_implementation(EAGER)
    return model


def use_interface(model: Any) -> None:
    """Replace the attention of the model's modules, in place."""
    allow_setting(model)
    for module in model.modules():
        name = ".".join((type(module).__module__.rpartition(".")[2], type(module).__name__))
        if name in METHODS:
            setattr(module, ATTRIBUTE, METHODS[name](module, model.config))
            replace_method(module, _attn)
        elif name in FORWARDS and not getattr(model.config, "alibi", False):
            scaling = module.head_dim**-0.5
            setattr(module, ATTRIBUTE, Interface(model.config, scaling))
            module.forward = types.MethodType(FORWARDS[name], module)


def _attn(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *args: Any) -> Any:
    """Replaces the module's `_attn`. query, value and the first result: [batch, heads, tokens, head_dim]."""
    interface: Interface = module.tcdeploy_interface
    if implementation_of(interface.config) in OWN_CODE:
        return call_own_method(module, query, key, value, attention_mask, *args)
    key = key.transpose(2, 3) if interface.transposed_keys else key
    out = _attend(module, query, key, value, attention_mask)
    return [out, None]


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any) -> Tensor:
    """The output of the attention function: [batch, heads, tokens, head_dim].

    Queries and keys are cast to the dtype of values, because rotary factors in float32 make them float32.
    """
    interface: Interface = module.tcdeploy_interface
    function = ALL_ATTENTION_FUNCTIONS[implementation_of(interface.config)]
    out: Tensor = function(
        module, query.to(value.dtype), key.to(value.dtype), value, attention_mask,
        scaling=interface.scaling, sliding_window=interface.window, dropout=0.0,
    )[0]  # fmt: skip
    return out.transpose(1, 2)


def _falcon(module: Any, hidden_states: Tensor, alibi: Any, attention_mask: Any, **kwargs: Any) -> Any:
    if implementation_of(module.tcdeploy_interface.config) in OWN_CODE:
        return type(module).forward(module, hidden_states, alibi, attention_mask, **kwargs)
    qkv = module.query_key_value(hidden_states).unflatten(-1, (-1, module.head_dim))
    kv_heads = (qkv.shape[2] - module.num_heads) // 2
    grouped = qkv.unflatten(2, (kv_heads, -1))  # [1, tokens, kv_heads, heads of a group + 2, head_dim]
    split = grouped[..., :-2, :].flatten(2, 3), grouped[..., -2, :], grouped[..., -1, :]
    query, key, value = (states.transpose(1, 2) for states in split)
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb  # type: ignore[attr-defined]
    query, key = rotate(query, key, *kwargs["position_embeddings"])
    return module.dense(_attend(module, query, key, value, attention_mask).transpose(1, 2).flatten(2)), None


def _xglm(module: Any, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
    if implementation_of(module.tcdeploy_interface.config) in OWN_CODE:
        return type(module).forward(module, hidden_states, attention_mask=attention_mask, **kwargs)
    projections = (module.q_proj, module.k_proj, module.v_proj)
    query, key, value = (
        project(hidden_states).unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for project in projections
    )
    return module.out_proj(_attend(module, query, key, value, attention_mask).transpose(1, 2).flatten(2)), None


FORWARDS: dict[str, Callable[..., Any]] = {
    "modeling_falcon.FalconAttention": _falcon, "modeling_xglm.XGLMAttention": _xglm,
}  # fmt: skip
