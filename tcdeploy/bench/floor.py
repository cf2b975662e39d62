"""Lower bounds ("floors") for the time of a step, from this machine's memory bandwidth and matmul rate.

A decode step reads all weights and the KV cache of its context once, and reads and writes the state slots of its
sequences, so its floor is those bytes over the copy bandwidth. A prefill also multiplies every weight with every token,
so its floor is the larger of that arithmetic over the rate of a large matmul, and the time to read the weights. Both
rates are measured in the same run, before weights are loaded, because machines of the same kind differ by several
percent.

The floors leave out attention FLOPs, activations and the untied input embedding, and count the LM head as one token
per prompt, so that they are never too high.

A step of a mixture of experts reads the experts that its tokens select. One token selects its top k. For more tokens,
the floor counts the expected number of different experts if each token selects its top k uniformly. Routers prefer some
experts, so a batch may select fewer, and its floor may be too high. `UNIFORM_ROUTING` is printed beside it.
Mixtures whose experts do not support transformers' interface, or whose config states no top k, have no floor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from tcdeploy.bench.stats import intervals, median
from tcdeploy.bench.timing import Timestamps
from tcdeploy.models.convert.scheme_weight import count_elements
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.memory import KV_DTYPE_BYTES
from tcdeploy.torch_compat.transformers.experts_interface import supports_experts_interface

WARMUP_SECONDS = 0.3  # until clocks have risen
REPEATS = 9
COPY_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}
MATRIX_SIZE = {"cuda": 8192, "cpu": 1024}
FP8_SPEED = 2  # peak FLOP/s of the tensor cores in FP8, divided by those in 16-bit formats
EXPERT_COUNT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
TOP_K_KEYS = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
UNIFORM_ROUTING = (
    "floors of several tokens assume that all experts are selected equally often; "
    "a batch that selects fewer experts reads less"
)


@dataclass(frozen=True)
class Rates:
    """Measured medians. Copies count bytes read plus bytes written; matmuls run in the plan's compute_dtype."""

    copy_bytes_per_second: float
    copy_bytes: int
    matmul_flop_per_second: float
    matrix_size: int
    dtype: str


class ExpertSizes(NamedTuple):
    """Sizes of the routed experts of all layers together. A layer has `per_layer`, of which a token selects `top_k`."""

    num_bytes: int
    parameters: int
    per_layer: int
    top_k: int

    def share_read(self, tokens: int) -> float:
        """The expected share of the experts that a step of `tokens` tokens reads: 0 to 1."""
        return 1 - (1 - self.top_k / self.per_layer) ** tokens


class WeightSizes(NamedTuple):
    """Sizes of a model's parts. A step that selects all experts reads `step_bytes`."""

    step_bytes: int
    body_parameters: int  # without the input embedding and the LM head
    experts: ExpertSizes | None = None
    has_floor: bool = True

    def bytes_read(self, tokens: int) -> int:
        unread = 0 if self.experts is None else self.experts.num_bytes * (1 - self.experts.share_read(tokens))
        return self.step_bytes - round(unread)

    @property
    def parameters_per_token(self) -> int:
        """The parameters of the body that multiply a token."""
        if self.experts is None:
            return self.body_parameters
        return self.body_parameters - round(self.experts.parameters * (1 - self.experts.share_read(1)))

    @property
    def notes(self) -> tuple[str, ...]:
        """What to print beside the floors."""
        return () if self.experts is None else (UNIFORM_ROUTING,)


class DecodeFloor(NamedTuple):
    bytes_moved: int  # read and written
    floor_ms: float | None  # None: a mixture without a floor


def measure_rates(device: str, dtype: str) -> Rates:
    """Measure copy and matmul rates. Takes about 2 s, and temporarily up to 4 GiB of GPU memory."""
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
    """A tied embedding counts as read, as the LM head. An untied one does not: a step looks up a few rows only."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings().weight
    is_tied = head is None or any(tensor.data_ptr() == embedding.data_ptr() for tensor in head.parameters())
    unread_bytes = 0 if is_tied else embedding.nbytes
    body_parameters = count_elements(model) - embedding.numel() - (0 if is_tied else count_elements(head))
    experts = _count_experts(model)
    has_floor = experts is not None or not _stated_count(model.config, EXPERT_COUNT_KEYS, minimum=2)
    return WeightSizes(plan_weight_bytes - unread_bytes, body_parameters, experts, has_floor)


def _count_experts(model: PreTrainedModel) -> ExpertSizes | None:
    """None for a dense model, and for a mixture if the number of experts that a token selects is not known."""
    layers: list[Any] = [module for module in model.modules() if supports_experts_interface(module)]
    top_k = _stated_count(model.config, TOP_K_KEYS, minimum=1)
    counts = {layer.num_experts for layer in layers}
    if not top_k or len(counts) != 1:
        return None
    num_bytes = sum(tensor.nbytes for layer in layers for tensor in layer.parameters())
    return ExpertSizes(num_bytes, sum(map(count_elements, layers)), counts.pop(), top_k)


def kv_read_bytes(architecture: Architecture, kv_dtype: str, context: int) -> int:
    """Bytes of K and V that a decode step reads for one sequence; at most the window in sliding-window layers."""
    return KV_DTYPE_BYTES[kv_dtype] * sum(
        spec.kv_elements_per_token * min(context, spec.window or context) for spec in architecture.attention_layers
    )


def decode_floor(weights: WeightSizes, sequence_bytes: int, rates: Rates, batch: int) -> DecodeFloor:
    """`sequence_bytes`: KV cache and state that the step reads and writes for each of its `batch` sequences."""
    num_bytes = weights.bytes_read(batch) + batch * sequence_bytes
    return DecodeFloor(num_bytes, num_bytes / rates.copy_bytes_per_second * 1e3 if weights.has_floor else None)


def prefill_floor_ms(tokens: int, rates: Rates, weights: WeightSizes, in_fp8: bool = False) -> float | None:
    """The floor of prefilling one prompt: the larger of arithmetic and reading the weights.

    `in_fp8`: the products run on FP8 tensor cores, at FP8_SPEED times the measured rate.
    """
    if not weights.has_floor:
        return None
    rate = rates.matmul_flop_per_second * (FP8_SPEED if in_fp8 else 1)
    arithmetic_seconds = 2 * weights.parameters_per_token * tokens / rate
    return max(arithmetic_seconds, weights.bytes_read(tokens) / rates.copy_bytes_per_second) * 1e3


def share_of_floor(floor_ms: float | None, ms: float) -> float | None:
    """The floor over the measured time: 1 at the floor, 0.5 at twice its time."""
    return None if floor_ms is None else floor_ms / ms


def _stated_count(config: object, keys: tuple[str, ...], minimum: int) -> int:
    """The first integer of at least `minimum` under these keys of the text model's config, or 0."""
    text_config = getattr(config, "text_config", config)
    values = (getattr(text_config, key, None) for key in keys)
    return next((value for value in values if isinstance(value, int) and value >= minimum), 0)


def _copy_seconds(device: str, size: int) -> float:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _median_after_warmup(device, lambda: target.copy_(source))


def _matmul_seconds(device: str, edge: int, dtype: str) -> float:
    matrix = torch.randn(edge, edge, dtype=getattr(torch, dtype), device=device)
    out = torch.empty_like(matrix)
    return _median_after_warmup(device, lambda: torch.mm(matrix, matrix, out=out))


def _median_after_warmup(device: str, call: Callable[[], object]) -> float:
    start = time.perf_counter()
    while time.perf_counter() - start < WARMUP_SECONDS:
        call()
        Timestamps(device)  # synchronizes: queued launches would run far beyond the warm-up time
    timestamps = Timestamps(device)
    for _ in range(REPEATS):
        call()
        timestamps.record()
    return median(intervals([0.0, *timestamps.seconds()]))
