"""The passes that compute the reference of the parity check: their prompts, and what happens if one fails."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tcdeploy.engine.check import reference
from tcdeploy.engine.check.check_prompts import NUM_LONG_PROMPTS, CheckPrompts
from tcdeploy.engine.check.reference import _batches, compute_references, reference_changed
from tcdeploy.errors import SpaceError
from tcdeploy.planning.plan import Bucket

VOCAB_SIZE = 300
BUCKETS = (Bucket("prefill", 64), Bucket("decode", 1), Bucket("decode", 8))


class FakeRunner:
    """Its logits are a function of the tokens of a prefix and of `weight`."""

    def __init__(self, device: str = "cpu", buckets: tuple[Bucket, ...] = BUCKETS, **changes: Any) -> None:
        values: dict[str, Any] = {
            "kv_blocks": 1000,
            "block_size": 16,
            "context": 2048,
            "max_prefill_sequences": 8,
            **changes,
        }
        values = {"fp8_min_rows": 0, **values, "kv_dtype": "bfloat16"}
        values["quantises_inputs"] = lambda bucket: bucket.is_prefill or bucket.size >= values["fp8_min_rows"] > 0
        self.plan = SimpleNamespace(device=device, compute_dtype="bfloat16", buckets=buckets, **values)
        self.model = torch.nn.Linear(1, 1)
        self.weight = 1.0
        self.excluded: float | None = None  # the logit of the last token, if the model excludes it
        self.passes = 0
        self.errors: list[Exception] = []  # raised by every second pass, which is in the higher precision

    def reference_logits(self, token_ids: list[list[int]], positions: list[int], _: str) -> Tensor:
        self.passes += 1
        if self.errors and self.passes % 2 == 0:
            raise self.errors.pop(0)
        sums = torch.tensor(token_ids).cumsum(1)[:, positions]
        logits = torch.sin(sums[..., None] * torch.arange(1, VOCAB_SIZE + 1) * self.weight).bfloat16()
        logits[..., -1] = self.excluded if self.excluded is not None else logits[..., -1]
        return logits


def make_prompts(runner: Any, window: int = 0) -> CheckPrompts:
    architecture: Any = SimpleNamespace(attention_layers=(SimpleNamespace(window=window),), vocab_size=VOCAB_SIZE)
    return CheckPrompts(runner.plan, architecture, SimpleNamespace(to_dict=dict), seed=0)


def test_long_prompts_run_alone_and_those_of_decode_rows_in_one_batch() -> None:
    runner: Any = FakeRunner()
    *long, short = _batches(runner.plan, make_prompts(runner))
    assert [len(batch.token_ids) for batch in long] == [1] * NUM_LONG_PROMPTS
    assert len(short.token_ids) == 7 and {len(tokens) for tokens in short.token_ids} == {48}


def test_on_a_gpu_all_passes_have_the_same_number_of_tokens() -> None:
    runner: Any = FakeRunner("cuda")
    counts = {sum(map(len, batch.token_ids)) for batch in _batches(runner.plan, make_prompts(runner))}
    assert counts == {7 * 48}


def test_on_a_gpu_long_prompts_that_fit_together_are_computed_in_one_pass() -> None:
    """The prompts of a bucket of 2048 tokens have 1279, 512 and 256 tokens."""
    buckets = (Bucket("prefill", 2048), *BUCKETS)
    runner: Any = FakeRunner("cuda", buckets)
    prompts = make_prompts(runner)
    batches = _batches(runner.plan, prompts)
    assert [len(batch.token_ids) for batch in batches] == [1, 2, 7]
    assert len({sum(map(len, batch.token_ids)) for batch in batches}) == 1
    references, alone = compute_references(runner, prompts, "sdpa"), FakeRunner("cpu", buckets)
    for prefix, logits in references.rows.items():
        tokens = prompts.token_ids(prefix)
        assert torch.equal(logits.eager, runner.reference_logits([tokens], [len(tokens) - 1], "")[0, 0])
    expected = compute_references(alone, prompts, "sdpa")  # type: ignore[arg-type]
    assert references.rows.keys() == expected.rows.keys()
    assert len(references.sampled_distances) == len(expected.sampled_distances) == NUM_LONG_PROMPTS * 8


@pytest.mark.parametrize("changes", [{"context": 64}, {"context": 16}])
def test_no_prompt_is_longer_than_the_context(changes: dict[str, int]) -> None:
    runner: Any = FakeRunner("cuda", (Bucket("prefill", 16), Bucket("decode", 8)), **changes)
    lengths = [len(tokens) for batch in _batches(runner.plan, make_prompts(runner)) for tokens in batch.token_ids]
    assert max(lengths) <= changes["context"]


def test_one_prompt_beyond_a_large_window_is_enough() -> None:
    runner: Any = FakeRunner("cuda", (Bucket("prefill", 4), Bucket("decode", 1)), context=8192)
    (batch,) = _batches(runner.plan, make_prompts(runner, window=4096))
    assert len(batch.token_ids[0]) > 4096


def test_every_checked_prefix_has_logits_of_its_own_tokens() -> None:
    runner: Any = FakeRunner()
    prompts = make_prompts(runner)
    references = compute_references(runner, prompts, "sdpa")
    assert {*references.rows} == {*prompts.all_prefixes()} and references.dtype == "float32"
    for prefix, logits in references.rows.items():
        tokens = prompts.token_ids(prefix)
        assert torch.equal(logits.eager, runner.reference_logits([tokens], [len(tokens) - 1], "")[0, 0])


@pytest.mark.parametrize("excluded", [None, -math.inf, torch.finfo(torch.bfloat16).min])
def test_a_changed_weight_changes_the_reference(excluded: float | None) -> None:
    runner: Any = FakeRunner()
    runner.excluded = excluded
    prompts = make_prompts(runner)
    references = compute_references(runner, prompts, "sdpa")
    assert not reference_changed(runner, prompts, references, "sdpa")
    runner.weight = 1.5
    assert reference_changed(runner, prompts, references, "sdpa")
    runner.weight = float("nan")
    assert reference_changed(runner, prompts, references, "sdpa")


def test_too_little_memory_for_the_precise_pass_is_an_error() -> None:
    """With fixed tolerances instead, the check would find less without saying so."""
    runner: Any = FakeRunner()
    runner.errors = [torch.OutOfMemoryError("CUDA out of memory")]
    with pytest.raises(SpaceError, match="reference of the parity check in float32 does not fit"):
        compute_references(runner, make_prompts(runner), "sdpa")


def test_a_model_that_cannot_be_computed_precisely_is_compared_with_eager_and_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner: Any = FakeRunner()
    runner.errors = [RuntimeError("no kernel")]
    prompts = make_prompts(runner)
    references = compute_references(runner, prompts, "sdpa")
    assert references.dtype == "bfloat16" and runner.passes == len(_batches(runner.plan, prompts)) + 1
    assert all(torch.equal(logits.precise, logits.eager.float()) for logits in references.rows.values())
    assert sum("fixed tolerances" in record.message for record in caplog.records) == 1


def test_tokens_of_small_decode_steps_keep_their_inputs_in_a_pass_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """If inputs are quantised: of 8 decode rows and of prefill steps, but not of one decode row."""
    runner: Any = FakeRunner(fp8_min_rows=8)
    prompts = make_prompts(runner)
    kept = prompts.checked(BUCKETS[1])
    assert [prefix.keeps_inputs for prefix in kept] == [1]
    assert {prefix.keeps_inputs for bucket in BUCKETS[::2] for prefix in prompts.checked(bucket)} == {0}
    masks: list[Tensor] = []

    def record(model: Any, mask: Tensor) -> contextlib.AbstractContextManager[None]:
        masks.append(mask)
        return contextlib.nullcontext()

    monkeypatch.setattr(reference, "rounded_inputs", record)
    references = compute_references(runner, prompts, "sdpa")
    assert {*references.rows} == {*prompts.all_prefixes()}
    batches = _batches(runner.plan, prompts)
    assert [len(batch.token_ids) for batch in batches] == [1] * (NUM_LONG_PROMPTS + 1) + [7]
    assert [mask.shape for mask in masks] == [(len(batch.token_ids), len(batch.token_ids[0])) for batch in batches]
    [mask] = [mask for mask in masks if not mask.all()]
    assert (~mask).nonzero().tolist() == [[0, kept[0].length - 1]]


def test_without_quantised_inputs_no_prefix_keeps_them() -> None:
    runner: Any = FakeRunner()
    assert {prefix.keeps_inputs for prefix in make_prompts(runner).all_prefixes()} == {0}
