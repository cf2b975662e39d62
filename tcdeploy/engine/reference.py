"""Computes the reference logits of the parity check with transformers' own attention, uncompiled.

The reference shares only the weights with a bucket: no compiled program, paged cache or custom op is used. Each linear
layer reads its slice of the packed weights (models/packed_linears.py). Each prompt runs alone, from its first token.

Two passes are made: one in the compute dtype (eager), and one in a higher precision (precise), in which rounding errors
are negligible. The distance between them is the error that the dtype causes on this model.
"""

from __future__ import annotations

import itertools
import logging
from typing import NamedTuple

import torch
from torch import Tensor

from tcdeploy.engine import precise_math
from tcdeploy.engine.check_prompts import CheckPrompts, PromptPrefix, evenly_spaced
from tcdeploy.engine.parity import row_distances
from tcdeploy.engine.runner import ModelRunner
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.memory import MAX_PROMPT_TOKENS

HIGHER_PRECISION = {"float32": "float64", "bfloat16": "float32", "float16": "float32"}
SAMPLED_ROWS = 8  # of each prompt
SAMPLED_ROWS_WITH_EXPERTS = 32
log = logging.getLogger("tcdeploy.engine")


class PrefixLogits(NamedTuple):
    """Logits [vocab] after a prefix, in host memory. `precise` is float32 or float64."""

    eager: Tensor
    precise: Tensor


class ReferenceLogits(NamedTuple):
    """The reference of all buckets.

    dtype: that of the precise logits; the compute dtype if they could not be computed in a higher one.
    sampled_distances: [rows, 2] distances of eager from precise logits in a sample of other rows
        (parity.row_distances).
    """

    rows: dict[PromptPrefix, PrefixLogits]
    dtype: str
    sampled_distances: Tensor


def reference_attn_implementation(architecture: Architecture) -> str:
    """The attention implementation of the reference: sdpa, or eager if the model needs soft-capping or sinks."""
    plain = all(not spec.softcap and not spec.has_sinks for spec in architecture.attention_layers)
    return "sdpa" if plain else "eager"


def compute_references(runner: ModelRunner, prompts: CheckPrompts, attn_implementation: str) -> ReferenceLogits:
    """The logits after all prefixes that any bucket is checked on."""
    rows: dict[PromptPrefix, PrefixLogits] = {}
    sampled_distances: list[Tensor] = []
    dtype = HIGHER_PRECISION[runner.plan.compute_dtype]
    has_experts = any("expert" in name for name, _ in runner.model.named_parameters())
    all_prefixes = prompts.all_prefixes()
    min_length = _min_prompt_length(all_prefixes) if runner.plan.device == "cuda" else 0
    for _, group in itertools.groupby(all_prefixes, key=lambda prefix: prefix.prompt):
        prefixes = list(group)
        longest = prefixes[-1]
        token_ids = prompts.token_ids(longest._replace(length=max(longest.length, min_length)))
        sampled = evenly_spaced(len(token_ids), SAMPLED_ROWS_WITH_EXPERTS if has_experts else SAMPLED_ROWS)
        positions = [prefix.length - 1 for prefix in prefixes] + sampled
        eager = runner.reference_logits(token_ids, positions, attn_implementation)
        precise = _precise_logits(runner, token_ids, positions, attn_implementation)
        if precise is None:
            precise, dtype = eager.float(), runner.plan.compute_dtype
        sampled_distances.append(row_distances(eager[len(prefixes) :], precise[len(prefixes) :]))
        eager, precise = eager[: len(prefixes)].cpu(), precise[: len(prefixes)].cpu()
        rows |= {prefix: PrefixLogits(eager[row], precise[row]) for row, prefix in enumerate(prefixes)}
    if runner.plan.device == "cuda":
        torch.cuda.empty_cache()
    return ReferenceLogits(rows, dtype, torch.cat(sampled_distances))


def _min_prompt_length(prefixes: list[PromptPrefix]) -> int:
    """The length to which shorter prompts are extended on a GPU.

    A new length may need other cuBLAS kernels, and loading them takes about 1 s on an H100. Appended tokens do not
    change the logits of a prefix.
    """
    return max(prefix.length for prefix in prefixes if prefix.length <= MAX_PROMPT_TOKENS)


def _precise_logits(
    runner: ModelRunner, token_ids: list[int], positions: list[int], attn_implementation: str
) -> Tensor | None:
    """None if the model cannot be computed in the higher precision, for example because of a kernel of its own."""
    compute_dtype = runner.plan.compute_dtype
    if not precise_math.supported():
        return None
    low, high = getattr(torch, compute_dtype), getattr(torch, HIGHER_PRECISION[compute_dtype])
    try:
        with precise_math.precise_math(low, high):
            return runner.reference_logits(token_ids, positions, attn_implementation)
    except Exception as error:  # torch and the model's own code raise many types
        log.warning(
            "the parity check uses fixed tolerances, because the reference cannot be computed in %s: %s",
            HIGHER_PRECISION[compute_dtype],
            str(error).strip().split("\n")[0][:200],
        )
        return None
