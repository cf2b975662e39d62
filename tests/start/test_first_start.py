"""A plan that was built without its GPU is checked before its first start loads anything."""

from __future__ import annotations

import dataclasses
import json
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch import nn

from tcdeploy.cache.files.records import FileRecord, hash_files
from tcdeploy.cache.record.bundle_header import Header, Payload, header_bytes
from tcdeploy.cache.record.manifest import BlindBuild, Manifest, read_manifest, write_manifest
from tcdeploy.errors import IntegrityError, MismatchError
from tcdeploy.planning.bucket_record import blind_record
from tcdeploy.planning.gpu_description import GPUDescription, read_gpu_description
from tcdeploy.planning.recipe import Recipe
from tcdeploy.start.blind import first_start
from tests.cache.test_manifest import MANIFEST
from tests.conftest import PACKAGE_FLAGS, TINY, RunCLI
from tests.fork_server import HAS_GPU
from tests.machines import H100 as MACHINE

H200 = read_gpu_description("h200")


def cubin(architecture: int) -> bytes:
    """The header of an ELF file as CUDA 12 writes it."""
    header = bytearray(64)
    header[:5], header[8], header[48] = b"\x7fELF\x02", 7, architecture
    return bytes(header)


def built(folder: Path, **kernels: int) -> Manifest:
    """A plan for an H200 with a kernel of each of these architectures; `package` is in a package."""
    for name, architecture in kernels.items():
        if name == "package":
            (folder / "aot" / "key").mkdir(parents=True)
            with zipfile.ZipFile(folder / "aot" / "key" / "package.pt2", "w") as archive:
                archive.writestr("package/data/aotinductor/model/kernel.cubin", cubin(architecture))
        else:
            (folder / "triton" / name).mkdir(parents=True)
            (folder / "triton" / name / "kernel.cubin").write_bytes(cubin(architecture))
    files = hash_files(folder, [path.relative_to(folder).as_posix() for path in folder.rglob("*.*") if path.is_file()])
    record = blind_record("decode:1", "default", 1.0, 1)
    return dataclasses.replace(MANIFEST, buckets=(record,), files=files, blind=BlindBuild(H200, ()))


def check(manifest: Manifest, folder: Path, monkeypatch: pytest.MonkeyPatch, here: GPUDescription = H200) -> None:
    monkeypatch.setattr(first_start, "describe_first_gpu", lambda environment: here)
    first_start.check_first_start(manifest, MACHINE, SimpleNamespace(path=str(folder)))  # type: ignore[arg-type]


def test_kernels_of_the_described_gpu_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(built(tmp_path, one=90, package=90), tmp_path, monkeypatch)


@pytest.mark.parametrize("kernels", [{"one": 90, "other": 89}, {"one": 90, "package": 100}])
def test_a_kernel_of_another_architecture_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: dict[str, int]
) -> None:
    with pytest.raises(MismatchError, match=r"kernel.cubin is compiled for sm_(89|100), and this GPU requires sm_90"):
        check(built(tmp_path, **kernels), tmp_path, monkeypatch)


def test_an_unreadable_package_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = built(tmp_path, package=90)
    (tmp_path / "aot" / "key" / "package.pt2").write_bytes(b"no archive")
    with pytest.raises(IntegrityError, match=r"package.pt2 cannot be read"):
        check(manifest, tmp_path, monkeypatch)


def test_each_property_on_which_kernels_depend_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = built(tmp_path, one=90)
    others: dict[str, Any] = {"name": "NVIDIA H100 NVL", "capability": (8, 9)}
    names = {item.name for item in dataclasses.fields(GPUDescription)}
    free = {"memory_bytes", "clock_mhz", "memory_clock_mhz", "memory_bus_bits", "cuda", "driver"}
    assert names - free == set(first_start.COMPILED_FIELDS)
    for name in first_start.COMPILED_FIELDS:
        here = dataclasses.replace(H200, **{name: others.get(name, 7)})
        with pytest.raises(MismatchError, match=f"whose {name} is .*, and that of {here.name} is"):
            check(manifest, tmp_path, monkeypatch, here)
    check(manifest, tmp_path, monkeypatch, dataclasses.replace(H200, memory_bytes=1 << 37, driver="580.1"))


@pytest.fixture
def folder_for_h200(tmp_path: Path, filled_packages: Path) -> Path:
    """A cache folder whose only plan is one of the embedded model for an H200."""
    folder = Path(shutil.copytree(filled_packages, tmp_path / "cache"))
    [path] = folder.glob("manifests/*.json")
    manifest, key = as_built(path), "0123456789abcdef"
    path.unlink()
    manifest = dataclasses.replace(manifest, plan={**manifest.plan, "key": key})
    write_manifest(folder / "manifests" / f"{key}.json", manifest)
    return folder


def as_built(path: Path) -> Manifest:
    """The manifest of a cache folder, as a build for an H200 without that GPU would have written it."""
    manifest = read_manifest(path)
    assert manifest is not None
    records = tuple(blind_record(item.bucket, item.variant, 1.0, 1) for item in manifest.buckets)
    blind = BlindBuild(H200, ("kernel a: the first of 2 configs",))
    files = tuple(file for file in manifest.files if not file.path.startswith(("aot/start-", "references/")))
    return dataclasses.replace(manifest, buckets=records, files=files, blind=blind, step_costs=None)


@pytest.mark.skipif(HAS_GPU, reason="the start is on a GPU then")
def test_a_start_on_a_cpu_does_not_use_the_plan_and_names_its_gpu(folder_for_h200: Path, run_cli: RunCLI) -> None:
    warm = ("warm", TINY, *PACKAGE_FLAGS, "--cache-dir", str(folder_for_h200))
    refused = run_cli(*warm, "--no-compile")
    assert refused.returncode == 3, refused.stderr
    message = f"the programs of {TINY} in {folder_for_h200} were built for NVIDIA H200; this start is on cpu"
    assert f"error: {message}" in refused.stderr and "--target-gpu" in refused.stderr


@pytest.mark.parametrize("has_run", [False, True])
def test_a_start_that_may_compile_warns_of_a_plan_for_another_gpu(
    has_run: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = built(tmp_path)
    manifest = dataclasses.replace(manifest, buckets=MANIFEST.buckets) if has_run else manifest
    write_manifest(tmp_path / "manifests" / f"{manifest.plan['key']}.json", manifest)
    plan: Any = SimpleNamespace(cache_dir=str(tmp_path), model=manifest.plan["model"], device="cuda")
    first_start.report_other_targets(plan, MACHINE, may_compile=True)
    assert f"were built for NVIDIA H200; this start is on {MACHINE.gpu}, so they are not used" in caplog.text
    with pytest.raises(MismatchError, match="were built for NVIDIA H200"):
        first_start.report_other_targets(plan, MACHINE, may_compile=False)
    same_gpu = dataclasses.replace(MACHINE, gpus=(H200.gpu,))
    first_start.report_other_targets(plan, same_gpu, may_compile=False)
    plan.model = "another/model"
    first_start.report_other_targets(plan, MACHINE, may_compile=False)


def test_such_a_plan_is_listed_verified_and_packed_without_a_start(
    folder_for_h200: Path, tmp_path: Path, run_cli: RunCLI
) -> None:
    listed = json.loads(run_cli("cache", "ls", str(folder_for_h200), "--json").stdout)
    assert [plan["has_run"] for plan in listed["plans"]] == [False]
    assert "built without its GPU" in " ".join(run_cli("cache", "ls", str(folder_for_h200)).stdout.split())
    bundle = tmp_path / "h200.tcb"
    refused = run_cli("cache", "pack", str(folder_for_h200), "-o", str(bundle), "--target-gpu", "h200")
    assert refused.returncode == 2 and "recipe flags do not apply" in refused.stderr
    packed = run_cli("cache", "pack", str(folder_for_h200), "-o", str(bundle))
    assert packed.returncode == 0, packed.stderr
    verified = run_cli("cache", "verify", str(bundle), "--allow-unsigned")
    assert "built for NVIDIA H200 without that GPU (1 choices not timed), not run" in verified.stdout


def test_the_header_of_a_bundle_says_where_it_was_built_and_whether_it_has_run() -> None:
    records = (blind_record("decode:1", "default", 1.0, 1),)
    built = dataclasses.replace(MANIFEST, buckets=records, blind=BlindBuild(H200, ()))
    run = dataclasses.replace(MANIFEST, blind=BlindBuild(H200, ()))
    for manifest, built_without, has_run in ((MANIFEST, None, None), (built, True, False), (run, True, True)):
        document = json.loads(header_bytes(Header(manifest, Payload(1, "a" * 64))))
        assert (document.get("built_without_device"), document.get("has_run")) == (built_without, has_run)


def test_a_file_that_is_no_kernel_is_not_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = built(tmp_path, one=90)
    extra = FileRecord("triton/one/kernel.ptx", 1, "a" * 64)
    check(dataclasses.replace(manifest, files=(*manifest.files, extra)), tmp_path, monkeypatch)


def test_a_first_start_leaves_the_times_of_steps_to_the_idle_engine(
    tmp_path: Path, filled_packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tcdeploy.start import loaded_start, model_code
    from tcdeploy.start.prepare import prepare

    folder = Path(shutil.copytree(filled_packages, tmp_path / "cache"))
    [path] = folder.glob("manifests/*.json")
    manifest = read_manifest(path)
    assert manifest is not None
    records = tuple(blind_record(item.bucket, item.variant, 1.0, 1) for item in manifest.buckets)
    files = tuple(file for file in manifest.files if not file.path.startswith(("aot/start-", "references/")))
    blind = BlindBuild(H200, ())
    write_manifest(path, dataclasses.replace(manifest, buckets=records, files=files, blind=blind, step_costs=None))
    monkeypatch.setattr(model_code, "check_first_start", lambda *_: None)
    hashing = mock.Mock(wraps=model_code.hashing_sources)
    monkeypatch.setattr(model_code, "hashing_sources", hashing)
    monkeypatch.setattr(loaded_start, "measure_step_costs", None)  # a call of it raises
    recipe = Recipe(model=TINY, device="cpu", buckets=(32,), batch_sizes=(4,), programs="aot", cache_dir=str(folder))
    deployed = prepare(recipe, serves=True)
    assert {item.outcome for item in deployed.records} <= {"hit", "reused"} and deployed.engine.clock is None
    hashing.assert_called_once()  # while the reference is computed
    manifest = read_manifest(path)
    assert manifest is not None and manifest.has_run and manifest.step_costs is None
    assert deployed.engine.capture_next_graph()
    assert deployed.engine.clock is not None


def test_products_have_the_shapes_of_the_model_with_packed_layers_as_one() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(8, 4), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 70_000))
    assert first_start.product_shapes(model, (("0", "1"), ("0", "gone"))) == {(20, 8), (8, 16)}
    assert first_start.product_shapes(model, ()) == {(16, 8), (4, 8), (8, 16)}
