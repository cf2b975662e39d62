"""Mode auto: each bucket serves with its fastest correct variant, and a warm start repeats no trial."""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tcdeploy.cache.folder.layout import manifest_path
from tcdeploy.cache.record.manifest import read_manifest, write_manifest
from tcdeploy.engine.check import parity_check
from tcdeploy.engine.check.inputs import WarmupBatch
from tcdeploy.engine.check.parity_check import ParityChecker
from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.engine.warm import tuning, warmup
from tcdeploy.engine.warm.tuning import CompiledVariant, fastest, total_compilation
from tcdeploy.errors import CompileError, SpaceError
from tcdeploy.kernels.attention import backends
from tcdeploy.planning import variants
from tcdeploy.planning.bucket_record import Parity, Trial
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.planning.variants import DEFAULT, LAST_TOKEN_ROWS, MAX_AUTOTUNE, Variant, attention_variant
from tcdeploy.programs import jit
from tcdeploy.programs.compile_stats import CompileCounts, CompileStats, measure_compiles
from tcdeploy.start.prepare import prepare
from tests.conftest import TINY, reset_programs
from tests.engine_loop import generate_tokens
from tests.model_families import save_config


def prepare_in(folder: Path, tune_seconds: float | None = 300.0) -> Any:
    """`tune_seconds=None`: the default of the recipe."""
    flags = {"model": TINY, "buckets": (32,), "batch_sizes": (4,), "tune_seconds": tune_seconds}
    return prepare(build_recipe({**flags, "cache_dir": str(folder)}, environ={}))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    """A cold start that compiled and timed every variant of every bucket, and its cache folder."""
    reset_programs()
    folder = tmp_path_factory.mktemp("tuned")
    yield prepare_in(folder), folder
    reset_programs()


@pytest.fixture
def prepare_auto(tuned: tuple[Any, Path], tmp_path: Path) -> Any:
    """Prepares the tiny model with mode auto, always in the same cache folder of this test.

    The folder contains the compiled programs of all variants as those of another plan: every program hits, and no
    variant has a recorded time.
    """
    folder = Path(shutil.copytree(tuned[1], tmp_path / "cache"))
    [path] = (folder / "manifests").glob("*.json")
    manifest = read_manifest(path)
    assert manifest is not None
    write_manifest(path.with_name("other.json"), replace(manifest, plan={**manifest.plan, "key": "other"}))
    path.unlink()
    reset_programs()
    yield functools.partial(prepare_in, folder)
    reset_programs()


def test_each_bucket_serves_with_its_fastest_variant_and_a_warm_start_times_nothing(tuned: tuple[Any, Path]) -> None:
    cold, folder = tuned
    for record in cold.records:
        [bucket] = [bucket for bucket in cold.plan.buckets if bucket.name == record.bucket]
        names = [variant.name for variant in cold.plan.variants(bucket)]
        assert [trial.variant for trial in record.trials] == names
        step_ms = {trial.variant: trial.step_ms for trial in record.trials}
        assert None not in step_ms.values()
        assert record.variant == min(step_ms, key=lambda name: step_ms[name])
        assert record.parity.passed
    manifest = read_manifest(manifest_path(cold.plan.cache_dir, cold.plan.key))
    assert manifest is not None and manifest.trials() == {record.bucket: record.trials for record in cold.records}

    reset_programs()
    with measure_compiles() as warm_start:
        warm = prepare_in(folder)
    assert [record.trials for record in warm.records] == [record.trials for record in cold.records]
    assert [record.variant for record in warm.records] == [record.variant for record in cold.records]
    assert [record.outcome for record in warm.records] == ["hit", "hit"]
    programs_per_variant = {"last-token-rows": 2}  # the last layer is a program of its own
    expected = [programs_per_variant.get(record.variant, 1) for record in warm.records]
    assert [record.programs for record in warm.records] == expected
    assert warm_start.counts.programs == sum(expected), "variants that were not selected are not loaded"


def forbid_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure_step_ms(*args: Any) -> float:
        raise AssertionError("a step was timed")

    monkeypatch.setattr(tuning, "measure_step_ms", measure_step_ms)


@pytest.fixture
def compiled_variants(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(bucket, variant) of each call of `compile_variant`."""
    compile_variant, calls = tuning.compile_variant, []

    def note_variant(batch: WarmupBatch, variant: Variant) -> CompiledVariant:
        calls.append((batch.bucket.name, variant.name))
        return compile_variant(batch, variant)

    monkeypatch.setattr(tuning, "compile_variant", note_variant)
    return calls


def test_without_tuning_time_the_first_variant_serves_and_nothing_is_timed(
    prepare_auto: Any, compiled_variants: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, and in a warm start too."""
    forbid_timing(monkeypatch)
    for _ in range(2):
        deployment = prepare_auto(tune_seconds=None)
        assert deployment.plan.mode == "auto"
        assert [(record.variant, record.trials) for record in deployment.records] == [("default", ())] * 2
        assert compiled_variants == [("prefill:32", "default"), ("decode:4", "default")]
        assert len(generate_tokens(deployment.engine, [[5, 6, 7]], SamplingParams(max_tokens=3))[0]) == 3
        compiled_variants.clear()
        reset_programs()


def test_a_start_without_tuning_time_keeps_the_results_of_one_that_had_it(
    tuned: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start after it, which has the same time as the first one, times nothing either."""
    forbid_timing(monkeypatch)
    folder = Path(shutil.copytree(tuned[1], tmp_path / "cache"))
    for tune_seconds in (0.0, 300.0):
        reset_programs()
        records = prepare_in(folder, tune_seconds).records
        assert [record.variant for record in records] == [record.variant for record in tuned[0].records]
        assert [record.trials for record in records] == [record.trials for record in tuned[0].records]
    reset_programs()


def test_without_tuning_time_a_first_variant_that_fails_its_parity_check_is_replaced(
    prepare_auto: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forbid_timing(monkeypatch)
    monkeypatch.setattr(variants, "CPU_PREFILL", (LAST_TOKEN_ROWS, DEFAULT, MAX_AUTOTUNE))
    check_bucket, checked = ParityChecker.check, []

    def fail_first_variant(self: ParityChecker, bucket: Any) -> Any:
        check = check_bucket(self, bucket)
        checked.append(bucket.name)
        return check._replace(parity=replace(check.parity, passed=len(checked) > 1))

    monkeypatch.setattr(ParityChecker, "check", fail_first_variant)
    cold, _ = prepare_auto(tune_seconds=0.0).records
    reset_programs()
    warm, _ = prepare_auto(tune_seconds=0.0).records
    assert checked == ["prefill:32", "prefill:32", "decode:4", "prefill:32", "decode:4"]
    assert (cold.variant, cold.parity.passed) == (warm.variant, warm.parity.passed) == ("default", True)
    [trial] = cold.trials
    assert (trial.variant, trial.step_ms) == ("last-token-rows", None)
    assert trial.error.startswith("failed the parity check: compiled logits differ from float64 by ")
    assert warm.trials == cold.trials, "a warm start does not try it again"
    [message] = [record.getMessage() for record in caplog.records if "is not used" in record.getMessage()]
    assert message == f"prefill:32: variant last-token-rows is not used: {trial.error}"


def test_without_tuning_time_no_variant_is_tried_after_the_default_one(
    prepare_auto: Any, compiled_variants: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_logits = parity_check.compare_logits
    monkeypatch.setattr(
        parity_check, "compare_logits", lambda *args: replace(compare_logits(*args), passed=False, kl=0.5)
    )
    with pytest.raises(CompileError, match="prefill:32 failed its parity check"):
        prepare_auto(tune_seconds=0.0)
    assert compiled_variants == [("prefill:32", "default")]


@pytest.mark.long  # a first variant that fails its parity check is replaced too, see above
def test_a_model_that_cannot_select_rows_early_serves_with_the_next_variant(
    tmp_path: Path, compiled_variants: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt2's forward reshapes the last layer's output to the shape of its input."""
    forbid_timing(monkeypatch)
    monkeypatch.setattr(variants, "CPU_PREFILL", (LAST_TOKEN_ROWS, DEFAULT))
    folder = save_config("gpt2", tmp_path / "gpt2", n_layer=2)
    flags = {"model": folder, "load_format": "dummy", "buckets": (16, 64), "batch_sizes": (32,)}
    flags |= {"cache_dir": str(tmp_path / "cache")}
    reset_programs()
    cold = prepare(build_recipe(flags, environ={}))
    small, large, decode = cold.records
    assert [record.variant for record in cold.records] == ["default"] * 3
    assert [[trial.variant for trial in record.trials] for record in cold.records] == [["last-token-rows"]] * 2 + [[]]
    assert all("shape" in trial.error and trial.step_ms is None for trial in small.trials + large.trials)
    assert small.outcome == large.outcome == "miss", "programs of the failed variant are compiled in this start"
    assert all(record.parity.passed for record in cold.records)
    assert len(generate_tokens(cold.engine, [[5, 6, 7], [8] * 100], SamplingParams(max_tokens=4))[1]) == 4

    reset_programs()
    compiled_variants.clear()
    warm = prepare(build_recipe(flags, environ={}))
    assert compiled_variants == [("prefill:64", "default"), ("decode:32", "default"), ("prefill:16", "default")]
    assert [record.trials for record in warm.records] == [record.trials for record in cold.records]
    assert [record.outcome for record in warm.records] == ["hit"] * 3
    reset_programs()


def test_the_first_variant_does_not_count_as_tuning_time(prepare_auto: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest bucket goes first. Its first variant takes 0.5 s to compile, and its share of 0.2 s is untouched."""
    compile_variant, tune = tuning.compile_variant, tuning.tune
    shares: dict[str, float] = {}
    compiled: dict[str, list[str]] = {}

    def compile_slowly(batch: WarmupBatch, variant: Variant) -> CompiledVariant:
        if not compiled[batch.bucket.name]:
            time.sleep(0.5)
        compiled[batch.bucket.name].append(variant.name)
        return compile_variant(batch, variant)

    def note_share(batch: WarmupBatch, known_trials: Any, has_more_time: bool, seconds: float) -> Any:
        shares[batch.bucket.name], compiled[batch.bucket.name] = seconds, []
        return tune(batch, known_trials, has_more_time, seconds)

    monkeypatch.setattr(tuning, "compile_variant", compile_slowly)
    monkeypatch.setattr(warmup, "tune", note_share)
    records = {record.bucket: record for record in prepare_auto(tune_seconds=0.4).records}
    assert shares["prefill:32"] == 0.2, "an equal share for each bucket"
    assert len(records["prefill:32"].trials) > 1
    spent = sum(trial.seconds for trial in records["prefill:32"].trials[1:])
    assert shares["decode:4"] == pytest.approx(0.4 - spent)


def test_each_bucket_runs_the_program_of_its_variant(prepare_auto: Any) -> None:
    """Returning to a variant loads no program; a variant that was not tried loads one."""
    deployment = prepare_auto(tune_seconds=0.0)
    runner, [bucket] = deployment.engine.runner, deployment.plan.decode_buckets
    tried, untried = deployment.plan.variants(bucket)[:2]
    counts = []
    for variant in (tried, untried, tried, untried):
        runner.set_variant(bucket, variant)
        with measure_compiles() as compilation:
            runner.rerun(bucket)
        counts.append(compilation.counts.programs)
    assert counts == [0, 1, 0, 0]


def test_a_fused_step_gives_the_same_tokens(prepare_auto: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole model through the pass of the GPU's fused variants, where decode attention applies RoPE."""
    fused, rope_in_attention = Variant("fused", fused_epilogues=True), []
    reference = backends.IMPLEMENTATIONS["reference"]

    def noted_decode(*args: Any) -> Any:
        rope_in_attention.append(args[8] is not None)
        return reference.decode(*args)

    deployment = prepare_auto(tune_seconds=0.0)
    prompts, params = [[5, 6, 7], [8, 9, 10, 11, 200]], SamplingParams(max_tokens=12)
    plain = generate_tokens(deployment.engine, prompts, params)
    runner, [bucket] = deployment.engine.runner, deployment.plan.decode_buckets
    runner.set_variant(bucket, fused)
    runner.rerun(bucket)
    monkeypatch.setitem(backends.IMPLEMENTATIONS, "reference", reference._replace(decode=noted_decode))
    assert generate_tokens(deployment.engine, prompts, params) == plain
    assert rope_in_attention and all(rope_in_attention)


def test_a_variant_that_failed_is_never_the_fastest() -> None:
    trials = (Trial("a", None, 1.0, "it does not compile"), Trial("b", 3.0, 1.0), Trial("c", 2.0, 1.0))
    assert fastest(trials, {name: Variant(name) for name in "abc"}).variant == "c"


def test_compilation_of_a_variant_includes_the_programs_it_shares_with_an_earlier_one() -> None:
    def compiled_variant(programs: int) -> CompiledVariant:
        counts = CompileCounts(programs=programs, cache_misses=programs)
        return CompiledVariant(CompileStats(float(programs), counts), 0.0, None)

    other = attention_variant("flash-attn-4")
    compiled = {DEFAULT: compiled_variant(1), LAST_TOKEN_ROWS: compiled_variant(2), other: compiled_variant(4)}
    assert [total_compilation(variant, compiled).counts.programs for variant in compiled] == [1, 3, 4]
    loaded = CompiledVariant(CompileStats(0.1, CompileCounts()), 0.0, None)
    timed_before = total_compilation(DEFAULT, {LAST_TOKEN_ROWS: compiled_variant(2), DEFAULT: loaded})
    assert timed_before.counts.outcome == "miss", "this run compiled, though the variant was timed in an earlier one"


def test_a_variant_that_slows_every_start_must_bring_its_required_speedup() -> None:
    variants = {"a": Variant("a"), "flash-attn-4": attention_variant("flash-attn-4")}
    for step_ms, selected in ((9.6, "a"), (9.4, "flash-attn-4")):
        trials = (Trial("a", 10.0, 1.0), Trial("flash-attn-4", step_ms, 1.0))
        assert fastest(trials, variants).variant == selected


@pytest.mark.long  # three tuned starts
def test_variants_an_earlier_run_had_no_time_for_are_tried_when_the_time_grows(prepare_auto: Any) -> None:
    assert [len(record.trials) for record in prepare_auto(tune_seconds=0.0).records] == [0, 0]
    reset_programs()
    assert [len(record.trials) for record in prepare_auto(tune_seconds=300.0).records] == [3, 2]
    reset_programs()
    records = prepare_auto(tune_seconds=10.0).records
    assert [len(record.trials) for record in records] == [3, 2], "less time drops no trial"


def test_a_variant_that_does_not_compile_is_skipped_and_recorded(
    prepare_auto: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's own errors share no base class with torch's."""
    inductor_options = jit.inductor_options

    class OutOfResources(Exception):
        pass

    def failing_options(variant: Any, plan: Any) -> Any:
        if variant.name == "default":
            raise OutOfResources("shared memory, required: 262144")
        return inductor_options(variant, plan)

    monkeypatch.setattr(jit, "inductor_options", failing_options)
    for record in prepare_auto().records:
        assert record.variant != "default"
        errors = {trial.variant: trial.error for trial in record.trials}
        assert errors.pop("default") == "shared memory, required: 262144"
        assert errors and not any(errors.values())


def test_a_fast_variant_that_fails_its_parity_check_is_skipped_and_recorded(
    prepare_auto: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_logits = parity_check.compare_logits
    results: list[Parity] = []

    def fail_first_variant(*args: Any) -> Parity:
        parity = compare_logits(*args)
        is_first = len(results) < parity_check.MAX_FAILURES
        results.append(replace(parity, passed=False, kl=0.5) if is_first else parity)
        return results[-1]

    monkeypatch.setattr(parity_check, "compare_logits", fail_first_variant)
    cold, warm = prepare_auto().records[0], prepare_auto().records[0]
    failed = [trial for trial in cold.trials if trial.error]
    assert [trial.step_ms for trial in failed] == [None]
    assert failed[0].error.startswith("failed the parity check: compiled logits differ from float64 by ")
    assert "KL 0.5 nats" in failed[0].error
    assert cold.variant != failed[0].variant and cold.parity.passed
    assert warm.variant == cold.variant, "a warm start does not try it again"
    assert warm.trials == cold.trials


def test_if_no_variant_compiles_the_last_error_is_raised(prepare_auto: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing_options(variant: Any, plan: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(jit, "inductor_options", failing_options)
    with pytest.raises(SpaceError, match="out of memory during warm-up"):
        prepare_auto()


@pytest.mark.long  # two tuned starts
def test_timing_does_not_disturb_the_parity_check(tmp_path: Path) -> None:
    """With so few KV blocks that the timing batch shares blocks with the check batch."""
    reset_programs()
    flags = {"model": TINY, "buckets": (32,), "batch_sizes": (4,), "tune_seconds": 300.0, "kv_blocks": 9}
    deployment = prepare(build_recipe({**flags, "cache_dir": str(tmp_path)}, environ={}))
    assert all(record.parity.passed for record in deployment.records)
    reset_programs()
