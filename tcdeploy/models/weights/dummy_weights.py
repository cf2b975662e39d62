"""Random weights under which every part of a model affects its logits (`--load-format dummy`).

transformers initialises a model for training: residual branches are small, norms and biases are neutral, and attention
is almost uniform. Such a model gives nearly the same logits with a layer or a bias left out, or with wrong positions,
so a parity check on it proves little. The weights drawn here keep the activations of every layer at unit scale:

- A matrix preserves the scale of its input: its standard deviation is 1 / sqrt(inputs).
- Queries and keys are scaled so that attention scores have the standard deviation ATTENTION_STD. Larger scores would
  amplify bfloat16 rounding errors from layer to layer and hide faults, so only the first SOFTCAPPED_LAYERS layers have
  scores near their soft-cap. Attention averages many values; ATTENTION_OUTPUT_GAIN makes its output match the MLP's.
- Logits have the standard deviation LOGITS_STD, and more if they are soft-capped.
- Norms, biases, sinks and other vectors differ from their neutral values, and selected experts have different weights.
- Embeddings have unequal norms. Some are so small that the epsilon of the first norm matters.

A tensor that has values starts from transformers' own initialisation, so zeros that it sets (padding) stay zeros.
Matrices may be on the meta device instead: `make_matrix` then creates them one by one (dummy_model.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tcdeploy.torch_compat.dynamo.fake_tensors import has_data

ATTENTION_STD = 1.5
ATTENTION_OUTPUT_GAIN = 2.0
LOGITS_STD = 1.5
SOFTCAPPED_LAYERS = 2
SOFTCAP_SHARE = 0.2  # standard deviation of soft-capped scores and logits, as a share of the cap
ROUTER_GAIN = 2.0
VECTOR_NOISE = 0.25  # standard deviation of the noise added to norms and biases
SINK_NOISE = 1.0
SMALLEST_EMBEDDING = 1 / 64  # of the largest
QUERY_OR_KEY = re.compile(r"(^|[._])(q|k|query|key)([._](proj|norm|layernorm|ln|a_proj|b_proj)|_lin|$)|qk_norm")
FUSED_QUERY_AND_KEY = re.compile(r"qkv|c_attn|query_key_value", re.IGNORECASE)
ATTENTION_OUTPUT = re.compile(r"attn\.(.*\.)?(c_proj|dense|out_proj|o_proj|wo)$|attention\.(.*\.)?(dense|out_proj|wo)$")
ROUTER = re.compile(r"(^|[._])(gate|router)(\.|$)|router")
FROM_HIDDEN = re.compile(r"gate|up|w1|w3|fc1|c_fc|in_proj")

# (path of the module, module, name of its parameter, standard deviation): replaces a matrix on the meta device.
MakeMatrix: TypeAlias = Callable[[str, nn.Module, str, float], None]


@torch.no_grad()
def draw_dummy_weights(model: PreTrainedModel, make_matrix: MakeMatrix | None = None) -> None:
    """Rescale and perturb the weights of an initialised model in place, module by module.

    make_matrix: for models with matrices on the meta device, each of which belongs to one module. Reproducible for one
    torch version and device if the caller seeds torch's random numbers.
    """
    head_weight: Any = getattr(model.get_output_embeddings(), "weight", None)
    is_tied = any(module.weight is head_weight for module in model.modules() if isinstance(module, nn.Embedding))
    logits_std = max(LOGITS_STD, SOFTCAP_SHARE * _softcap(model, "final_logit_softcapping"))
    gains = _attention_gains(model)
    drawn: set[int] = set()
    for path, module in list(model.named_modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in drawn or not parameter.is_floating_point():
                continue
            drawn.add(id(parameter))
            if parameter.ndim < 2 or name.endswith("bias"):  # experts have a matrix of biases
                _perturb(parameter, name, _gain(path, gains))
                continue
            if isinstance(module, nn.Embedding):
                _vary_norms(parameter)
                std = logits_std / math.sqrt(parameter.shape[-1]) if is_tied else 1.0
            elif parameter is head_weight:
                std = logits_std / math.sqrt(parameter.shape[-1])
            else:
                gain = _gain(f"{path}.{name}".removesuffix(".weight"), gains)
                std = gain / math.sqrt(_fan_in(module, name, parameter, model))
            if make_matrix is not None and parameter.is_meta:
                make_matrix(path, module, name, std)
            else:
                _rescale(parameter, std)


def _attention_gains(model: PreTrainedModel) -> dict[str, float]:
    """By path of an attention module: the factor of its queries and keys.

    Scores of queries and keys of unit scale have the standard deviation scaling * sqrt(head_dim).
    """
    softcap = _softcap(model, "attn_logit_softcapping")
    gains: dict[str, float] = {}
    for path, module in model.named_modules():
        scaling, head_dim = getattr(module, "scaling", None), getattr(module, "head_dim", None)
        if isinstance(scaling, float) and isinstance(head_dim, int) and scaling > 0:
            is_capped = len(gains) < SOFTCAPPED_LAYERS
            target = max(ATTENTION_STD, SOFTCAP_SHARE * softcap if is_capped else 0.0)
            gains[path] = math.sqrt(target / (scaling * math.sqrt(head_dim)))
    return gains


def _softcap(model: PreTrainedModel, name: str) -> float:
    return float(getattr(model.config.get_text_config(), name, None) or 0.0)


def _gain(path: str, attention_gains: dict[str, float]) -> float:
    """The factor by which a module's weight exceeds unit scale."""
    parent, _, name = path.rpartition(".")
    attention_gain = attention_gains.get(parent)
    if QUERY_OR_KEY.search(name) or FUSED_QUERY_AND_KEY.search(name):
        return attention_gain or math.sqrt(ATTENTION_STD)
    if ATTENTION_OUTPUT.search(path):
        return ATTENTION_OUTPUT_GAIN
    return ROUTER_GAIN if ROUTER.search(name) else 1.0


def _fan_in(module: nn.Module, name: str, weight: Tensor, model: PreTrainedModel) -> int:
    """Inputs of a matrix [out, in], or of experts [experts, out, in] or [experts, in, out].

    GPT-2's Conv1D holds [in, out]. The inputs of experts are recognised by the hidden size and the name.
    """
    if type(module).__name__ == "Conv1D":
        return weight.shape[0]
    if isinstance(module, nn.Linear) or weight.ndim == 2:
        return weight.shape[-1]
    hidden_size = getattr(model.config.get_text_config(), "hidden_size", weight.shape[-1])
    first, last = weight.shape[-2:]
    if hidden_size not in (first, last) or first == last:
        return last
    other = first if last == hidden_size else last
    return int(hidden_size if FROM_HIDDEN.search(name) else other)


def _rescale(weight: Tensor, rms: float) -> None:
    """Give `weight` the root mean square `rms`. A matrix of zeros is drawn anew. One without data is left as it is."""
    if not has_data(weight):
        return
    current = torch.linalg.vector_norm(weight, dtype=torch.float32).item() / math.sqrt(weight.numel())
    if current > 0.0 and math.isfinite(current):
        weight.mul_(rms / current)
    else:
        weight.normal_(0.0, rms)


def _vary_norms(embedding: Tensor) -> None:
    """Multiply each row by a random factor between SMALLEST_EMBEDDING and 1, distributed log-uniformly."""
    exponents = torch.rand(embedding.shape[0], 1, dtype=torch.float32, device=embedding.device)
    embedding.mul_(torch.pow(SMALLEST_EMBEDDING, exponents).to(embedding.dtype))


def _perturb(vector: Tensor, name: str, gain: float) -> None:
    """Add noise. The weight of a norm, which computes x * weight or x * (1 + weight), is multiplied by `gain` first."""
    if not has_data(vector):
        return
    if name == "weight" and gain != 1.0:
        is_zero_centered = not vector.any().item()
        if is_zero_centered:
            vector.add_(gain - 1.0)
        else:
            vector.mul_(gain)
    vector.add_(torch.randn_like(vector) * (SINK_NOISE if "sink" in name else VECTOR_NOISE))
