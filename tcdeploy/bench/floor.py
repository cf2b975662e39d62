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

from tcdeploy.planning.architecture import Architecture
from tcdeploy.bench.timing import Marks
from tcdeploy.bench.stats import gaps, median
from tcdeploy.planning.memory import DTYPE_BYTES

WARM_SECONDS = 0.3  # clocks rise under load
REPEATS = 9
COPY_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}
MATRIX_SIZE = {"cuda": 8192, "cpu": 1024}
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class Rates:
    """Medians on this machine. `copy` counts bytes read and bytes written; `matrix` is in the plan's dtype."""

    copy_bytes_per_second: float
    copy_bytes: int
    matrix_flop_per_second: float
    matrix_size: int
    dtype: str


class Reads(NamedTuple):
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
    rates = Rates(copy_rate, size, 2 * edge**3 / _matrix_seconds(device, edge, dtype), edge, dtype)
    if device == "cuda":
        torch.cuda.empty_cache()
    return rates


def weigh(model: PreTrainedModel, plan_weight_bytes: int) -> Reads:
    """A tied embedding is read as the head; an untied one only looked up."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    rows = embedding.weight
    is_tied = head is None or head.weight is rows or head.weight.data_ptr() == rows.data_ptr()
    looked_up = 0 if is_tied else rows.numel() * rows.element_size()
    total = plan_weight_bytes // rows.element_size()
    body = total - rows.numel() - (0 if is_tied else head.weight.numel())
    return Reads(plan_weight_bytes - looked_up, body, not _has_experts(model.config))


def key_bytes(architecture: Architecture, dtype: str, context: int) -> int:
    """K and V that one sequence's decode step reads: of a layer with a window, no more than the window."""
    return DTYPE_BYTES[dtype] * sum(
        facts.kv_values_per_token * min(context, facts.window or context) for facts in architecture.attentions
    )


def decode_floor(
    reads: Reads, architecture: Architecture, dtype: str, rates: Rates, batch: int, context: int
) -> DecodeFloor:
    bytes_read = reads.step_bytes + batch * key_bytes(architecture, dtype, context)
    return DecodeFloor(bytes_read, bytes_read / rates.copy_bytes_per_second * 1e3 if reads.is_dense else None)


def prefill_floor_ms(tokens: int, rates: Rates, reads: Reads) -> float | None:
    """Of a prompt alone; the larger of arithmetic and reading."""
    if not reads.is_dense:
        return None
    arithmetic = 2 * reads.body_parameters * tokens / rates.matrix_flop_per_second
    return max(arithmetic, reads.step_bytes / rates.copy_bytes_per_second) * 1e3


def share_of_floor(floor_ms: float | None, ms: float) -> float | None:
    """1 is the floor itself; 0.5 takes twice as long."""
    return None if floor_ms is None else floor_ms / ms


def _has_experts(config: object) -> bool:
    text_config = getattr(config, "text_config", config)
    return any((getattr(text_config, name, None) or 0) > 1 for name in EXPERT_COUNTS)


def _copy_seconds(device: str, size: int) -> float:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _warm_median(device, lambda: target.copy_(source))


def _matrix_seconds(device: str, edge: int, dtype: str) -> float:
    left = torch.randn(edge, edge, dtype=getattr(torch, dtype), device=device)
    out = torch.empty_like(left)
    return _warm_median(device, lambda: torch.mm(left, left, out=out))


def _warm_median(device: str, call: Callable[[], object]) -> float:
    start = time.perf_counter()
    while time.perf_counter() - start < WARM_SECONDS:
        call()
        Marks(device)  # waits: a queue of launches would outlast the warming by far
    marks = Marks(device)
    for _ in range(REPEATS):
        call()
        marks.mark()
    return median(gaps([0.0, *marks.seconds()]))
