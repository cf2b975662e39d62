"""Which plans of a cache folder fit a machine: what a start does not need does not count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tcdeploy.cache.record.manifest import Manifest
from tcdeploy.doctor.cache_folder import plan_differences
from tcdeploy.planning.environment import Environment, parse_environment
from tests.bundle.fake_caches import make_small


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return make_small(tmp_path)


def names(manifest: Manifest, environment: Environment, **settings: str) -> list[str]:
    differences = plan_differences(
        manifest, environment, dict(manifest.origin.sources), {**manifest.origin.torch_settings, **settings}
    )
    return [difference.name for difference in differences]


def test_a_plan_fits_the_machine_that_made_it(manifest: Manifest) -> None:
    here = parse_environment(manifest.environment)
    assert names(manifest, here) == []
    assert names(manifest, replace(here, torch="2.12.0", cpu="AVX")) == ["torch", "cpu"]
    assert names(manifest, here, max_autotune="True") == ["torch.max_autotune"]


def test_sources_of_another_version_of_this_package_differ(manifest: Manifest) -> None:
    here = parse_environment(manifest.environment)
    [difference] = plan_differences(
        manifest, here, {"kernels/linear/ops.py": "6" * 64}, dict(manifest.origin.torch_settings)
    )
    assert difference.name == "tcdeploy/kernels/linear/ops.py"


def test_packages_need_neither_transformers_nor_a_compiler(manifest: Manifest) -> None:
    here = parse_environment(manifest.environment)
    without = replace(here, transformers="", compiler="")
    assert names(manifest, without) == ["transformers", "compiler"]
    with_packages = replace(manifest, plan={**manifest.plan, "programs": "aot"})
    assert names(with_packages, without) == []
    assert names(with_packages, replace(here, transformers="5.17.0")) == ["transformers"]
