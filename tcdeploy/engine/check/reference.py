"""Computes the reference logits of the parity check with transformers' own attention, uncompiled.

The reference shares only the weights with a bucket: no compiled program, paged cache or custom op is used. Prompts run
from their first token: long ones alone or a few at a time, the short ones of decode rows in one batch. Two passes are
made: one in the compute dtype (eager), and one in a higher precision (precise), in which rounding errors are
negligible. The distance between them is the error that the dtype causes on this model.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tcdeploy.engine.check.check_prompts import NUM_LONG_PROMPTS, CheckPrompts, PromptPrefix, evenly_spaced
from tcdeploy.engine.check.parity import ROUNDING, comparable, largest_logit, row_distances
from tcdeploy.engine.check.precise_math import has_convolutions, precise_math
from tcdeploy.engine.check.rounded_attention import ROUNDED, register_rounded_attention
from tcdeploy.engine.check.rounded_inputs import rounded_inputs
from tcdeploy.engine.step.runner import ModelRunner
from tcdeploy.errors import SpaceError, TcdeployError, UnsupportedModelError
from tcdeploy.host.progress import NullProgress, Progress
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.backends import FP8_KV
from tcdeploy.planning.memory import MAX_PROMPT_TOKENS
from tcdeploy.planning.plan import Plan
from tcdeploy.torch_compat.dynamo import dispatch_mode

HIGHER_PRECISION = {"float32": "float64", "bfloat16": "float32", "float16": "float32"}
SAMPLED_ROWS = 8  # of each prompt
MORE_SAMPLED_ROWS = 32  # with routed experts or FP8, where a rounding error may change a few rows much more
log = logging.getLogger("tcdeploy.engine")


class PrefixLogits(NamedTuple):
    """Logits [vocab] after a prefix, in host memory, or on the device given to `read_reference`."""

    eager: Tensor
    precise: Tensor  # float32 or float64


class ReferenceLogits(NamedTuple):
    """The reference of all buckets."""

    rows: dict[PromptPrefix, PrefixLogits]
    dtype: str  # of the precise logits; the compute dtype if they could not be computed in a higher one
    sampled_distances: Tensor  # [rows, 2] (parity.row_distances) of eager from precise logits in a sample of other rows


def reference_attn_implementation(architecture: Architecture, plan: Plan) -> str:
    """sdpa, or eager if the model needs soft-capping or sinks. With an FP8 cache, they round K and V."""
    plain = all(not spec.softcap and not spec.has_sinks for spec in architecture.attention_layers)
    implementation = "sdpa" if plain else "eager"
    if plan.kv_dtype != FP8_KV:
        return implementation
    register_rounded_attention()
    return ROUNDED[implementation]


def compute_references(
    runner: ModelRunner, prompts: CheckPrompts, attn_implementation: str, progress: Progress | None = None
) -> ReferenceLogits:
    """The logits after all prefixes that any bucket is checked on. `progress`: its steps are the batches of prompts."""
    progress = progress or NullProgress()
    compute_dtype = runner.plan.compute_dtype
    dtype = HIGHER_PRECISION[compute_dtype] if dispatch_mode.supported() else compute_dtype
    has_experts = any("expert" in name for name, _ in runner.model.named_parameters())
    has_fp8 = runner.plan.kv_dtype == FP8_KV or runner.plan.fp8_min_rows > 0
    num_sampled = MORE_SAMPLED_ROWS if has_experts or has_fp8 else SAMPLED_ROWS
    batches = _batches(runner.plan, prompts)
    passes: list[tuple[Tensor, Tensor]] = []  # stay on the device for now, so that the host does not wait for each pass
    distances: list[Tensor] = []
    for number, batch in enumerate(batches, 1):
        token_ids, positions = batch.token_ids, batch.positions
        progress.step(number, len(batches), f"{sum(map(len, token_ids))} tokens")
        if batch.is_sampled:
            positions = positions + evenly_spaced(len(token_ids[0]), num_sampled)
        with batch.rounded_inputs(runner):
            with _explaining_failures(runner):
                eager = runner.reference_logits(token_ids, positions, attn_implementation)
            is_precise = dtype != compute_dtype
            precise = _precise_logits(runner, token_ids, positions, attn_implementation) if is_precise else None
        if precise is None:
            precise, dtype = eager.float(), compute_dtype
        count = len(batch.positions)
        if batch.is_sampled:
            distances.append(row_distances(*(logits[:, count:].flatten(0, 1) for logits in (eager, precise))))
        passes.append((eager[:, :count].clone(), precise[:, :count].clone()))
    rows: dict[PromptPrefix, PrefixLogits] = {}
    for batch, on_device in zip(batches, passes, strict=True):
        eager, precise = (logits.cpu() for logits in on_device)
        for prefix, prompt, row in batch.rows():
            rows[prefix] = PrefixLogits(eager[prompt, row], precise[prompt, row])
    sampled_distances = [torch.empty(0, 2, dtype=torch.float64), *(rows_of_pass.cpu() for rows_of_pass in distances)]
    del passes, on_device
    if runner.plan.device == "cuda":
        torch.cuda.empty_cache()
    if dtype == compute_dtype:  # of all rows, also of those before the one that could not be computed
        rows = {prefix: PrefixLogits(logits.eager, logits.eager.float()) for prefix, logits in rows.items()}
    return ReferenceLogits(rows, dtype, torch.cat(sampled_distances))


@contextlib.contextmanager
def _explaining_failures(runner: ModelRunner) -> Iterator[None]:
    """Raise UnsupportedModelError if the model's own code fails, which no step has run: for example by its config."""
    try:
        yield
    except (TcdeployError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # torch and the model's own code raise many types
        from tcdeploy.models.probe_failure import CONFIG_HINT, describe_exception  # a start from packages runs no model

        message = f"transformers cannot compute {runner.plan.model}: {describe_exception(error)}"
        raise UnsupportedModelError(message, CONFIG_HINT) from error


def reference_changed(
    runner: ModelRunner, prompts: CheckPrompts, references: ReferenceLogits, attn_implementation: str
) -> bool:
    """Whether something has changed the weights or the modules: eager logits of most rows of the last batch differ."""
    batch = _batches(runner.plan, prompts)[-1]
    with batch.rounded_inputs(runner):
        logits = runner.reference_logits(batch.token_ids, batch.positions, attn_implementation)
    pairs = [(logits[prompt, row].cpu(), references.rows[prefix].eager) for prefix, prompt, row in batch.rows()]
    now, before = (torch.stack(column).float() for column in zip(*pairs, strict=True))
    rounding, _ = ROUNDING[runner.plan.compute_dtype]
    difference = (comparable(now) - comparable(before)).abs().amax(dim=-1).median().item()
    return not difference <= rounding * largest_logit(before)


def tokens_per_pass(plan: Plan, prompts: CheckPrompts) -> int:
    """The number of tokens in the last pass. On a GPU, shorter passes are extended to about as many (`_batches`)."""
    return sum(map(len, _batches(plan, prompts)[-1].token_ids))


class _Batch(NamedTuple):
    """Prompts of equal length that are computed in one pass, and the prefixes of them that are compared."""

    token_ids: list[list[int]]
    prefixes: list[list[PromptPrefix]]  # of each prompt
    is_sampled: bool  # whether the distances of further rows are recorded, as for long prompts

    @property
    def positions(self) -> list[int]:
        """Positions whose logits are computed in each prompt: the last ones of all prefixes."""
        return sorted({prefix.length - 1 for prompt in self.prefixes for prefix in prompt})

    def rounded_inputs(self, runner: ModelRunner) -> contextlib.AbstractContextManager[None]:
        """In the block, inputs are rounded as the plan's steps quantise them (rounded_inputs.py)."""
        if not runner.plan.fp8_min_rows:
            return contextlib.nullcontext()
        mask = torch.ones(len(self.token_ids), len(self.token_ids[0]), dtype=torch.bool)
        for row, (*_, last) in zip(mask, self.prefixes, strict=True):
            row[last.length - 1] = not last.keeps_inputs
        return rounded_inputs(runner.model, mask.to(runner.plan.device))

    def rows(self) -> Iterator[tuple[PromptPrefix, int, int]]:
        """Each prefix with the index of its prompt, and that of its position."""
        rows = {position: row for row, position in enumerate(self.positions)}
        for number, prompt in enumerate(self.prefixes):
            for prefix in prompt:
                yield prefix, number, rows[prefix.length - 1]


def _batches(plan: Plan, prompts: CheckPrompts) -> list[_Batch]:
    """Long prompts, alone or a few in a batch, and then all others in one batch.

    A prompt is computed once more for each prefix whose last token keeps its inputs (see PromptPrefix). On a GPU,
    prompts are extended to the same number of tokens in a pass, because another number may need other cuBLAS kernels,
    and loading them takes about 1 s on an H100. Appended tokens do not change the logits of a prefix. Long prompts that
    fit into this number together are computed in one pass, because most of the time of a pass is spent on the host.
    """
    by_pass: dict[tuple[int, int], list[PromptPrefix]] = defaultdict(list)
    for prefix in prompts.all_prefixes():
        by_pass[prefix.prompt, prefix.length * prefix.keeps_inputs].append(prefix)
    groups = list(by_pass.values())
    long = [[group] for group in groups if group[0].prompt < NUM_LONG_PROMPTS]
    short = [group for group in groups if group[0].prompt >= NUM_LONG_PROMPTS]
    batches = [*long, short] if short else long
    common = 0
    if plan.device == "cuda":
        common = max((count for count in map(_num_tokens, batches) if count <= MAX_PROMPT_TOKENS), default=0)
        batches = [*_joined(long, common), short] if short else _joined(long, common)
        common += -common % math.lcm(*map(len, batches))
    lengths = [min(max(_num_tokens(batch), common) // len(batch), plan.context) for batch in batches]
    return [
        _Batch(
            [prompts.token_ids(group[-1]._replace(length=length)) for group in batch],
            batch,
            is_sampled=batch is not short or len(batch) == 1,
        )
        for batch, length in zip(batches, lengths, strict=True)
    ]


def _num_tokens(batch: list[list[PromptPrefix]]) -> int:
    """The tokens of a pass over these groups, whose prompts all have the length of the longest prefix."""
    return len(batch) * max(group[-1].length for group in batch)


def _joined(batches: list[list[list[PromptPrefix]]], most: int) -> list[list[list[PromptPrefix]]]:
    """The same groups in fewer batches: several are joined up to `most` tokens. Longer ones come first."""
    joined: list[list[list[PromptPrefix]]] = []
    for batch in sorted(batches, key=_num_tokens, reverse=True):
        if joined and _num_tokens([*joined[-1], *batch]) <= most:
            joined[-1].extend(batch)
        else:
            joined.append([*batch])
    return joined


def _precise_logits(
    runner: ModelRunner, token_ids: list[list[int]], positions: list[int], attn_implementation: str
) -> Tensor | None:
    """None if the model cannot be computed in the higher precision, for example because of a kernel of its own."""
    compute_dtype, dtype = runner.plan.compute_dtype, HIGHER_PRECISION[runner.plan.compute_dtype]
    low, high = getattr(torch, compute_dtype), getattr(torch, dtype)
    try:
        with precise_math(low, high, has_convolutions(runner.model)):
            return runner.reference_logits(token_ids, positions, attn_implementation)
    except torch.OutOfMemoryError as error:
        raise SpaceError(
            f"the reference of the parity check in {dtype} does not fit into the GPU's free memory",
            "use a smaller --memory-fraction",
        ) from error
    except Exception as error:  # torch and the model's own code raise many types
        log.warning(
            "the parity check uses fixed tolerances, because the reference cannot be computed in %s: %s",
            dtype, str(error).strip().split("\n")[0][:200],
        )  # fmt: skip
        return None
