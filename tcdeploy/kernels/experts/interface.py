"""The experts function that transformers' mixtures of experts call, registered with its ExpertsInterface.

transformers passes it the module of the experts. Each weight of the module is a parameter [experts, n, k] or
[experts, k, n], or a `SchemeExperts` with the tensors of a scheme (models/convert/scheme_experts.py). Modelling code is
neither patched nor copied: the function calls the module's own activation, gate and norm.

While torch.compile or torch.export traces, both products are ops (ops.py). In eager mode no kernel runs, so that the
reference of the parity check does not depend on the kernels: dense experts run transformers' own function, and experts
in a scheme are dequantised one at a time.

Modules whose class does not support the interface keep their own code. Expert parallelism is not supported: a model is
on one device, so each id is that of one of the module's experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tcdeploy.kernels.experts import ops
from tcdeploy.torch_compat.transformers.experts_interface import (
    apply_gate,
    is_expert_parallel,
    supports_experts_interface,
)

EXPERTS_IMPLEMENTATION = "tcdeploy"
EAGER_IMPLEMENTATION = "grouped_mm"  # of dense experts: transformers' default

# (x, expert_ids, tensors of the weight, bias, scheme) as of ops.expert_linear: [pairs, n]
Product: TypeAlias = Callable[[Tensor, Tensor, list[Tensor], Tensor | None, str], Tensor]


def use_experts_function(model: PreTrainedModel) -> None:
    """Have the experts of a model call `run_experts`, if their class supports it."""
    if any(map(supports_experts_interface, model.modules())):
        ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, run_experts)
        model.set_experts_implementation(EXPERTS_IMPLEMENTATION)


def run_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The function that transformers calls: hidden_states [tokens, hidden] -> [tokens, hidden].

    top_k_index: [tokens, top_k], the experts of each token, and top_k_weights their weights.
    """
    assert not is_expert_parallel(module), "a model is on one device"
    first = "gate_up_proj" if module.has_gate else "up_proj"
    expert_ids = top_k_index.long()
    if torch.compiler.is_compiling():
        product: Product = _grouped_product(expert_ids, module.num_experts)
    elif all(isinstance(getattr(module, name), Tensor) for name in (first, "down_proj")):
        run_eagerly = ALL_EXPERTS_FUNCTIONS[EAGER_IMPLEMENTATION]
        return run_eagerly(module, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
    else:
        product = ops.eager_expert_linear
    states = _project(product, hidden_states, expert_ids, module, first)
    states = apply_gate(module, states) if module.has_gate else module.act_fn(states)
    states = _project(product, states, expert_ids, module, "down_proj")
    if getattr(module, "has_post_expert_norm", False):  # transformers 5.17 has no such models
        states = module.post_expert_norm(states)
    weighted = states * top_k_weights.reshape(-1, 1)
    return weighted.view(*top_k_index.shape, -1).sum(dim=1).to(hidden_states.dtype)


def _grouped_product(expert_ids: Tensor, num_experts: int) -> Product:
    """The op with the groups of these ids, which both products of a layer share."""
    groups = ops.group_pairs(expert_ids, num_experts)
    return lambda x, ids, tensors, bias, scheme: ops.expert_linear(x, ids, groups, tensors, bias, scheme)


def _project(product: Product, x: Tensor, expert_ids: Tensor, module: Any, name: str) -> Tensor:
    """Multiply x [tokens, k] or [pairs, k] by the weight `name` of each pair's expert: [pairs, n]."""
    weight: Any = getattr(module, name)
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    if not isinstance(weight, Tensor):
        return product(x, expert_ids, weight.tensors, bias, weight.scheme)
    matrices = weight.transpose(1, 2) if module.is_transposed else weight
    return product(x.to(weight.dtype), expert_ids, [matrices], bias, "")
