"""Baselines on the same weights: the transformers model, run by an eager loop or by `generate`.

`eager` is a plain loop with SDPA attention, a dynamic cache and one forward call per token. `generate` is the fastest
documented path of transformers: a static cache, and a decode step that `generate` compiles on a GPU (not on a CPU).
The third baseline, `region`, runs this project's own pipeline with other settings; see session.py.

Both are timed by events recorded on the device's stream, so that timing adds no synchronization. Neither supports
continuous batching: all sequences of a batch start and end together.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, PreTrainedConfig, PreTrainedModel

from tcdeploy.bench.timing import Timestamps
from tcdeploy.errors import TcdeployError
from tcdeploy.kernels.experts.interface import use_experts_function
from tcdeploy.models.convert.scheme_weight import SchemeExperts
from tcdeploy.models.load import quiet_transformers
from tcdeploy.models.load_model import load_model
from tcdeploy.planning.plan import Plan

ATTN_IMPLEMENTATION = "sdpa"


class BaselineModel:
    """An unmodified transformers model. `name` is `eager` or `generate`."""

    def __init__(self, name: str, model: PreTrainedModel, plan: Plan) -> None:
        self.name = name
        self.model = model
        self.plan = plan
        self._warmed_shapes: set[tuple[int, int, int]] = set()
        self._run: Callable[[PreTrainedModel, Tensor, int, Timestamps], None] = _RUNNERS[name]

    @property
    def note(self) -> str:
        """A remark to print below the results, or an empty string."""
        if self.name == "generate" and self.plan.device == "cpu":
            return "generate: not compiled: transformers compiles the decode step on GPUs only"
        return ""

    def token_times(self, prompts: list[list[int]], new_tokens: int) -> list[float]:
        """Seconds from the call to each new token of the batch. All prompts have the same length.

        The first call with a new shape is preceded by an untimed run, in which `generate` compiles.
        """
        shape = (len(prompts), len(prompts[0]), new_tokens)
        if shape not in self._warmed_shapes:
            self._warmed_shapes.add(shape)
            self._run_timed(prompts, new_tokens)
        return self._run_timed(prompts, new_tokens)

    def first_call_seconds(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Wall time of one call up to its last token, including compilation if the shape is new."""
        self._warmed_shapes.add((len(prompts), len(prompts[0]), new_tokens))
        start = time.perf_counter()
        self._run_timed(prompts, new_tokens)
        return time.perf_counter() - start

    def _run_timed(self, prompts: list[list[int]], new_tokens: int) -> list[float]:
        ids = torch.tensor(prompts, device=self.plan.device)
        timestamps = Timestamps(self.plan.device)
        with torch.no_grad(), quiet_transformers():
            self._run(self.model, ids, new_tokens, timestamps)
        seconds = timestamps.seconds()
        if len(seconds) != new_tokens:
            raise TcdeployError(f"it generated {len(seconds)} tokens instead of {new_tokens}")
        return seconds


def load_baseline(name: str, plan: Plan, config: PreTrainedConfig) -> BaselineModel:
    """Load the plan's weights. Random weights are equal too, since they come from a fixed seed."""
    model = load_model(plan, config, ATTN_IMPLEMENTATION, packed_linears=())
    if any(isinstance(module, SchemeExperts) for module in model.modules()):
        use_experts_function(model)  # transformers' own functions only read dense experts
    return BaselineModel(name, model, plan)


def _run_eager(model: PreTrainedModel, ids: Tensor, new_tokens: int, timestamps: Timestamps) -> None:
    last_logits = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    cache = DynamicCache(config=model.config)
    for _ in range(new_tokens):
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, **last_logits).logits
        ids = logits[:, -1:].argmax(dim=-1)
        timestamps.record()


def _run_generate(model: PreTrainedModel, ids: Tensor, new_tokens: int, timestamps: Timestamps) -> None:
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None,
        pad_token_id=0, cache_implementation="static",
        logits_processor=LogitsProcessorList([_TimestampProcessor(timestamps)]),
    )  # fmt: skip


class _TimestampProcessor(LogitsProcessor):
    """Records a timestamp per token: `generate` calls it once per step, after launching the forward pass."""

    def __init__(self, timestamps: Timestamps) -> None:
        self._timestamps = timestamps

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self._timestamps.record()
        return scores


_RUNNERS = {"eager": _run_eager, "generate": _run_generate}
