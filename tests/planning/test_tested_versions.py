"""A version outside the tested range is one warning in the Plan, and a missing private name one each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tcdeploy.planning import tested_versions
from tcdeploy.planning.backends import TORCH_FLASH
from tcdeploy.planning.decision import Decision
from tcdeploy.planning.environment import DYNAMIC_SIZES, diff_environments
from tcdeploy.planning.plan import Plan, make_plan
from tcdeploy.planning.recipe import Recipe
from tcdeploy.planning.tested_versions import TESTED_VERSIONS, untested_packages
from tests.machines import H100, LAPTOP, LLAMA_8B


def warnings_of(plan: Plan) -> list[Decision]:
    return [decision for decision in plan.decisions if decision.is_fallback]


def plan_with(**facts: object) -> Plan:
    return make_plan(Recipe(model="m", context=4096), replace(H100, **facts), LLAMA_8B)  # type: ignore[arg-type]


@pytest.mark.parametrize("package", TESTED_VERSIONS)
def test_both_ends_of_a_range_are_tested_and_their_neighbours_are_not(package: str) -> None:
    oldest, newest = TESTED_VERSIONS[package]
    major, minor = newest.split(".")
    for version in (oldest, newest, f"{newest}.1", f"{newest}.0+cu130", f"{newest}.0a0", ""):
        assert untested_packages({package: version}) == []
    for version in (f"{major}.{int(minor) + 1}.0", f"{int(major) + 1}.0", "0.1", "nightly"):
        assert untested_packages({package: version}) == [package]


def test_versions_inside_the_range_are_no_warning() -> None:
    assert warnings_of(plan_with()) == []


def test_an_untested_version_is_one_warning_for_all_packages() -> None:
    [warning] = warnings_of(plan_with(torch="2.15.0"))
    assert (warning.name, warning.value) == ("versions", "torch 2.15.0")
    assert warning.reason == f"tested with torch {tested_versions.tested_range('torch')}"
    [warning] = warnings_of(plan_with(torch="2.15.0", triton="3.9.0"))
    assert warning.value == "torch 2.15.0, triton 3.9.0"
    assert (
        warning.reason
        == f"tested with torch {tested_versions.tested_range('torch')}, triton {tested_versions.tested_range('triton')}"
    )


def test_a_machine_without_triton_has_no_version_of_it_to_warn_about() -> None:
    plan = make_plan(Recipe(model="m", context=4096), LAPTOP, LLAMA_8B)
    assert [warning for warning in warnings_of(plan) if warning.name == "versions"] == []


def test_a_missing_internal_is_a_warning_with_its_consequence_and_changes_no_key() -> None:
    lost = ("autotune cache", "autotune winners are timed again: torch 2.16 moved AutotuneCache.create")
    plan = plan_with(missing_internals=(lost,))
    assert warnings_of(plan) == [Decision(lost[0], "not available", lost[1], is_fallback=True)]
    assert plan.key == plan_with().key
    assert diff_environments(H100, replace(H100, missing_internals=(lost,))) == []


def test_without_dynamic_sizes_a_dynamic_range_becomes_static_buckets() -> None:
    recipe = Recipe(model="m", context=4096, shapes="dynamic", buckets=(512,), graphs="none")
    environment = replace(H100, missing_internals=((DYNAMIC_SIZES, "lost"),))
    assert [bucket.min_size for bucket in make_plan(recipe, H100, LLAMA_8B).prefill_buckets] == [2]
    plan = make_plan(recipe, environment, LLAMA_8B)
    assert [bucket.min_size for bucket in plan.prefill_buckets] == [0]
    assert "shapes" in {warning.name for warning in warnings_of(plan)}


def test_torch_flash_is_not_chosen_without_its_op() -> None:
    here = replace(H100, triton="")
    assert make_plan(Recipe(model="m", context=4096), here, LLAMA_8B).prefill_attention == "torch-flash"
    without = replace(here, missing_internals=((TORCH_FLASH, "lost"),))
    assert make_plan(Recipe(model="m", context=4096), without, LLAMA_8B).prefill_attention != "torch-flash"
