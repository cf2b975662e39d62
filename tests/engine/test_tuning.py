"""Mode auto: each bucket keeps the candidate that measured fastest, the figures stay in the manifest, and a warm start
times nothing again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tcdeploy.compiler.ledger import measured
from tcdeploy.compiler.manifest import Trial, manifest_path, read_manifest
from tcdeploy.engine.sequence import SamplingParams
from tcdeploy.engine.warmup import _fastest
from tcdeploy.pipeline import prepare
from tcdeploy.recipe import build_recipe
from tests.conftest import TINY, forget_programs


@pytest.fixture
def auto(tmp_path: Path) -> Any:
    """Prepare with mode auto in a folder of its own; in the end torch forgets where its cache was."""

    def run(tune_seconds: float = 300.0) -> Any:
        flags = {"model": TINY, "buckets": (32,), "batch_sizes": (2,), "mode": "auto", "tune_seconds": tune_seconds}
        return prepare(build_recipe({**flags, "cache_dir": str(tmp_path)}, environ={}))

    forget_programs()
    yield run
    forget_programs()


def test_each_bucket_keeps_the_fastest_and_a_warm_start_times_nothing_again(auto: Any) -> None:
    first = auto()
    for record in first.records:
        names = [candidate.name for candidate in first.plan.candidates(first.plan.buckets[0])]
        assert [trial.candidate for trial in record.trials] == names
        timed = {trial.candidate: trial.step_ms for trial in record.trials}
        assert None not in timed.values()
        assert record.candidate == min(timed, key=lambda name: timed[name])
        assert record.parity.passed
    manifest = read_manifest(manifest_path(first.plan.cache_dir, first.plan.key))
    assert manifest is not None and manifest.trials() == {one.bucket: one.trials for one in first.records}

    forget_programs()
    with measured() as warm_start:
        second = auto()
    assert [record.trials for record in second.records] == [record.trials for record in first.records]
    assert [record.candidate for record in second.records] == [record.candidate for record in first.records]
    assert [record.outcome for record in second.records] == ["hit", "hit"]
    assert warm_start.counts.programs == len(second.records), "the losers are not even loaded"


def test_no_time_to_try_leaves_the_first_candidate(auto: Any) -> None:
    deployment = auto(tune_seconds=0.0)
    for record in deployment.records:
        assert [trial.candidate for trial in record.trials] == [record.candidate]
    assert len(deployment.engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=3))[0]) == 3


def test_each_bucket_runs_the_program_of_its_own_candidate(auto: Any) -> None:
    """Going back to a candidate compiles nothing; going to one that was never tried does."""
    deployment = auto(tune_seconds=0.0)
    runner, [bucket] = deployment.engine.runner, deployment.plan.decode_buckets
    tried, untried = deployment.plan.candidates(bucket)[:2]
    counts = []
    for candidate in (tried, untried, tried, untried):
        runner.choose(bucket, candidate)
        with measured() as found:
            runner.rerun(bucket)
        counts.append(found.counts.programs)
    assert counts == [0, 1, 0, 0]


def test_a_candidate_that_failed_is_never_the_fastest() -> None:
    trials = (Trial("a", None, 1.0, "it does not compile"), Trial("b", 3.0, 1.0), Trial("c", 2.0, 1.0))
    assert _fastest(trials).candidate == "c"
