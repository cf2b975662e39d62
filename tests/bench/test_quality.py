"""Perplexity, KL divergence and top-1 agreement of the embedded model and of its quantised copies."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoModelForCausalLM

from tcdeploy.bench import quality
from tcdeploy.bench.quality import Quality, QualityRow, QualityRun, quality_run
from tcdeploy.bench.quality_settings import TextSettings
from tcdeploy.bench.stored_distributions import StoredDistributions
from tcdeploy.bench.token_windows import Text, TokenWindows, read_text
from tcdeploy.engine.engine import Engine
from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.errors import ModelError, UsageError
from tcdeploy.host.progress import NullProgress
from tcdeploy.models.location import BUILTIN_MODELS
from tcdeploy.planning.recipe import Recipe, build_recipe
from tcdeploy.programs.compile_stats import measure_compiles
from tcdeploy.start.model_code import load_uncompiled
from tests.conftest import ROOT, TINY, TINY_BATCH_SIZES, TINY_BUCKETS
from tests.engine_loop import new_tokens
from tests.formats import fp8, int_packed
from tests.formats.checkpoint import Format, write_checkpoint, write_dense

LICENSE = ROOT / "LICENSE"
WINDOW = 150  # more than the largest bucket
FORMATS = {"fp8": fp8.FORMATS["fbgemm"], "int4": int_packed.gptq(group_size=32)}


def tiny_recipe(cache_dir: str, **changes: Any) -> Recipe:
    fields = {"model": TINY, "buckets": TINY_BUCKETS, "batch_sizes": TINY_BATCH_SIZES, "cache_dir": cache_dir}
    return build_recipe({**fields, **changes}, environ={})


@pytest.fixture(scope="module")
def text() -> Text:
    return read_text(str(LICENSE), 700)


@pytest.fixture
def windows(text: Text, tiny_deployment: Any) -> TokenWindows:
    return TokenWindows(text.encode(tiny_deployment.tokenizer)[0], WINDOW, False)


def logits_of(model: Any, windows: TokenWindows) -> Tensor:
    """Of transformers, at every scored token: [scored, vocab]."""
    with torch.no_grad():
        return torch.cat([model(torch.tensor([window])).logits[0, :-1] for window in windows])


def targets(windows: TokenWindows) -> Tensor:
    return torch.tensor([token for window in windows for token in window[1:]])


@contextlib.contextmanager
def stored(folder: Path, top_tokens: int = 512) -> Iterator[StoredDistributions]:
    with (folder / "distributions").open("w+b", buffering=0) as file:
        yield StoredDistributions(file, 2048, top_tokens)


def measure(run: QualityRun, reference: Any, model: Any) -> Quality:
    """`model` against `reference`, two deployments."""
    assert run.stored is not None
    row = quality.score_reference(run, run.stored, reference)
    return dataclasses.replace(run, reference=row).measure(model)


def test_the_perplexity_is_that_of_the_logits_of_transformers(
    tiny_deployment: Any, reference_tiny: Any, text: Text, windows: TokenWindows
) -> None:
    """Windows of several chunks, of which the last is shorter."""
    assert [len(window) for window in windows] == [150, 150, 150, 150, 100]
    with measure_compiles() as measured:
        [row] = QualityRun(text, windows, NullProgress()).measure(tiny_deployment).rows
    assert measured.counts.compiles == 0
    expected = cross_entropy(logits_of(reference_tiny, windows), targets(windows))
    assert row.perplexity == pytest.approx(expected.exp().item(), rel=1e-4)
    assert row.nats_per_token == pytest.approx(expected.item(), rel=1e-5)
    assert (row.subject, row.model, row.kl_nats, row.top1_agreement) == ("tcdeploy", TINY, None, None)


def test_the_likelihoods_are_those_that_a_request_gets(tiny_deployment: Any, text: Text, windows: TokenWindows) -> None:
    [row] = QualityRun(text, windows, NullProgress()).measure(tiny_deployment).rows
    answers = new_tokens(tiny_deployment.engine, windows, SamplingParams(max_tokens=1, prompt_logprobs=0))
    served = [entry.chosen for (token,) in answers for entry in token.prompt_logprobs or ()]
    assert len(served) == windows.num_scored == 700 - 5
    assert row.nats_per_token == pytest.approx(-sum(served) / len(served), rel=1e-5)


def test_a_window_may_fill_the_context(tiny_deployment: Any, reference_tiny: Any, text: Text) -> None:
    context = tiny_deployment.plan.context
    token_ids = read_text(str(LICENSE), context).encode(tiny_deployment.tokenizer)[0]
    windows = TokenWindows(token_ids, context, False)
    free = tiny_deployment.engine.allocator.num_allocatable
    [row] = QualityRun(text, windows, NullProgress()).measure(tiny_deployment).rows
    expected = cross_entropy(logits_of(reference_tiny, windows), targets(windows))
    assert [len(window) for window in windows] == [context]
    assert row.nats_per_token == pytest.approx(expected.item(), rel=1e-5)
    assert tiny_deployment.engine.allocator.num_allocatable == free


def test_a_model_does_not_differ_from_itself(
    tiny_deployment: Any, text: Text, windows: TokenWindows, tmp_path: Path
) -> None:
    with stored(tmp_path) as distributions:
        run = QualityRun(text, windows, NullProgress(), stored=distributions)
        row, reference = measure(run, tiny_deployment, tiny_deployment).rows
    assert (row.kl_nats, row.top1_agreement) == (0.0, 1.0)
    assert reference == QualityRow("reference", TINY, row.perplexity, row.nats_per_token)


class Copy(NamedTuple):
    """A quantised copy of the embedded model, as a deployment that runs uncompiled, and its dense twin."""

    deployment: Any
    twin: Any


def make_copy(form: Format, folder: Path) -> Copy:
    dense = write_checkpoint(form, BUILTIN_MODELS[TINY], folder / "quantised")
    write_dense(BUILTIN_MODELS[TINY], dense, folder / "dense")
    recipe = tiny_recipe(str(folder / "cache"), model=str(folder / "quantised"))
    planned, runner = load_uncompiled(recipe)
    for bucket in planned.plan.buckets:
        runner.run_eagerly(bucket)
    twin = AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.float32).eval()
    return Copy(SimpleNamespace(engine=Engine(runner), plan=planned.plan), twin)


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Copy]:
    return {name: make_copy(form, tmp_path_factory.mktemp(name)) for name, form in FORMATS.items()}


def test_quantised_copies_lose_what_their_dense_twins_lose(
    tiny_deployment: Any,
    reference_tiny: Any,
    copies: dict[str, Copy],
    text: Text,
    windows: TokenWindows,
    tmp_path: Path,
) -> None:
    """All but one of the tokens are kept, so nothing is merged. KL(copy || model) is another number."""
    reference_logits, rows = logits_of(reference_tiny, windows), {}
    reference = reference_logits.double().log_softmax(dim=-1)
    for name, copy in copies.items():
        with stored(tmp_path, 2048) as distributions:
            run = QualityRun(text, windows, NullProgress(), stored=distributions)
            rows[name], _ = measure(run, tiny_deployment, copy.deployment).rows
        logits = logits_of(copy.twin, windows)
        log_probs, row = logits.double().log_softmax(dim=-1), rows[name]
        assert row.nats_per_token == pytest.approx(cross_entropy(logits, targets(windows)).item(), rel=1e-5)
        expected = kl_div(log_probs, reference, log_target=True, reduction="batchmean").item()
        reverse = kl_div(reference, log_probs, log_target=True, reduction="batchmean").item()
        assert abs(reverse - expected) > 1e-3 * expected
        assert row.kl_nats == pytest.approx(expected, rel=1e-4)
        agreement = (logits.argmax(dim=-1) == reference_logits.argmax(dim=-1)).double().mean().item()
        assert row.top1_agreement == pytest.approx(agreement, abs=1e-9)
    assert 0 < rows["fp8"].kl_nats < rows["int4"].kl_nats
    assert 1 > rows["fp8"].top1_agreement > rows["int4"].top1_agreement


def test_merged_tokens_lower_the_divergence_a_little(
    tiny_deployment: Any, copies: dict[str, Copy], text: Text, windows: TokenWindows, tmp_path: Path
) -> None:
    divergences = []
    for top_tokens in (2048, 512, 8):
        with stored(tmp_path, top_tokens) as distributions:
            run = QualityRun(text, windows, NullProgress(), stored=distributions)
            row, _ = measure(run, tiny_deployment, copies["int4"].deployment).rows
        divergences.append(row.kl_nats)
    exact, merged, coarse = divergences
    assert exact > merged > coarse > 0
    assert merged > 0.97 * exact


class FakeModel(NamedTuple):
    """A plan of a model whose tokenizer gives one token per character, and what `quality_run` reads of it."""

    model: str
    offset: int = 0
    context: int = 100
    vocab_size: int = 256

    def decide(self) -> Any:
        def tokenizer(content: str) -> Any:
            return SimpleNamespace(
                input_ids=[ord(character) + self.offset * (character == "c") for character in content]
            )

        plan = SimpleNamespace(model=self.model, context=self.context)
        architecture = SimpleNamespace(vocab_size=self.vocab_size)
        return SimpleNamespace(plan=plan, tokenizer=tokenizer, architecture=architecture)


def begin(monkeypatch: pytest.MonkeyPatch, *models: FakeModel, content: str = "abcdefgh", **changes: Any) -> QualityRun:
    """What `quality_run` plans for the models, which are never started."""
    planned = {item.model: item.decide() for item in models}
    monkeypatch.setattr(quality, "decide", lambda recipe, **_: planned[recipe.model])
    text = Text("file.txt", content, True, changes.get("tokens", 8))
    against = models[1].model if len(models) > 1 else None
    settings = TextSettings(text="file.txt", against=against, **changes)
    with quality_run(Recipe(model=models[0].model), settings, text, NullProgress()) as run:
        return run


def test_the_default_window_is_limited_by_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    assert begin(monkeypatch, FakeModel("model", context=5)).windows.window == 5
    assert begin(monkeypatch, FakeModel("model", context=9999)).windows.window == 2048
    assert begin(monkeypatch, FakeModel("model"), window=3).windows.window == 3


def test_a_window_beyond_the_context_of_either_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    models = FakeModel("model", context=100), FakeModel("other", context=50)
    with pytest.raises(UsageError, match="--window for other is 60 tokens, and the context is 50"):
        begin(monkeypatch, *models, window=60)


def test_models_with_other_tokens_or_another_vocabulary_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "the tokenizers of model and other differ, from token 2 of file.txt on"
    with pytest.raises(UsageError, match=message) as raised:
        begin(monkeypatch, FakeModel("model"), FakeModel("other", offset=1))
    assert "--against needs the model from which MODEL was quantised" in raised.value.hint
    with pytest.raises(UsageError, match="model has a vocabulary of 256 tokens, and other one of 300"):
        begin(monkeypatch, FakeModel("model"), FakeModel("other", vocab_size=300))


def test_a_value_that_is_not_finite_names_the_model_and_the_token(
    tiny_deployment: Any, text: Text, windows: TokenWindows, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, calls = tiny_deployment.engine.runner.compute_prompt_logits, []

    def compute_with_nan(chunk: Any) -> Iterator[Any]:
        for piece in compute(chunk):
            calls.append(piece.start)
            if len(calls) == 2:  # of the first window, which has two chunks
                piece.logits[3] = torch.nan
            yield piece

    monkeypatch.setattr(tiny_deployment.engine.runner, "compute_prompt_logits", compute_with_nan)
    with pytest.raises(ModelError, match=r"of builtin:tiny at scored token 131 of .*LICENSE is nan") as raised:
        QualityRun(text, windows, NullProgress()).measure(tiny_deployment)
    assert raised.value.hint.endswith("tcdeploy compile builtin:tiny")
    assert calls == [0, 128]
    engine = tiny_deployment.engine
    assert engine.allocator.num_allocatable == engine.allocator.capacity, "the blocks were released"


def test_a_likelihood_beyond_float64_is_an_error() -> None:
    assert quality.perplexity("model", 2.0) == pytest.approx(7.389056)
    with pytest.raises(ModelError, match="likelihood of model is 800 nats per token"):
        quality.perplexity("model", 800.0)


def test_the_notes_state_the_result_and_its_terms(
    tiny_deployment: Any, text: Text, windows: TokenWindows, tmp_path: Path
) -> None:
    with stored(tmp_path) as distributions:
        run = QualityRun(text, windows, NullProgress(), stored=distributions)
        result = measure(run, tiny_deployment, tiny_deployment)
    perplexity = f"{result.rows[0].perplexity:.5g}"
    assert result.notes == [
        f"perplexity {perplexity} over 695 tokens of {LICENSE}; KL 0 nats per token and top-1 agreement 100.00% with "
        f"builtin:tiny, whose perplexity is {perplexity}",
        "5 windows of up to 150 tokens, the first token of each is not scored",
        "the text is longer: its first 700 tokens were used; --tokens sets the limit",
        "KL(reference || model) over the reference's 512 most likely tokens and all others as one, which is at most "
        "that over all tokens; they took 2.9 MB in a temporary file",
    ]
    assert (result.text["tokens"], result.text["scored_tokens"], result.text["windows"]) == (700, 695, 5)
    assert (result.text["is_whole"], result.text["kl_tokens"]) == (False, 512)
