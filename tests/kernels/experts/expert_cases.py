"""Weights of experts, routings and products with them, shared by the tests of their kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tcdeploy.planning.schemes import SCHEMES
from tests.kernels.linear.matmul_cases import rand
from tests.kernels.linear.scheme_cases import CASES, weight_tensors

DENSE = ("dense", "dense transposed")
EXPERT_CASES = (*DENSE, *CASES)
EXPERTS, N, K = 5, 32, 192
ROUTINGS = {  # [tokens, top_k]
    "one pair": [[3]],
    "one token": [[4, 1]],
    "three tokens": [[3, 0], [4, 3], [0, 3]],
    "top_k 1": [[2], [0], [2], [4], [2]],
    "some experts idle": [[3, 0], [0, 3], [3, 4], [0, 4], [3, 0], [4, 3], [0, 3]],
    "all pairs on the last expert": [[4, 4]] * 9 + [[4, 4]] * 8,
    "all pairs on the first expert": [[0]] * 33,
    "a whole block and one pair": [[1]] * 17 + [[0]],
    "two whole blocks": [[2, 3]] * 16,
    "three slots": [[i % 5, (i * i + 1) % 5, (3 * i + 2) % 5] for i in range(23)],
}


class Product(NamedTuple):
    """The arguments of `expert_linear` except for the groups."""

    x: Tensor
    expert_ids: Tensor
    tensors: list[Tensor]
    bias: Tensor | None
    scheme: str


def scheme_of(case: str) -> str:
    return "" if case in DENSE else CASES[case][0]


def expert_tensors(
    case: str, experts: int = EXPERTS, n: int = N, k: int = K, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """Weights [experts, n, k] that differ much from each other, also in their scales."""
    if case == "dense":
        return [rand(experts, n, k, dtype=dtype)]
    if case == "dense transposed":
        return [rand(experts, k, n, dtype=dtype).transpose(1, 2)]
    joined = weight_tensors(case, n * experts, k)
    columns = [torch.stack([torch.randperm(k).int() for _ in range(experts)])] if "permuted" in case else []
    if case == "fp8_block":  # the last block of an expert may be partial
        joined[1] = torch.exp2(torch.rand(experts * -(-n // 128), -(-k // 128)) * 5 - 8)
    stored = joined[:-1] if columns else joined
    return [tensor.view(experts, -1, *tensor.shape[1:]) for tensor in stored] + columns


def expert_weight(tensors: list[Tensor], expert: int, scheme: str, dtype: torch.dtype) -> Tensor:
    """The dense weight [n, k] of one expert."""
    parts = [tensor[expert] for tensor in tensors]
    return SCHEMES[scheme].dequantise(parts, dtype) if scheme else parts[0].to(dtype)


def product(
    case: str, routing: list[list[int]], with_bias: bool = True, row_per_pair: bool = False,
    dtype: torch.dtype = torch.bfloat16, device: str = "cpu", experts: int = EXPERTS, n: int = N, k: int = K,
) -> Product:  # fmt: skip
    torch.manual_seed(7)
    expert_ids = torch.tensor(routing)
    tensors = expert_tensors(case, experts, n, k, dtype)
    size = expert_weight(tensors, 0, scheme_of(case), torch.float32).std().item()
    rows = expert_ids.numel() if row_per_pair else len(expert_ids)
    x = (torch.randn(rows, k) / (size * k**0.5)).to(device, dtype)
    bias = (torch.randn(experts, n) * 3).to(device, dtype) if with_bias else None
    return Product(x, expert_ids.to(device), [tensor.to(device) for tensor in tensors], bias, scheme_of(case))


def expected(case: Product) -> Tensor:
    """A loop over pairs, in float64, rounded once."""
    slots = case.expert_ids.numel() // len(case.x)
    weights = {
        expert: expert_weight(case.tensors, expert, case.scheme, torch.float64)
        for expert in case.expert_ids.unique().tolist()
    }
    rows = []
    for pair, expert in enumerate(case.expert_ids.flatten().tolist()):
        y = weights[expert] @ case.x[pair // slots].double()
        rows.append(y if case.bias is None else y + case.bias[expert].double())
    return torch.stack(rows).to(case.x.dtype)
