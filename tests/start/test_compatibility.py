"""Which difference is named if the packages of a cache folder were made in another environment."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tcdeploy.cache.folder.layout import manifest_path
from tcdeploy.cache.record.manifest import parse_manifest, write_manifest
from tcdeploy.planning.environment import Environment, parse_environment
from tcdeploy.start.record.lookup import environment_mismatch
from tests.bundle.fake_caches import key_of, manifest_for
from tests.machines import changed_environment


def write_packages(folder: Path, bucket: int, programs: str = "aot", **changes: object) -> Environment:
    """The manifest of one plan, and no files. Returns its environment."""
    manifest = manifest_for(folder, [], bucket=bucket)
    environment = changed_environment(parse_environment(manifest.environment), **changes)
    written = dataclasses.replace(
        manifest, plan={**manifest.plan, "programs": programs}, environment=dataclasses.asdict(environment)
    )
    write_manifest(manifest_path(folder, key_of(manifest)), written)
    return environment


def keys_in(folder: Path) -> list[str]:
    return [path.stem for path in Path(folder, "manifests").glob("*.json")]


def test_the_plan_with_the_fewest_differences_is_compared(tmp_path: Path) -> None:
    write_packages(tmp_path, 32, torch="1.0", triton="2.0")
    near = write_packages(tmp_path, 64, torch="1.0")
    write_packages(tmp_path, 128, programs="jit")  # has no packages
    here = changed_environment(near, torch="3.0")
    error = environment_mismatch(str(tmp_path), keys_in(tmp_path), here)
    assert error is not None and error.exit_code == 3
    assert error.message == f"the packages in {tmp_path} were made in another environment: torch 1.0 (here 3.0)"


def test_packages_of_this_environment_are_no_mismatch(tmp_path: Path) -> None:
    """Neither is what a start from packages does not use: a compiler, transformers, and on a CPU Triton."""
    write_packages(tmp_path, 32, torch="1.0")
    here = write_packages(tmp_path, 64)
    bare = dataclasses.replace(here, compiler="", transformers="", triton="", install_paths="/elsewhere")
    assert environment_mismatch(str(tmp_path), keys_in(tmp_path), bare) is None
    assert environment_mismatch(str(tmp_path), [], here) is None


def test_a_manifest_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    here = changed_environment(write_packages(tmp_path, 32), torch="3.0")
    [path] = (tmp_path / "manifests").iterdir()
    assert environment_mismatch(str(tmp_path), [path.stem], here) is not None
    manifest = parse_manifest(path.read_text(), path)
    write_manifest(path, dataclasses.replace(manifest, environment={**manifest.environment, "unknown": 1}))
    assert environment_mismatch(str(tmp_path), [path.stem], here) is None
    path.write_text("damaged")
    assert environment_mismatch(str(tmp_path), [path.stem], here) is None
