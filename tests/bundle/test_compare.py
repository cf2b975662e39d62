"""Comparison of two caches: the inputs and the files that differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.bundle.why import compare_manifests
from tcdeploy.cache.record.manifest import Manifest, write_manifest
from tests.bundle.conftest import Keys, Packed
from tests.bundle.fake_caches import KINDS, fill, make_small, manifest_for, path_of


@pytest.fixture
def first(small: Packed) -> Manifest:
    return small.manifest


def test_a_cache_does_not_differ_from_itself(first: Manifest) -> None:
    comparison = compare_manifests([first], [first])
    assert comparison.differences == comparison.changed == ()
    assert comparison.only_first == comparison.only_second == ()
    assert comparison.same == len(KINDS)


def test_the_same_cache_in_another_folder_does_not_differ(first: Manifest, tmp_path: Path) -> None:
    comparison = compare_manifests([first], [make_small(tmp_path / "elsewhere")])
    assert comparison.differences == () and comparison.same == len(KINDS)


def test_files_are_grouped_by_the_cache_that_has_them(first: Manifest) -> None:
    added = replace(first.files[0], path="fxgraph/added")
    changed = replace(first.files[3], sha256="0" * 64)
    second = replace(first, files=(*first.files[1:3], changed, *first.files[4:], added))
    comparison = compare_manifests([first], [second])
    assert comparison.only_first == (first.files[0].path,) and comparison.only_second == ("fxgraph/added",)
    assert comparison.changed == (first.files[3].path,) and comparison.same == len(KINDS) - 2
    swapped = compare_manifests([second], [first])
    assert (swapped.only_first, swapped.only_second) == (comparison.only_second, comparison.only_first)


def test_differences_of_environment_plan_config_and_ops_list_both_values(first: Manifest) -> None:
    config = {"model_type": "llama", "rope": 1}
    origin = replace(first.origin, model_config=config, sources={"kernels/linear/ops.py": "6" * 64})
    second = replace(
        first,
        environment={**first.environment, "torch": "9.9"},
        plan={**first.plan, "compute_dtype": "float16"},
        origin=origin,
    )
    differences = compare_manifests([first], [second]).differences
    assert {difference.name: (difference.here, difference.there) for difference in differences} == {
        "environment.torch": (first.environment["torch"], "9.9"),
        "plan.compute_dtype": (first.plan["compute_dtype"], "float16"),
        "config.hidden_size": ("4096", "-"),
        "config.rope": ("-", "1"),
        "tcdeploy/kernels/linear/ops.py": ("5" * 12, "6" * 12),
    }


@pytest.fixture
def packages(first: Manifest) -> Manifest:
    """The other plan that `warm` fills, which has one file of its own."""
    return replace(first, plan={**first.plan, "programs": "aot"}, files=(replace(first.files[0], path="aot/a"),))


def test_jit_programs_and_packages_are_compared_each_with_their_kind(first: Manifest, packages: Manifest) -> None:
    other_torch = {"environment": {**first.environment, "torch": "9.9"}}
    second = [replace(packages, **other_torch), replace(first, **other_torch)]
    comparison = compare_manifests([first, packages], second)
    assert [(item.name, item.there) for item in comparison.differences] == [("environment.torch", "9.9")]
    assert comparison.changed == () and comparison.same == len(KINDS) + 1


def test_files_of_packages_that_one_cache_lacks_are_listed(first: Manifest, packages: Manifest) -> None:
    comparison = compare_manifests([first, packages], [first])
    assert comparison.differences == () and comparison.only_first == ("aot/a",)
    assert [item.name for item in compare_manifests([first], [packages]).differences] == ["plan.programs"]


def test_paths_and_decisions_are_not_compared(first: Manifest) -> None:
    environment = {**first.environment, "user_cache_dir": "/x", "inductor_cache_dir": "/y"}
    plan = {**first.plan, "cache_dir": "/z", "decisions": []}
    assert compare_manifests([first], [replace(first, environment=environment, plan=plan)]).differences == ()


def test_the_command_compares_a_bundle_with_a_folder(
    run_cli: Callable[..., Any], small: Packed, tmp_path: Path
) -> None:
    same = run_cli("cache", "diff", str(small.bundle), str(small.folder))
    assert same.returncode == 0, same.stderr
    assert same.stdout.strip() == f"{len(KINDS)} files are identical"
    make_small(tmp_path / "other", seed=4, bucket=64)
    result = run_cli("cache", "diff", str(small.bundle), str(tmp_path / "other"))
    assert "plan.buckets" in result.stdout and "plan.key" in result.stdout
    document = json.loads(run_cli("cache", "diff", str(small.bundle), str(tmp_path / "other"), "--json").stdout)
    assert set(document["changed"]) == set(KINDS) and document["same"] == 0


def test_the_command_requires_plans_of_one_model_per_side(
    run_cli: Callable[..., Any], small: Packed, tmp_path: Path
) -> None:
    for bucket in (32, 64):
        make_small(tmp_path / "two", bucket=bucket)
    result = run_cli("cache", "diff", str(small.bundle), str(tmp_path / "two"))
    assert result.returncode == 2 and "holds 2 plans" in result.stderr
    for target in (tmp_path / "nowhere", tmp_path):
        result = run_cli("cache", "diff", str(small.bundle), str(target))
        assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr


def test_the_command_compares_folders_with_jit_programs_and_packages(
    run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    for name in ("a", "b"):
        for programs in ("jit", "aot"):
            made = make_small(tmp_path / name)
            path_of(tmp_path / name, made).unlink()
            plan = {**made.plan, "programs": programs, "key": f"{programs}-{made.plan['key']}"}
            manifest = replace(made, plan=plan)
            write_manifest(path_of(tmp_path / name, manifest), manifest)
    result = run_cli("cache", "diff", str(tmp_path / "a"), str(tmp_path / "b"))
    assert result.returncode == 0 and result.stdout.strip() == f"{len(KINDS)} files are identical", result.stderr


def test_the_command_limits_the_list_of_files(run_cli: Callable[..., Any], keys: Keys, tmp_path: Path) -> None:
    for name in ("a", "b"):
        manifest = manifest_for(tmp_path / name, fill(tmp_path / name, {f"{name}/{n:02}": 9 for n in range(25)}))
        write_manifest(path_of(tmp_path / name, manifest), manifest)
    result = run_cli("cache", "diff", str(tmp_path / "a"), str(tmp_path / "b"))
    assert result.stdout.count("only in the first: a/") == 20 and "only in the second: 5 more" in result.stdout
