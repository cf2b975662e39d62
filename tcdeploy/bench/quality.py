"""`bench quality`: perplexity on a text file, and what a quantised model loses against the 16-bit one.

A model is measured as it is served: each window of the text (token_windows.py) is a prompt, which runs through the
compiled programs, and the logits are those from which the engine computes `prompt_logprobs`. The reference runs first,
and leaves its distributions in a temporary file (stored_distributions.py). Device memory is that of one model at a
time, and host memory that of a few rows of logits. Nothing is sampled, and windows run one by one, so results repeat.

The perplexity of a text is exp(mean negative log-likelihood of its scored tokens). The KL divergence is the mean over
the scored tokens of KL(reference || model), in nats. It is more sensitive than the difference of two perplexities, in
which tokens that became more likely and tokens that became less likely cancel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from tcdeploy.bench.engine_driver import prompt_logits
from tcdeploy.bench.quality_settings import QualitySettings, TextSettings
from tcdeploy.bench.report import TCDEPLOY, Report, Row, describe_environment, describe_plan
from tcdeploy.bench.stored_distributions import Differences, StoredDistributions
from tcdeploy.bench.token_windows import Text, TokenWindows
from tcdeploy.engine.engine import Engine
from tcdeploy.errors import ModelError, UsageError
from tcdeploy.host.progress import Progress
from tcdeploy.host.temporary_files import temporary_folder
from tcdeploy.models.load import quiet_transformers
from tcdeploy.planning.recipe import Recipe
from tcdeploy.start.decide import decide
from tcdeploy.start.deployment import Deployment, release_memory
from tcdeploy.start.planned import PlannedModel
from tcdeploy.start.prepare import prepare

REFERENCE = "reference"
COMPARE_HINT = "compare its logits with those of eager execution: tcdeploy compile {model}"
ROWS_PER_PASS = 64  # bounds temporary memory: 66 MB of float64 at a vocabulary of 128,256


@dataclass(frozen=True)
class QualityRow(Row):
    """Means over the scored tokens. The last two compare the model with the reference, if there is one."""

    model: str
    perplexity: float
    nats_per_token: float  # negative log-likelihood
    kl_nats: float | None = None
    top1_agreement: float | None = None  # share of the tokens at which both have the same most likely one


@dataclass(frozen=True)
class Quality:
    """Rows of the model and of the reference, facts of the text, and sentences that state the result and its terms."""

    rows: list[QualityRow]
    text: dict[str, Any]
    notes: list[str]


class ScoredRows(NamedTuple):
    """Consecutive scored tokens of a text, counted over all windows."""

    first: int
    log_probs: Tensor  # [rows, vocab] float64
    next_ids: Tensor  # [rows] int64: the tokens of the text


UseRows = Callable[[ScoredRows], Differences | None]


@dataclass(frozen=True)
class QualityRun:
    """A text in windows for a model, and what the reference left, if there is one."""

    text: Text
    windows: TokenWindows
    progress: Progress
    reference: QualityRow | None = None
    stored: StoredDistributions | None = None

    def measure(self, deployment: Deployment) -> Quality:
        """Raises ModelError if a log-probability or a divergence is not finite."""
        self.progress.stage("text")
        row = self.score(TCDEPLOY, deployment, self._compare)
        facts = {
            "path": self.text.path, "sha256": self.text.sha256, "is_whole": self.windows.is_whole,
            "tokens": len(self.windows.token_ids), "scored_tokens": self.windows.num_scored,
            "windows": len(self.windows), "window": self.windows.window,
            "kl_tokens": self.stored.num_kept if self.stored else None,
        }  # fmt: skip
        rows = [row] if self.reference is None else [row, self.reference]
        return Quality(rows, facts, [self._result(row), *self._terms()])

    def score(self, subject: str, deployment: Deployment, use_rows: UseRows) -> QualityRow:
        """Run all windows. `use_rows` gets every scored row once, in order, and may return differences."""
        model, nats, kl, same, differences = deployment.plan.model, 0.0, 0.0, 0, None
        for rows in scored_rows(deployment.engine, self.windows, self.progress):
            losses, differences = -rows.log_probs.gather(1, rows.next_ids[:, None])[:, 0], use_rows(rows)
            self._check_finite(model, "negative log-likelihood", rows, losses)
            nats += losses.sum().item()
            if differences is not None:
                self._check_finite(model, "KL divergence from the reference", rows, differences.kl)
                kl += differences.kl.sum().item()
                same += int(differences.is_same_token.sum())
        count = self.windows.num_scored
        row = QualityRow(subject, model, perplexity(model, nats / count), nats / count)
        return row if differences is None else dataclasses.replace(row, kl_nats=kl / count, top1_agreement=same / count)

    def _compare(self, rows: ScoredRows) -> Differences | None:
        return self.stored.compare(rows.first, rows.log_probs) if self.stored is not None else None

    def _check_finite(self, model: str, name: str, rows: ScoredRows, values: Tensor) -> None:
        if values.isfinite().all():
            return
        row = int(values.isfinite().logical_not().nonzero()[0, 0])
        raise ModelError(
            f"the {name} of {model} at scored token {rows.first + row} of {self.text.path} is {values[row].item()}",
            COMPARE_HINT.format(model=model),
        )

    def _result(self, row: QualityRow) -> str:
        text = f"perplexity {row.perplexity:.5g} over {self.windows.num_scored:,} tokens of {self.text.path}"
        if self.reference is None or row.kl_nats is None:
            return text
        reference = f"{self.reference.model}, whose perplexity is {self.reference.perplexity:.5g}"
        return (
            f"{text}; KL {row.kl_nats:.3g} nats per token and top-1 agreement {row.top1_agreement:.2%} with {reference}"
        )

    def _terms(self) -> Iterator[str]:
        windows, stored = self.windows, self.stored
        plural = "" if len(windows) == 1 else "s"
        yield f"{len(windows)} window{plural} of up to {windows.window:,} tokens, the first token of each is not scored"
        if not windows.is_whole:
            yield f"the text is longer: its first {len(windows.token_ids):,} tokens were used; --tokens sets the limit"
        if stored is not None and stored.num_kept < stored.vocab_size - 1:
            megabytes = stored.row_bytes * windows.num_scored / 1e6
            yield (
                f"KL(reference || model) over the reference's {stored.num_kept} most likely tokens and all others as "
                f"one, which is at most that over all tokens; they took {megabytes:,.1f} MB in a temporary file"
            )


def perplexity(model: str, nats_per_token: float) -> float:
    """Raises ModelError if it exceeds float64."""
    try:
        return math.exp(nats_per_token)
    except OverflowError:
        problem = f"the mean negative log-likelihood of {model} is {nats_per_token:.0f} nats per token"
        raise ModelError(problem, COMPARE_HINT.format(model=model)) from None


def scored_rows(engine: Engine, windows: TokenWindows, progress: Progress) -> Iterator[ScoredRows]:
    """The log-probabilities of all scored tokens, in pieces of at most ROWS_PER_PASS."""
    first = 0
    for number, window in enumerate(windows, 1):
        progress.step(number, len(windows), f"window of {len(window)} tokens")
        with contextlib.closing(prompt_logits(engine, window)) as pieces:
            for _, logits, next_ids in pieces:
                for part, part_ids in zip(logits.split(ROWS_PER_PASS), next_ids.split(ROWS_PER_PASS), strict=True):
                    yield ScoredRows(first, part.double().log_softmax(dim=-1), part_ids)
                    first += len(part_ids)


@contextlib.contextmanager
def quality_run(recipe: Recipe, settings: TextSettings, text: Text, progress: Progress) -> Iterator[QualityRun]:
    """Plan both models, tokenize the text, and run the reference; the caller starts the model within the block.

    Raises UsageError if the window exceeds a context or the models cannot be compared, before any weights are loaded.
    """
    progress.stage("tokenize")
    planned = [_plan(recipe, settings)]
    if settings.against is not None:
        against = dataclasses.replace(
            recipe, model=settings.against, revision=None, quantize=None, quantize_skip=None, kv_dtype=Recipe.kv_dtype
        )
        planned.append(_plan(against, settings))
    windows = _cut(text, settings, planned)
    if settings.against is None:
        yield QualityRun(text, windows, progress)
        return
    with temporary_folder("quality") as folder, (folder / "distributions").open("w+b", buffering=0) as file:
        stored = StoredDistributions(file, planned[0].architecture.vocab_size)
        run = QualityRun(text, windows, progress, stored=stored)
        reference = score_reference(run, stored, prepare(against, progress))
        release_memory()
        yield dataclasses.replace(run, reference=reference)


def score_reference(run: QualityRun, stored: StoredDistributions, deployment: Deployment) -> QualityRow:
    """Fill `stored`, which must be empty. The caller keeps no reference to the deployment if its memory is needed."""
    run.progress.stage("text of the reference")

    def keep(rows: ScoredRows) -> None:
        stored.append(rows.log_probs)

    return run.score(REFERENCE, deployment, keep)


def _plan(recipe: Recipe, settings: TextSettings) -> PlannedModel:
    planned = decide(recipe, needs_tokenizer=True, needs_weights=False)
    settings.check_against_plan(planned.plan)
    return planned


def _cut(text: Text, settings: TextSettings, planned: list[PlannedModel]) -> TokenWindows:
    """The windows of the text, for one model or for two that have the same tokens."""
    with quiet_transformers():  # it warns of texts that are longer than the context
        encoded = [text.encode(item.tokenizer) for item in planned]
    if len(planned) == 2:
        _check_comparable(text, planned, [token_ids for token_ids, _ in encoded])
    (token_ids, is_whole), *_ = encoded
    return TokenWindows(token_ids, settings.window_within(*(item.plan.context for item in planned)), is_whole)


def _check_comparable(text: Text, planned: list[PlannedModel], token_ids: list[list[int]]) -> None:
    model, reference = (item.plan.model for item in planned)
    hint = "--against needs the model from which MODEL was quantised, or one with the same tokens"
    if token_ids[0] != token_ids[1]:
        pairs = enumerate(zip(*token_ids, strict=False))
        position = next((position for position, (one, other) in pairs if one != other), min(map(len, token_ids)))
        raise UsageError(
            f"the tokenizers of {model} and {reference} differ, from token {position} of {text.path} on", hint
        )
    sizes = [item.architecture.vocab_size for item in planned]
    if sizes[0] != sizes[1]:
        raise UsageError(f"{model} has a vocabulary of {sizes[0]} tokens, and {reference} one of {sizes[1]}", hint)


def run(recipe: Recipe, settings: QualitySettings, text: Text, progress: Progress) -> Report:
    with quality_run(recipe, settings, text, progress) as measurement:
        deployment = prepare(recipe, progress)
        quality = measurement.measure(deployment)
    environment = describe_environment(deployment.planned.environment)
    plan = describe_plan(dataclasses.asdict(deployment.plan))
    extra = {"text": quality.text, "notes": quality.notes}
    return Report("quality", environment, plan, dataclasses.asdict(settings), quality.rows, extra)
