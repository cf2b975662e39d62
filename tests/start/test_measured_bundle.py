"""Bundles that are packed after the first start of a build without the GPU: their measurements and their header."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tcdeploy.bundle.pack import pack
from tcdeploy.bundle.unpack import UnpackResult, unpack
from tcdeploy.cache.files.records import hash_files
from tcdeploy.cache.record.bundle_header import CheckedHeader, Header, Payload
from tcdeploy.cache.record.manifest import BlindBuild, Manifest, read_manifests, write_manifest
from tcdeploy.cache.trust.signing import SignedHeader, generate_key, trust
from tcdeploy.cli.warm import _enforce_hits
from tcdeploy.errors import ThresholdError, TrustError
from tcdeploy.planning.bucket_record import blind_record
from tcdeploy.start.model_code import ModelCode
from tcdeploy.start.package_build import PackageResult
from tests.bundle.fake_caches import as_installed, key_of, make_small, path_of, record_of
from tests.cache.test_manifest import MANIFEST
from tests.conftest import PACKAGE_FLAGS, TINY, RunCLI, cli_environment
from tests.start.test_first_start import H200, as_built

# A start on this CPU, in which the check of the GPU sees the GPU of the build.
FIRST_START = """
import sys
from tcdeploy.planning.gpu_description import read_gpu_description
from tcdeploy.start.blind import first_start
first_start.describe_first_gpu = lambda environment: read_gpu_description("h200")
from tcdeploy.cli.app import main
sys.exit(main())
"""
WARM = ("warm", TINY, *PACKAGE_FLAGS, "--require-hit")
BUILT = "built for NVIDIA H200 without that GPU (1 choices not timed)"
COSTS = {"prefill_ms": [[32, 1.5]]}


@pytest.fixture
def keys(tmp_path: Path) -> tuple[str, ...]:
    """Flags that trust the key tmp_path/ci.key."""
    generate_key(tmp_path / "ci")
    trust("ci", tmp_path / "ci.pub", tmp_path / "trusted")
    return ("--trusted-keys", str(tmp_path / "trusted"))


def test_what_the_first_start_has_measured_is_in_the_bundle_that_is_packed_afterwards(
    filled_packages: Path, keys: tuple[str, ...], tmp_path: Path, run_cli: RunCLI
) -> None:
    folder = Path(shutil.copytree(filled_packages, tmp_path / "folder"))
    [path] = folder.glob("manifests/*.json")
    write_manifest(path, as_built(path))
    sign = ("--sign", str(tmp_path / "ci.key"))
    built, measured, card, server = (str(tmp_path / name) for name in ("built.tcb", "measured.tcb", "card", "server"))
    assert run_cli("cache", "pack", str(folder), "-o", built, *sign).returncode == 0
    command = [sys.executable, "-c", FIRST_START, *WARM, "--cache-dir", card, "--cache-from", built, *keys]
    first = subprocess.run(command, capture_output=True, text=True, env=cli_environment(tmp_path))
    assert first.returncode == 0, first.stderr
    packed = run_cli("cache", "pack", card, "-o", measured, *sign)
    assert packed.returncode == 0, packed.stderr
    not_run, run = (run_cli("cache", "verify", bundle, *keys).stdout for bundle in (built, measured))
    assert f"{BUILT}, not run; signed by ci" in not_run and f"{BUILT}, then run on a CPU; signed by ci" in run
    compared = json.loads(run_cli("cache", "diff", built, measured, "--json").stdout)
    assert {path.partition("/")[0] for path in compared["only_second"]} == {"aot", "references"}
    assert compared["only_first"] == compared["changed"] == []

    second = run_cli(*WARM, "--cache-dir", card, *keys)
    assert second.returncode == 0 and "compiled on this machine" not in second.stderr, "a start added them on purpose"

    assert run_cli("cache", "unpack", measured, server, *keys).returncode == 0
    again = run_cli(*WARM, "--cache-dir", server, "--require-signed", *keys)
    assert again.returncode == 0, again.stderr
    (there,), (here,) = (read_manifests(folder).values() for folder in (card, server))
    assert there.step_costs is not None and here.step_costs == there.step_costs, "they are not measured again"
    listed = json.loads(run_cli("cache", "ls", server, "--json").stdout)["plans"]
    assert [(plan["is_built_without_gpu"], plan["has_run"]) for plan in listed] == [(True, True)]

    command.append("--require-signed")
    fetched = subprocess.run(command, capture_output=True, text=True, env=cli_environment(tmp_path))
    assert fetched.returncode == 0, fetched.stderr
    assert "the measurements of earlier starts in the folder are discarded" in fetched.stderr


def without_a_start(manifest: Manifest) -> Manifest:
    records = tuple(blind_record(record.bucket, record.variant, 1.0, 1) for record in manifest.buckets)
    return dataclasses.replace(manifest, buckets=records, blind=BlindBuild(H200, ()))


def test_measurements_replace_the_manifest_of_the_same_files_and_not_the_other_way_round(tmp_path: Path) -> None:
    """With random weights, the first start adds no file, only times and results."""
    made = make_small(tmp_path / "cache", compiled_at=5)
    measured = dataclasses.replace(made, blind=BlindBuild(H200, ()), step_costs=COSTS)
    for name, manifest in (("built", without_a_start(made)), ("measured", measured)):
        write_manifest(path_of(tmp_path / "cache", made), manifest)
        pack(tmp_path / "cache", key_of(made), tmp_path / f"{name}.tcb")

    def unpack_into_server(name: str) -> UnpackResult:
        return unpack(tmp_path / f"{name}.tcb", tmp_path / "server", tmp_path / "trusted", allow_unsigned=True)

    for name in ("built", "measured"):
        assert not unpack_into_server(name).already_present
        [manifest] = read_manifests(tmp_path / "server").values()
        assert (manifest.has_run, manifest.step_costs) == ((True, COSTS) if name == "measured" else (False, None))
    assert unpack_into_server("measured").already_present
    with pytest.raises(TrustError, match="packed before the first start on the GPU, and the newer one after it"):
        unpack_into_server("built")


def test_unpacking_a_build_again_keeps_what_its_first_start_has_measured(tmp_path: Path) -> None:
    made = without_a_start(make_small(tmp_path / "cache", compiled_at=5))
    write_manifest(path_of(tmp_path / "cache", made), made)
    pack(tmp_path / "cache", key_of(made), tmp_path / "built.tcb")
    server = tmp_path / "server"

    def unpack_build(**options: bool) -> UnpackResult:
        return unpack(tmp_path / "built.tcb", server, tmp_path / "trusted", allow_unsigned=True, **options)

    def run_first_start(**differences: Any) -> Manifest:
        (server / "references").mkdir(exist_ok=True)
        (server / "references" / "new").write_bytes(b"logits")
        files = (*made.files, *hash_files(server, ["references/new"]))
        records = tuple(record_of(record.bucket) for record in made.buckets)
        run = dataclasses.replace(made, buckets=records, files=files, step_costs=COSTS, **differences)
        write_manifest(path_of(server, made), run)
        return run

    def stored() -> Manifest:
        [manifest] = read_manifests(server).values()
        return manifest

    assert unpack_build().measured_plans == ()
    for differences in ({}, {"compiled_at": 4}, {"blind": BlindBuild(H200, ("another build",))}):
        run = run_first_start(**differences)
        is_same_build = not differences
        result = unpack_build()
        assert (result.already_present, result.measured_plans) == (is_same_build, (key_of(made),) * is_same_build)
        assert result.unmeasured_plans == (key_of(made),) * (not is_same_build)
        assert stored().step_costs == run.step_costs if is_same_build else not stored().has_run
    for options in ({"allow_rollback": True}, {"keeps_measurements": False}):
        for added in (True, False):  # with random weights, the start adds no file
            run = run_first_start()
            if not added:
                write_manifest(path_of(server, made), dataclasses.replace(run, files=made.files))
            result = unpack_build(**options)
            assert (result.measured_plans, result.unmeasured_plans) == ((), (key_of(made),)) and not stored().has_run
    run_first_start()
    (server / "references" / "new").write_bytes(b"damaged")
    assert unpack_build().measured_plans == () and not stored().has_run, "damaged measurements are not kept"


def test_the_command_says_whether_measurements_are_kept(tmp_path: Path, run_cli: RunCLI) -> None:
    made = without_a_start(make_small(tmp_path / "cache", environment=dataclasses.asdict(as_installed())))
    write_manifest(path_of(tmp_path / "cache", made), made)
    pack(tmp_path / "cache", key_of(made), tmp_path / "built.tcb")
    run = dataclasses.replace(made, buckets=tuple(record_of(record.bucket) for record in made.buckets))
    command = ("cache", "unpack", str(tmp_path / "built.tcb"), str(tmp_path / "server"), "--allow-unsigned")
    assert "are kept" not in run_cli(*command).stdout
    write_manifest(path_of(tmp_path / "server", made), run)
    again = run_cli(*command)
    assert again.returncode == 0 and "already present" in again.stdout, again.stderr
    assert "the measurements of this build's first start in the folder are kept" in again.stdout
    other = dataclasses.replace(made, blind=BlindBuild(H200, ("another build",)), files=made.files[1:])
    write_manifest(path_of(tmp_path / "cache", made), other)
    pack(tmp_path / "cache", key_of(made), tmp_path / "built.tcb")
    of_other_build = run_cli(*command)
    assert of_other_build.returncode == 0 and "are kept" not in of_other_build.stdout, of_other_build.stderr
    assert f"earlier starts in the folder are discarded (plan {key_of(made)})" in of_other_build.stdout


@pytest.mark.parametrize(
    ("bundle", "has_run", "must_be_signed", "adds"),
    [
        ("of a build", False, False, True),
        ("of a build", True, False, True),  # a start with --require-signed has run it, and added nothing
        ("of a build", False, True, False),
        ("of a start", True, False, False),
        ("none", True, False, True),
    ],
)
def test_a_start_adds_files_to_a_plan_that_was_packed_before_it_ran(
    bundle: str, has_run: bool, must_be_signed: bool, adds: bool
) -> None:
    built = without_a_start(MANIFEST)
    header = Header(built if bundle == "of a build" else MANIFEST, Payload(1, "a" * 64))
    checked = CheckedHeader(header, SignedHeader(b"", (), 0), None) if bundle != "none" else None
    start: Any = ModelCode.__new__(ModelCode)
    start._staging = SimpleNamespace(bundle=checked, is_private_copy=False)
    start._earlier = MANIFEST if has_run else built
    start._request = SimpleNamespace(recipe=SimpleNamespace(require_signed=must_be_signed))
    assert start._may_add_files is adds


def test_a_miss_of_jit_programs_beside_packages_names_the_option_that_checks_these() -> None:
    report: Any = SimpleNamespace(records=[record_of("prefill:32", "miss", cache_misses=1)], is_recorded=True)
    for packages, is_named in ((PackageResult("0123456789abcdef", 0.0, 5), True), (None, False)):
        with pytest.raises(ThresholdError, match="1 of 1 buckets had to compile") as raised:
            _enforce_hits(report, packages)
        assert ("--programs aot" in raised.value.hint) is is_named
