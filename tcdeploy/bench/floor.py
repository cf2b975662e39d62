"""The speed of light of this machine, and what a step would take at it.

A decode step reads every weight once and every key in the context once, so its floor is bytes over copy bandwidth. A
prefill multiplies every weight with every token: its floor is arithmetic over the rate of a large matrix product, or
the reading of the weights, whichever takes longer. Both rates are measured in the run that uses them, before a weight
is loaded, because machines of one kind differ by several per cent.

Left out, so that no floor is too high: attention's own arithmetic, activations, and the embedding that is only looked
up. The head runs on the last token of a prompt alone. A mixture of experts has no floor here: which experts a batch
wakes depends on its tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from tcdeploy.bench.stats import intervals, median
from tcdeploy.bench.timing import Timestamps
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.memory import DTYPE_BYTES

WARMUP_SECONDS = 0.3  # clocks rise under load
REPEATS = 9
COPY_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}
MATRIX_SIZE = {"cuda": 8192, "cpu": 1024}
EXPERT_COUNT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class Rates:
    """Medians on this machine. `copy` counts bytes read and bytes written; `matmul` is in the plan's compute_dtype."""

    copy_bytes_per_second: float
    copy_bytes: int
    matmul_flop_per_second: float
    matrix_size: int
    dtype: str


class WeightSizes(NamedTuple):
    """What the parts of a model weigh. `step_bytes` are read by every step, however many tokens it has."""

    step_bytes: int
    body_parameters: int  # neither the input embedding nor the head
    is_dense: bool


class DecodeFloor(NamedTuple):
    bytes_read: int
    floor_ms: float | None  # None: a mixture of experts


def measure_rates(device: str, dtype: str) -> Rates:
    """Takes about 2 s, and on a GPU 4 GiB for a moment (less where less is free)."""
    size = COPY_BYTES[device]
    if device == "cuda":
        size = min(size, torch.cuda.mem_get_info()[0] // 4)
    edge = MATRIX_SIZE[device]
    copy_rate = 2 * size / _copy_seconds(device, size)
    rates = Rates(copy_rate, size, 2 * edge**3 / _matmul_seconds(device, edge, dtype), edge, dtype)
    if device == "cuda":
        torch.cuda.empty_cache()
    return rates


def count_weights(model: PreTrainedModel, plan_weight_bytes: int) -> WeightSizes:
    """A tied embedding is read as the head; an untied one only looked up."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    rows = embedding.weight
    is_tied = head is None or head.weight is rows or head.weight.data_ptr() == rows.data_ptr()
    looked_up = 0 if is_tied else rows.numel() * rows.element_size()
    total = plan_weight_bytes // rows.element_size()
    body = total - rows.numel() - (0 if is_tied else head.weight.numel())
    return WeightSizes(plan_weight_bytes - looked_up, body, not _has_experts(model.config))


def kv_read_bytes(architecture: Architecture, kv_dtype: str, context: int) -> int:
    """K and V that one sequence's decode step reads: of a layer with a window, no more than the window."""
    return DTYPE_BYTES[kv_dtype] * sum(
        spec.kv_elements_per_token * min(context, spec.window or context) for spec in architecture.attention_layers
    )


def decode_floor(
    weights: WeightSizes, architecture: Architecture, kv_dtype: str, rates: Rates, batch: int, context: int
) -> DecodeFloor:
    bytes_read = weights.step_bytes + batch * kv_read_bytes(architecture, kv_dtype, context)
    return DecodeFloor(bytes_read, bytes_read / rates.copy_bytes_per_second * 1e3 if weights.is_dense else None)


def prefill_floor_ms(tokens: int, rates: Rates, weights: WeightSizes) -> float | None:
    """Of a prompt alone; the larger of arithmetic and reading."""
    if not weights.is_dense:
        return None
    arithmetic = 2 * weights.body_parameters * tokens / rates.matmul_flop_per_second
    return max(arithmetic, weights.step_bytes / rates.copy_bytes_per_second) * 1e3


def share_of_floor(floor_ms: float | None, ms: float) -> float | None:
    """1 is the floor itself; 0.5 takes twice as long."""
    return None if floor_ms is None else floor_ms / ms


def _has_experts(config: object) -> bool:
    text_config = getattr(config, "text_config", config)
    return any((getattr(text_config, name, None) or 0) > 1 for name in EXPERT_COUNT_KEYS)


def _copy_seconds(device: str, size: int) -> float:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _median_after_warmup(device, lambda: target.copy_(source))


def _matmul_seconds(device: str, edge: int, dtype: str) -> float:
    left = torch.randn(edge, edge, dtype=getattr(torch, dtype), device=device)
    out = torch.empty_like(left)
    return _median_after_warmup(device, lambda: torch.mm(left, left, out=out))


def _median_after_warmup(device: str, call: Callable[[], object]) -> float:
    start = time.perf_counter()
    while time.perf_counter() - start < WARMUP_SECONDS:
        call()
        Timestamps(device)  # waits: a queue of launches would outlast the warming by far
    timestamps = Timestamps(device)
    for _ in range(REPEATS):
        call()
        timestamps.record()
    return median(intervals([0.0, *timestamps.seconds()]))
