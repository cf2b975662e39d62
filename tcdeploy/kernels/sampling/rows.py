"""The sampling parameters of the decode rows, as static tensors that the host writes on admission."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

MAX_LISTED_TOP_K = 256  # up to this k, the tokens that top-k keeps are in the list of candidates (sample_triton.py)

# The scalars of a row, with their values in a row that samples greedily, without penalties, filters or biases
FLOATS = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0, "presence": 0.0, "frequency": 0.0}
INTEGERS = {"top_k": 0.0, "seeds": 0.0, "changes_logits": 0.0}


class Features(NamedTuple):
    """Features that any row of the batch uses. A row's tokens do not depend on the features of other rows."""

    penalties: bool  # repetition, presence or frequency
    filters: bool  # top-k, top-p or min-p
    biases: bool = False
    masks: bool = False  # constrained rows
    # Of the filters, for the Triton kernels:
    small_top_k: bool = True  # a k of at most MAX_LISTED_TOP_K
    large_top_k: bool = True  # a larger k
    wide_top_p: bool = True  # top-p in a row without top-k, or with a k above MAX_LISTED_TOP_K

    @property
    def change_logits(self) -> bool:
        return self.penalties or self.biases or self.masks


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters and penalty counts of each decode row.

    The scalars of a row are in two tensors, so that they are written, and moved with the row, in few launches.
    """

    floats: Tensor  # [len(FLOATS), max batch + 1] float32
    integers: Tensor  # [len(INTEGERS), max batch + 1] int64
    output_counts: Tensor  # [max batch + 1, vocab] int16: occurrences in the output, at most 2^15 - 1
    in_prompt: Tensor  # [max batch + 1, vocab] bool
    bias_ids: Tensor  # [max batch + 1, max biases] int64
    bias_values: Tensor  # [max batch + 1, max biases] float32: added to the logit of that id
    bias_ends: Tensor  # [max batch + 1, max biases] int64: first position at which the bias no longer applies

    # The rows of `floats` and `integers`, each [max batch + 1]
    temperature: Tensor = field(init=False)  # 0 is greedy
    top_p: Tensor = field(init=False)
    min_p: Tensor = field(init=False)
    repetition: Tensor = field(init=False)
    presence: Tensor = field(init=False)
    frequency: Tensor = field(init=False)
    top_k: Tensor = field(init=False)  # 0 keeps all
    seeds: Tensor = field(init=False)
    changes_logits: Tensor = field(init=False)  # 1 with penalties, biases or a constraint, else 0

    def __post_init__(self) -> None:
        for names, columns in ((FLOATS, self.floats), (INTEGERS, self.integers)):
            for name, column in zip(names, columns, strict=True):
                object.__setattr__(self, name, column)

    def tensors_to_gather(self, features: Features) -> list[Tensor]:
        """Tensors [max batch + 1, ...] to gather when rows move: the scalars, and those of features that are used."""
        penalties = [self.output_counts, self.in_prompt] if features.penalties else []
        biases = [self.bias_ids, self.bias_values, self.bias_ends] if features.biases else []
        return [self.floats.T, self.integers.T, *penalties, *biases]


def make_sampling_rows(
    num_rows: int, vocab_size: int, max_biases: int, device: torch.device | str
) -> SamplingRows:  # fmt: skip
    """Rows that sample greedily, without penalties, filters or biases."""

    def scalars(defaults: dict[str, float], dtype: torch.dtype) -> Tensor:
        aligned = -(-num_rows // 4) * 4  # Triton loads faster from addresses that are a multiple of 16 bytes
        values = torch.tensor([*defaults.values()], dtype=dtype, device=device)
        return values[:, None].repeat(1, aligned)[:, :num_rows]

    def zeros(dtype: torch.dtype, width: int) -> Tensor:
        return torch.zeros(num_rows, width, dtype=dtype, device=device)

    return SamplingRows(
        floats=scalars(FLOATS, torch.float32),
        integers=scalars(INTEGERS, torch.int64),
        output_counts=zeros(torch.int16, vocab_size),
        in_prompt=zeros(torch.bool, vocab_size),
        bias_ids=zeros(torch.int64, max_biases),
        bias_values=zeros(torch.float32, max_biases),
        bias_ends=zeros(torch.int64, max_biases),
    )
