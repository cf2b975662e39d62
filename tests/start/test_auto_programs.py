"""`--programs auto`: what a start uses, and why, with packages in the cache folder and without."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.cache.folder.layout import manifest_path
from tcdeploy.cache.record.manifest import read_manifest, read_manifests, write_manifest
from tcdeploy.errors import IntegrityError
from tcdeploy.planning.environment import AOT_PACKAGES
from tcdeploy.planning.plan import Plan
from tcdeploy.planning.recipe import Recipe
from tcdeploy.start.auto_programs import (
    NO_PACKAGES,
    PACKAGES_FOUND,
    may_use_packages,
    resolve_planned,
    with_programs,
)
from tcdeploy.start.planned import PlannedModel, StartRequest
from tcdeploy.start.prepare import check_eager_start
from tests.conftest import TINY, RunCLI

FLAGS = ("--device", "cpu", "--buckets", "32", "--batch-sizes", "4")  # of the packages, without --programs
BUCKETS: dict[str, Any] = {"device": "cpu", "buckets": (32,), "batch_sizes": (4,)}


@pytest.fixture
def folder(tmp_path: Path, filled_packages: Path) -> Path:
    return Path(shutil.copytree(filled_packages, tmp_path / "cache"))


def generate(run_cli: RunCLI, folder: Path, *flags: str, new: bool = True) -> dict[str, Any]:
    """In a process that imports all that it needs, if `new`."""
    done = run_cli(
        "generate", TINY, "This module", "--max-new-tokens", "8", *FLAGS, *flags, "--cache-dir", str(folder), "--json",
        new=new,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def decision(plan: dict[str, Any] | Plan) -> tuple[str, str]:
    """The value and reason of the printed decision about programs."""
    items = plan["decisions"] if isinstance(plan, dict) else map(dataclasses.asdict, plan.decisions)
    (found,) = (item for item in items if item["name"] == "programs")
    return found["value"], found["reason"]


def test_auto_finds_the_start_record_that_aot_has_written(run_cli: RunCLI, folder: Path) -> None:
    document = generate(run_cli, folder)
    assert decision(document["plan"]) == ("aot", PACKAGES_FOUND)
    assert "transformers" not in document["import_seconds"]
    assert {bucket["outcome"] for bucket in document["buckets"]} <= {"hit", "reused"}


def test_packages_without_a_fitting_record_are_used_too_and_a_record_is_written_for_them(
    run_cli: RunCLI, folder: Path
) -> None:
    """The number of prefill steps in a row is in the record's key and in no plan's. aot finds what auto has written."""
    first = generate(run_cli, folder, "--max-consecutive-prefills", "3")
    assert decision(first["plan"]) == ("aot", PACKAGES_FOUND) and "transformers" in first["import_seconds"]
    assert {bucket["outcome"] for bucket in first["buckets"]} == {"hit"}
    second = generate(run_cli, folder, "--max-consecutive-prefills", "3", "--programs", "aot")
    assert "transformers" not in second["import_seconds"]
    assert second["token_ids"] == first["token_ids"]


def test_an_auto_start_compiles_no_packages(run_cli: RunCLI, folder: Path, filled_cache: Path) -> None:
    """Not even where some are left: without the manifest they may not be complete. The folder has the jit programs."""
    for path in folder.glob("manifests/*.json"):
        path.unlink()
    shutil.copytree(filled_cache, folder, dirs_exist_ok=True)
    before = sorted(folder.glob("aot/*/*"))
    document = generate(run_cli, folder, new=False)
    assert decision(document["plan"]) == ("jit", NO_PACKAGES)
    assert sorted(folder.glob("aot/*/*")) == before
    manifest = read_manifest(manifest_path(folder, document["plan"]["key"]))
    assert manifest is not None and len(read_manifests(folder)) == 2, "the other is that of the programs"
    assert manifest.plan["programs"] == manifest.origin.recipe["programs"] == "jit"


@pytest.mark.parametrize("name", ["cache_dir", "none"])
def test_without_packages_one_look_at_the_folder_decides(tmp_path: Path, filled_cache: Path, name: str) -> None:
    folder = filled_cache if name == "cache_dir" else tmp_path / "none"
    recipe = Recipe(model=TINY, cache_dir=str(folder), **BUCKETS)
    assert not may_use_packages(StartRequest(recipe))
    assert may_use_packages(StartRequest(dataclasses.replace(recipe, programs="aot")))


def test_what_the_request_excludes_is_not_looked_for(folder: Path) -> None:
    recipe = Recipe(model=TINY, cache_dir=str(folder), **BUCKETS)
    assert may_use_packages(StartRequest(recipe))
    for request in (
        StartRequest(recipe, eager=True),
        StartRequest(recipe, measure=True),
        StartRequest(dataclasses.replace(recipe, region="blocks")),
        StartRequest(dataclasses.replace(recipe, programs="jit")),
    ):
        assert not may_use_packages(request)
    check_eager_start(recipe)  # raises nothing: auto is jit there


@pytest.fixture(scope="module")
def planned_once(filled_packages: Path) -> PlannedModel:
    from tcdeploy.start.decide import decide

    recipe = Recipe(model=TINY, cache_dir=str(filled_packages), programs="aot", **BUCKETS)
    return decide(recipe)


@pytest.fixture
def planned(planned_once: PlannedModel, folder: Path) -> Callable[..., PlannedModel]:
    """The model as planned for `--programs auto` in a copy of the folder, with further fields of the recipe."""

    def plan(**fields: Any) -> PlannedModel:
        recipe = dataclasses.replace(planned_once.recipe, **{"programs": "auto", "cache_dir": str(folder), **fields})
        return dataclasses.replace(planned_once, recipe=recipe)

    return plan


@pytest.fixture
def packages(planned_once: PlannedModel) -> Callable[[Plan], Path]:
    """Where the packages of any plan are: all have those of the filled folder."""
    from tcdeploy.start.decide import _package_folder

    return lambda plan: _package_folder(planned_once, planned_once.plan)


def resolved(model: PlannedModel, packages: Callable[[Plan], Path], **more: Any) -> tuple[str, str]:
    found = resolve_planned(model, packages, **more)
    assert found.recipe.programs == found.plan.programs
    return decision(found.plan)


def test_the_plan_names_the_reason_of_each_choice(
    planned: Callable[..., PlannedModel], packages: Callable[[Plan], Path]
) -> None:
    assert resolved(planned(), packages) == ("aot", PACKAGES_FOUND)
    assert resolved(planned(), packages, jit_reason="eager") == ("jit", "eager")
    assert resolved(planned(batch_sizes=(2,)), packages) == ("jit", NO_PACKAGES), "of another plan"
    assert resolved(planned(), lambda plan: Path("aot/other")) == ("jit", NO_PACKAGES), "of other sources"
    assert resolved(planned(region="blocks"), packages) == ("jit", "packages need --region layer, not blocks")
    assert "tuned for a shorter time" in resolved(planned(tune_seconds=5.0), packages)[1]
    lacking = planned()
    missing = dataclasses.replace(lacking.environment, missing_internals=((AOT_PACKAGES, "no packages"),))
    value, reason = resolved(dataclasses.replace(lacking, environment=missing), packages)
    assert value == "jit" and AOT_PACKAGES in reason
    for programs in ("jit", "aot"):
        assert resolve_planned(planned(programs=programs), packages).recipe.programs == programs, "it was requested"


def test_keys_are_those_of_the_resolved_value(planned: Callable[..., PlannedModel]) -> None:
    jit, aot = (with_programs(planned(), programs, "reason").plan for programs in ("jit", "aot"))
    assert jit.key == with_programs(planned(programs="jit"), "jit").plan.key != aot.key
    assert {manifest.plan["key"] for manifest in read_manifests(aot.cache_dir).values()} == {aot.key}


def test_untrusted_packages_count_as_absent_and_one_warning_says_why(
    planned: Callable[..., PlannedModel], packages: Callable[[Plan], Path], caplog: pytest.LogCaptureFixture
) -> None:
    assert resolved(planned(require_signed=True), packages) == ("jit", "the packages of this plan are not trusted")
    (record,) = caplog.records
    assert "is not from a bundle that a trusted key signed" in record.getMessage()


def test_untrusted_packages_end_a_start_in_the_error_of_jit_programs(run_cli: RunCLI, folder: Path) -> None:
    done = run_cli("generate", TINY, "x", *FLAGS, "--cache-dir", str(folder), "--require-signed")
    assert done.returncode == 4, done.stderr
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning:")]
    assert len(warnings) == 1 and "the packages of this plan are not used" in warnings[0]


def test_damaged_packages_are_an_error_or_are_replaced_by_jit_programs(
    planned: Callable[..., PlannedModel], packages: Callable[[Plan], Path], folder: Path
) -> None:
    next(folder.glob("aot/*/*.pt2")).write_bytes(b"damaged")
    assert "are damaged" in resolved(planned(on_bad_cache="rebuild"), packages)[1]
    aot = with_programs(planned(), "aot").plan
    assert manifest_path(folder, aot.key).is_file(), "nothing was discarded: this only plans"
    manifest_path(folder, aot.key).write_text("{")
    with pytest.raises(IntegrityError):
        resolved(planned(), packages)


def test_packages_in_a_folder_that_cannot_be_written_are_used(run_cli: RunCLI, folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        path.chmod(0o500 if path.is_dir() else 0o400)
    try:
        assert decision(generate(run_cli, folder, new=False)["plan"]) == ("aot", PACKAGES_FOUND)
    finally:
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o700 if path.is_dir() else 0o600)


def test_a_plan_tuned_for_longer_keeps_its_packages(
    planned: Callable[..., PlannedModel], packages: Callable[[Plan], Path], folder: Path
) -> None:
    path = manifest_path(folder, with_programs(planned(), "aot").plan.key)
    manifest = read_manifest(path)
    assert manifest is not None
    write_manifest(path, dataclasses.replace(manifest, plan={**manifest.plan, "tune_seconds": 60.0}))
    for seconds in (0.0, 60.0):
        assert resolved(planned(tune_seconds=seconds), packages) == ("aot", PACKAGES_FOUND)


def test_a_dry_run_names_what_serve_would_start(run_cli: RunCLI, folder: Path) -> None:
    arguments = ("serve", TINY, *FLAGS, "--cache-dir", str(folder), "--dry-run", "--json")
    assert decision(json.loads(run_cli(*arguments).stdout)["plan"]) == ("aot", PACKAGES_FOUND)
    eager = json.loads(run_cli(*arguments, "--start", "eager").stdout)["plan"]
    assert decision(eager) == ("jit", "--start eager compiles them while the server runs")
    warm = json.loads(run_cli("warm", TINY, *FLAGS, "--cache-dir", str(folder), "--dry-run", "--json").stdout)["plan"]
    assert decision(warm) == ("jit", "packages are built afterwards")
