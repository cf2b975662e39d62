"""The sampling parameters of the decode rows, as static tensors that the host writes on admission."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MAX_LISTED_TOP_K = 256  # up to this k, the tokens that top-k keeps are listed (sample_triton.py)


class Features(NamedTuple):
    """Features that any row of the batch uses. A row's tokens do not depend on the features of other rows."""

    penalties: bool  # repetition, presence or frequency
    filters: bool  # top-k, top-p or min-p
    biases: bool = False
    masks: bool = False  # constrained rows
    # Of the filters, for the Triton kernels:
    small_top_k: bool = True  # of at most MAX_LISTED_TOP_K
    large_top_k: bool = True
    wide_top_p: bool = True  # top-p in a row without top-k, or with one above MAX_LISTED_TOP_K

    @property
    def change_logits(self) -> bool:
        return self.penalties or self.biases or self.masks


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters and penalty counts of each decode row."""

    temperature: Tensor  # [max batch + 1] float32; 0 is greedy
    top_k: Tensor  # [max batch + 1] int64; 0 keeps all
    top_p: Tensor  # [max batch + 1] float32
    min_p: Tensor  # [max batch + 1] float32
    seeds: Tensor  # [max batch + 1] int64
    changes_logits: Tensor  # [max batch + 1] bool: the row has penalties, biases or a constraint
    repetition: Tensor  # [max batch + 1] float32
    presence: Tensor  # [max batch + 1] float32
    frequency: Tensor  # [max batch + 1] float32
    output_counts: Tensor  # [max batch + 1, vocab] int16: occurrences in the output, at most COUNT_LIMIT
    in_prompt: Tensor  # [max batch + 1, vocab] bool
    bias_ids: Tensor  # [max batch + 1, max biases] int64
    bias_values: Tensor  # [max batch + 1, max biases] float32: added to the logit of that id
    bias_ends: Tensor  # [max batch + 1, max biases] int64: first position at which the bias no longer applies

    def tensors_to_gather(self, features: Features) -> list[Tensor]:
        """Tensors to gather when rows move: the one-dimensional ones, and the wide ones whose feature is used."""
        penalties = [self.output_counts, self.in_prompt] if features.penalties else []
        biases = [self.bias_ids, self.bias_values, self.bias_ends] if features.biases else []
        return [tensor for tensor in vars(self).values() if tensor.ndim == 1] + penalties + biases


def make_sampling_rows(
    num_rows: int, vocab_size: int, max_biases: int, device: torch.device | str
) -> SamplingRows:  # fmt: skip
    """Rows that sample greedily, without penalties, filters or biases."""

    def full(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.full((num_rows, *shape), value, dtype=dtype, device=device)

    return SamplingRows(
        temperature=full(0, torch.float32),
        top_k=full(0, torch.int64),
        top_p=full(1, torch.float32),
        min_p=full(0, torch.float32),
        seeds=full(0, torch.int64),
        changes_logits=full(False, torch.bool),
        repetition=full(1, torch.float32),
        presence=full(0, torch.float32),
        frequency=full(0, torch.float32),
        output_counts=full(0, torch.int16, vocab_size),
        in_prompt=full(False, torch.bool, vocab_size),
        bias_ids=full(0, torch.int64, max_biases),
        bias_values=full(0, torch.float32, max_biases),
        bias_ends=full(0, torch.int64, max_biases),
    )
