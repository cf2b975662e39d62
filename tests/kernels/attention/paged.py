"""Sequences in a paged KV cache, and the cases that the attention kernels' tests share.

All caches are NaN outside the written slots, and block tables point at NaN blocks past a sequence's end, so reading one
key too many fails every test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

# Absolute and relative. float32: sums in another order; otherwise the weights and the output round once (8, 11 bits).
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True)
class Case:
    head_dim: int = 64
    v_head_dim: int = 0  # 0: same as head_dim
    group: int = 1
    kv_heads: int = 2
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def heads(self) -> int:
        return self.group * self.kv_heads

    def options(self, device: str) -> tuple[float, int, float, Tensor | None]:
        """scale, window, softcap, sinks. The sinks are large enough to take half of the softmax weight or more."""
        sinks = torch.linspace(-1, 5, self.heads, dtype=self.dtype, device=device) if self.sinks else None
        return self.head_dim**-0.5, self.window, self.softcap, sinks


CASES = {
    "heads of 32": Case(head_dim=32, block_size=32),
    "heads of 64, groups of 3": Case(group=3),
    "heads of 80": Case(head_dim=80),
    "heads of 96, groups of 4": Case(head_dim=96, group=4, kv_heads=1),
    "heads of 128, groups of 7": Case(head_dim=128, group=7, kv_heads=1, block_size=32),
    "heads of 256": Case(head_dim=256, kv_heads=1),
    "heads of 512": Case(head_dim=512, kv_heads=1),
    "groups of 8": Case(group=8, kv_heads=1),
    "groups of 17": Case(head_dim=16, group=17, kv_heads=1),
    "blocks larger than a tile": Case(block_size=256),
    "a window of one key": Case(window=1),
    "a window smaller than a tile": Case(group=3, window=7),
    "a window of whole tiles": Case(head_dim=128, window=64, block_size=32),
    "a window across tiles": Case(window=50),
    "a window that decode splits": Case(window=130, sinks=True),
    "a window larger than all": Case(window=5000),
    "softcap": Case(softcap=1.5, group=3),
    "sinks": Case(sinks=True, group=3),
    "sinks, softcap and window": Case(sinks=True, softcap=2.0, window=33, group=2, block_size=32),
    "values smaller than keys": Case(head_dim=96, v_head_dim=32),
    "values larger than keys": Case(head_dim=32, v_head_dim=80),
    "bfloat16": Case(head_dim=128, group=4, dtype=torch.bfloat16),
    "bfloat16, everything": Case(sinks=True, softcap=2.0, window=70, group=3, dtype=torch.bfloat16),
    "bfloat16, heads of 256": Case(head_dim=256, kv_heads=1, group=2, dtype=torch.bfloat16),
    "bfloat16, heads of 512": Case(head_dim=512, kv_heads=1, group=4, dtype=torch.bfloat16),
    "float16": Case(group=4, dtype=torch.float16),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())

some_models = pytest.mark.parametrize(
    "case",
    [
        Case(head_dim=128, kv_heads=8, group=4, dtype=torch.bfloat16),
        Case(head_dim=256, kv_heads=4, group=2, dtype=torch.bfloat16, window=1024, softcap=50.0),
        Case(head_dim=512, kv_heads=4, group=8, dtype=torch.bfloat16),
        Case(head_dim=192, v_head_dim=128, kv_heads=16, dtype=torch.bfloat16, sinks=True),
        pytest.param(Case(head_dim=256, kv_heads=1), marks=pytest.mark.long),
        Case(head_dim=512, kv_heads=1),
    ],
    ids=["llama", "gemma", "gemma 4", "deepseek with sinks", "float32", "float32 of 512"],
)


class PagedSequences(NamedTuple):
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor

    def slots(self, row: int, start: int, stop: int) -> Tensor:
        """The slots of one sequence's tokens [start, stop)."""
        block_size = self.k_cache.shape[1]
        tokens = torch.arange(start, stop, device=self.block_table.device)
        return self.block_table[row, tokens // block_size].long() * block_size + tokens % block_size


def make_paged_sequences(case: Case, lengths: list[int], device: str) -> PagedSequences:
    """Sequences of these lengths in shuffled blocks. All other slots are NaN, and no sequence uses block 0."""
    torch.manual_seed(0)
    width = -(-max(lengths) // case.block_size) + 2
    blocks = 1 + torch.randperm(len(lengths) * width, dtype=torch.int32)
    in_use = torch.arange(width) * case.block_size < torch.tensor(lengths)[:, None]
    shape = (len(lengths) * width + 1, case.block_size, case.kv_heads)
    k_cache = torch.full((*shape, case.head_dim), float("nan"), dtype=case.dtype)
    v_cache = torch.full((*shape, case.v_head_dim or case.head_dim), float("nan"), dtype=case.dtype)
    block_table = torch.where(in_use, blocks.view(len(lengths), width), 0)
    sequences = PagedSequences(k_cache, v_cache, block_table, torch.tensor(lengths, dtype=torch.int32))
    for row, length in enumerate(lengths):
        for cache in (k_cache, v_cache):
            slots = cache.flatten(0, 1)
            slots[sequences.slots(row, 0, length)] = torch.randn(length, *slots.shape[1:]).to(case.dtype)
    return PagedSequences(*(tensor.to(device) for tensor in sequences))


def make_queries(case: Case, tokens: int, device: str) -> Tensor:
    return torch.randn(tokens, case.heads, case.head_dim).to(case.dtype).to(device)


def cu_seqlens(lengths: list[int], device: str) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


def expected(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """The output of a reference function, computed on the CPU."""
    return function(*(arg.cpu() if isinstance(arg, Tensor) else arg for arg in args))


def assert_agrees(actual: Tensor, reference: Tensor) -> None:
    tolerance = TOLERANCE[reference.dtype]
    assert_close(actual.cpu(), reference, atol=tolerance, rtol=tolerance)
