"""Mode auto: each bucket keeps the candidate that measured fastest, the figures stay in the manifest, and a warm start
times nothing again."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tcdeploy.attention import backends
from tcdeploy.cache.manifest import Parity, Trial, manifest_path, read_manifest
from tcdeploy.compiler import jit
from tcdeploy.compiler.ledger import CompileCounts, CompileStats, measure_compiles
from tcdeploy.engine import warmup
from tcdeploy.engine.sequence import SamplingParams
from tcdeploy.engine.warmup import _CompiledVariant, _fastest, _total_compilation
from tcdeploy.errors import SpaceError
from tcdeploy.pipeline import prepare
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.planning.variants import DEFAULT, LAST_TOKEN_ROWS, Variant, attention_variant
from tests.conftest import TINY, reset_programs


@pytest.fixture
def auto(tmp_path: Path) -> Any:
    """Prepare with mode auto in a folder of its own; in the end torch forgets where its cache was."""

    def run(tune_seconds: float = 300.0) -> Any:
        flags = {"model": TINY, "buckets": (32,), "batch_sizes": (2,), "mode": "auto", "tune_seconds": tune_seconds}
        return prepare(build_recipe({**flags, "cache_dir": str(tmp_path)}, environ={}))

    reset_programs()
    yield run
    reset_programs()


def test_each_bucket_keeps_the_fastest_and_a_warm_start_times_nothing_again(auto: Any) -> None:
    first = auto()
    for record in first.records:
        [bucket] = [bucket for bucket in first.plan.buckets if bucket.name == record.bucket]
        names = [variant.name for variant in first.plan.variants(bucket)]
        assert [trial.variant for trial in record.trials] == names
        timed = {trial.variant: trial.step_ms for trial in record.trials}
        assert None not in timed.values()
        assert record.variant == min(timed, key=lambda name: timed[name])
        assert record.parity.passed
    manifest = read_manifest(manifest_path(first.plan.cache_dir, first.plan.key))
    assert manifest is not None and manifest.trials() == {one.bucket: one.trials for one in first.records}

    reset_programs()
    with measure_compiles() as warm_start:
        second = auto()
    assert [record.trials for record in second.records] == [record.trials for record in first.records]
    assert [record.variant for record in second.records] == [record.variant for record in first.records]
    assert [record.outcome for record in second.records] == ["hit", "hit"]
    kinds = {"last-token-rows": 2}  # the last layer is a program of its own
    programs = [kinds.get(record.variant, 1) for record in second.records]
    assert [record.programs for record in second.records] == programs
    assert warm_start.counts.programs == sum(programs), "the losers are not even loaded"


def test_no_time_to_try_leaves_the_first_candidate(auto: Any) -> None:
    deployment = auto(tune_seconds=0.0)
    for record in deployment.records:
        assert [trial.variant for trial in record.trials] == [record.variant]
    assert len(deployment.engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=3))[0]) == 3


def test_time_is_for_what_is_tried_beyond_the_one_candidate_there_must_be(
    auto: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest bucket goes first, and its first candidate is slow to make: that leaves its share untouched."""
    make, shares = warmup._BucketWarmer._compile_and_capture, {}
    try_ = warmup._BucketWarmer._time_variants

    def slow(self: Any, variant: Variant, sequences: Any) -> Any:
        if not shares[self.bucket.name][1]:
            time.sleep(0.5)
        shares[self.bucket.name][1].append(variant.name)
        return make(self, variant, sequences)

    def noted(self: Any, variants: Any, sequences: Any, seconds: float, must_succeed: bool) -> Any:
        shares[self.bucket.name] = (seconds, [])
        return try_(self, variants, sequences, seconds, must_succeed)

    monkeypatch.setattr(warmup._BucketWarmer, "_compile_and_capture", slow)
    monkeypatch.setattr(warmup._BucketWarmer, "_time_variants", noted)
    records = {record.bucket: record for record in auto(tune_seconds=0.4).records}
    assert shares["prefill:32"][0] == 0.2, "an equal share each"
    assert len(records["prefill:32"].trials) > 1
    spent = sum(trial.seconds for trial in records["prefill:32"].trials[1:])
    assert shares["decode:2"][0] == pytest.approx(0.4 - spent)


def test_each_bucket_runs_the_program_of_its_own_candidate(auto: Any) -> None:
    """Going back to a candidate compiles nothing; going to one that was never tried does."""
    deployment = auto(tune_seconds=0.0)
    runner, [bucket] = deployment.engine.runner, deployment.plan.decode_buckets
    tried, untried = deployment.plan.variants(bucket)[:2]
    counts = []
    for variant in (tried, untried, tried, untried):
        runner.set_variant(bucket, variant)
        with measure_compiles() as found:
            runner.rerun(bucket)
        counts.append(found.counts.programs)
    assert counts == [0, 1, 0, 0]


def test_a_fused_step_gives_the_same_tokens(auto: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole model by the pass that GPUs' candidates ask for: attention turns queries and keys by itself."""
    fused, calls = Variant("fused", fused_epilogues=True), []
    decode = backends.DECODE["reference"]

    def noted(*args: Any) -> Any:
        calls.append(args[-1] is not None)
        return decode(*args)

    deployment = auto(tune_seconds=0.0)
    prompts, params = [[5, 6, 7], [8, 9, 10, 11, 200]], SamplingParams(max_new_tokens=12)
    plain = deployment.engine.generate(prompts, params)
    runner, [bucket] = deployment.engine.runner, deployment.plan.decode_buckets
    runner.set_variant(bucket, fused)
    runner.rerun(bucket)
    monkeypatch.setitem(backends.DECODE, "reference", noted)
    assert deployment.engine.generate(prompts, params) == plain
    assert calls and all(calls)


def test_a_candidate_that_failed_is_never_the_fastest() -> None:
    trials = (Trial("a", None, 1.0, "it does not compile"), Trial("b", 3.0, 1.0), Trial("c", 2.0, 1.0))
    assert _fastest(trials, {name: Variant(name) for name in "abc"}).variant == "c"


def test_what_an_earlier_candidate_left_counts_for_the_winner() -> None:
    def made(programs: int) -> _CompiledVariant:
        return _CompiledVariant(
            CompileStats(float(programs), CompileCounts(programs=programs, cache_misses=programs)), 0.0, None
        )

    again = CompileStats(0.1, CompileCounts())
    default, early, other = DEFAULT, LAST_TOKEN_ROWS, attention_variant("flash-attn-4")
    found = {default: made(1), early: made(2), other: made(4)}
    assert [_total_compilation(one, again, found).counts.programs for one in found] == [1, 3, 4]
    timed_before = _total_compilation(default, again, {early: made(2)})
    assert timed_before.counts.outcome == "miss", "this run compiled, though the winner was timed in an earlier one"


def test_a_candidate_that_costs_every_start_must_bring_more_than_it_gives_away() -> None:
    variants = {"a": Variant("a"), "flash-attn-4": attention_variant("flash-attn-4")}
    for step_ms, chosen in ((9.6, "a"), (9.4, "flash-attn-4")):
        trials = (Trial("a", 10.0, 1.0), Trial("flash-attn-4", step_ms, 1.0))
        assert _fastest(trials, variants).variant == chosen


def test_what_an_earlier_run_left_out_is_tried_when_there_is_more_time(auto: Any) -> None:
    assert [len(record.trials) for record in auto(tune_seconds=0.0).records] == [1, 1]
    reset_programs()
    later = auto(tune_seconds=300.0)
    assert [len(record.trials) for record in later.records] == [3, 2]
    reset_programs()
    assert [len(record.trials) for record in auto(tune_seconds=10.0).records] == [3, 2], "less time forgets nothing"


def test_a_candidate_that_breaks_is_passed_over_and_shown(auto: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own errors share no class with torch's."""
    options = jit.inductor_options

    class OutOfResources(Exception):
        pass

    def breaking(variant: Any, graphs: str) -> Any:
        if variant.name == "default":
            raise OutOfResources("shared memory, required: 262144")
        return options(variant, graphs)

    monkeypatch.setattr(jit, "inductor_options", breaking)
    for record in auto().records:
        assert record.variant != "default"
        errors = {trial.variant: trial.error for trial in record.trials}
        assert errors.pop("default") == "shared memory, required: 262144"
        assert errors and not any(errors.values())


def test_a_fast_candidate_that_is_not_the_model_is_passed_over_and_shown(
    auto: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[Parity] = []

    def suspicious(ours: torch.Tensor, reference: torch.Tensor, dtype: str) -> Parity:
        found = warmup_compare(ours, reference, dtype)
        judged.append(found if judged else replace(found, passed=False, kl=0.5))
        return judged[-1]

    warmup_compare = warmup.check_parity
    monkeypatch.setattr(warmup, "compare", suspicious)
    first, second = auto().records[0], auto().records[0]
    refuted = [trial for trial in first.trials if trial.error]
    assert [(trial.step_ms, trial.error) for trial in refuted] == [(None, "not the eager model: KL 0.5")]
    assert first.variant != refuted[0].variant and first.parity.passed
    assert second.variant == first.variant, "a warm start does not try it again"
    assert second.trials == first.trials


def test_where_every_candidate_breaks_the_error_is_its_own(auto: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaking(variant: Any, graphs: str) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(jit, "inductor_options", breaking)
    with pytest.raises(SpaceError, match="out of memory during warm-up"):
        auto()


def test_timing_does_not_disturb_what_is_checked(tmp_path: Path) -> None:
    """KV so tight that the timed sequences share blocks with those of the check."""
    reset_programs()
    flags = {"model": TINY, "buckets": (32,), "batch_sizes": (4,), "mode": "auto", "kv_blocks": 9}
    deployment = prepare(build_recipe({**flags, "cache_dir": str(tmp_path)}, environ={}))
    assert all(record.parity.passed for record in deployment.records)
    reset_programs()
