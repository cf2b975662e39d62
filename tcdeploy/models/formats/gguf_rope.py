"""Compares the rotary factors that a GGUF file stores with those that transformers computes from config.json.

    rope_freqs.weight                       llama3: the divisor of each frequency, computed from its parameters
    rope_factors_long and _short.weight     longrope: the lists in the config

The stored factors are used for nothing else. With other factors in config.json, only text after long prompts would be
wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from tcdeploy.models.weights.reader import StoredTensor, read_tensor

LLAMA3_FACTORS = "rope_freqs.weight"
LONGROPE_LISTS = {"rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}
ROPE_TENSORS = {LLAMA3_FACTORS: "llama3", **dict.fromkeys(LONGROPE_LISTS, "longrope")}
TOLERANCE = 1e-3


def rope_parameters(config: PreTrainedConfig) -> Mapping[str, Any]:
    """Parameters of the rotary embedding; in Gemma 3, those of the layers without a window."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = parameters.get("full_attention")
    return nested if isinstance(nested, dict) else parameters


def rope_problem(config: PreTrainedConfig, tensors: Mapping[str, StoredTensor]) -> str:
    """Why a file's factors do not fit a config, as a phrase after the name of the file; "" if they do."""
    parameters = rope_parameters(config)
    for name, kind in ROPE_TENSORS.items():
        if name not in tensors:
            continue
        if (stated := parameters.get("rope_type")) != kind:
            return f"has {name}, but config.json has the rope_type {stated}, not {kind}"
        is_llama3 = name == LLAMA3_FACTORS
        expected = _llama3_factors(config, parameters) if is_llama3 else parameters.get(LONGROPE_LISTS[name])
        if not _are_close(tensors[name], expected or ()):
            return f"has {name} with other rotary factors than config.json describes"
    return ""


def _are_close(stored: StoredTensor, expected: Sequence[float]) -> bool:
    values = read_tensor(stored).float()
    return values.shape == (len(expected),) and torch.allclose(values, torch.tensor(expected), rtol=TOLERANCE)


def _llama3_factors(config: PreTrainedConfig, parameters: Mapping[str, Any]) -> list[float]:
    """The divisors: `factor` for long wavelengths, 1 for short ones, and between them for others."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    factor, context = parameters["factor"], parameters["original_max_position_embeddings"]
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    factors: list[float] = []
    for index in range(0, dim, 2):
        turns = context / (2 * math.pi * parameters["rope_theta"] ** (index / dim))  # within the original context
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / (share + (1 - share) / factor))
    return factors
