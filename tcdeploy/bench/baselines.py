"""What people run without us, on the same weights: transformers' own model, stepped by hand or by its `generate`.

`eager` is the plain loop: sdpa attention, a cache that grows, one forward a token. `generate` is transformers' fastest
documented way: a static cache, and a decode step that `generate` compiles by itself on a GPU (on a CPU it does not).
The third baseline, `region`, is our own pipeline and needs nothing here (session.py).

Both are timed by marks in the device's own order, so that no synchronisation of ours slows them down. Neither knows
continuous batching: a batch starts together and ends together.
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
from tcdeploy.models.load import load_model, quiet_transformers
from tcdeploy.planning.plan import Plan

ATTN_IMPLEMENTATION = "sdpa"


class BaselineModel:
    """A model of transformers, with nothing of ours in it. `name` is the baseline's."""

    def __init__(self, name: str, model: PreTrainedModel, plan: Plan) -> None:
        self.name = name
        self.model = model
        self.plan = plan
        self._warmed_shapes: set[tuple[int, int, int]] = set()
        self._run: Callable[[PreTrainedModel, Tensor, int, Timestamps], None] = _RUNNERS[name]

    @property
    def note(self) -> str:
        """What a reader of its figures has to know; empty where there is nothing."""
        if self.name == "generate" and self.plan.device == "cpu":
            return "generate: not compiled: transformers compiles its decode step on a GPU only"
        return ""

    def token_times(self, prompts: list[list[int]], new_tokens: int) -> list[float]:
        """When each new token of the batch was there, counted from the call. Prompts are of one length.

        A shape that is new runs once untimed: that is where `generate` compiles.
        """
        shape = (len(prompts), len(prompts[0]), new_tokens)
        if shape not in self._warmed_shapes:
            self._warmed_shapes.add(shape)
            self._run_timed(prompts, new_tokens)
        return self._run_timed(prompts, new_tokens)

    def first_call_seconds(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Wall time of a call, to its last token; of a new shape, with whatever is compiled for it."""
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
            raise TcdeployError(f"it gave {len(seconds)} tokens of the {new_tokens} that were asked for")
        return seconds


def load_baseline(name: str, plan: Plan, config: PreTrainedConfig) -> BaselineModel:
    """The weights of the plan, random ones included: they come from one seed."""
    return BaselineModel(name, load_model(plan, config, ATTN_IMPLEMENTATION), plan)


def _run_eager(model: PreTrainedModel, ids: Tensor, new_tokens: int, timestamps: Timestamps) -> None:
    keep = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    cache = DynamicCache(config=model.config)
    for _ in range(new_tokens):
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, **keep).logits
        ids = logits[:, -1:].argmax(dim=-1)
        timestamps.record()


def _run_generate(model: PreTrainedModel, ids: Tensor, new_tokens: int, timestamps: Timestamps) -> None:
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        cache_implementation="static",
        logits_processor=LogitsProcessorList([_TimestampProcessor(timestamps)]),
    )


class _TimestampProcessor(LogitsProcessor):
    """`generate` calls it once a token, when the logits are on their way: the place for a mark."""

    def __init__(self, timestamps: Timestamps) -> None:
        self._timestamps = timestamps

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self._timestamps.record()
        return scores


_RUNNERS = {"eager": _run_eager, "generate": _run_generate}
