"""`warm --target-gpu`: the plan for a GPU that this machine does not have."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tcdeploy.bundle.pack import pack
from tcdeploy.cache.files.records import hash_files
from tcdeploy.cache.record.manifest import Manifest, write_manifest
from tcdeploy.cli.blind_build import winners_folder
from tcdeploy.planning.environment import GPU
from tcdeploy.planning.gpu_description import read_gpu_description
from tests.bundle.fake_caches import HASH, as_installed, key_of, make_small, manifest_for, path_of
from tests.conftest import TINY, RunCLI
from tests.fork_server import HAS_GPU


def test_a_model_is_planned_for_a_gpu_that_the_machine_does_not_have(run_cli: RunCLI) -> None:
    done = run_cli("warm", TINY, "--dry-run", "--target-gpu", "h100", "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 0 and document["findings"] == []
    plan = document["plan"]
    assert plan["device"] == "cuda" and plan["is_hopper"] and plan["graphs"] == "step"
    [target] = [decision for decision in plan["decisions"] if decision["name"] == "target GPU"]
    assert target["value"] == "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize("quantised", ["int4", "fp8"])
def test_large_decode_steps_of_int4_weights_try_our_products(quantised: str, run_cli: RunCLI) -> None:
    """The plan recognises the scheme by its name, which the conversion of the model chooses."""
    model = str(Path(__file__).parents[2] / "scripts/configs/llama-3.1-8b")
    flags = ("--quantize", quantised, "--load-format", "dummy", "--target-gpu", "h200", "--dry-run", "--json")
    plan = json.loads(run_cli("warm", model, *flags).stdout)["plan"]
    assert plan["fuses_large_decode"] == (quantised == "int4")


def test_memory_that_the_target_lacks_is_a_finding(run_cli: RunCLI, tmp_path: Path) -> None:
    small = dataclasses.replace(read_gpu_description("l4"), memory_bytes=1 << 30)
    (tmp_path / "small.json").write_text(small.to_json())
    done = run_cli("warm", TINY, "--dry-run", "--target-gpu", str(tmp_path / "small.json"), "--json")
    [finding] = json.loads(done.stdout)["findings"]
    assert finding["name"] == "memory" and finding["available_bytes"] == 1 << 30


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--target-gpu", "h100", "--require-hit"), "--target-gpu excludes --require-hit"),
        (("--target-gpu", "h100", "--budget", "6s"), "--target-gpu excludes --budget"),
        (("--target-gpu", "h100", "--tune-seconds", "9"), "--target-gpu excludes --tune-seconds"),
        (("--winners", "x.tcb"), "--winners needs --target-gpu"),
        (("--winners", "x.tcb", "--target-gpu", "h100", "--dry-run"), "--dry-run excludes"),
        (("--target-gpu", "h1000"), "no GPU is called 'h1000'"),
        (("--dry-run", "--target-gpu", "h1000"), "no GPU is called 'h1000'"),
        (("--dry-run", "--target-gpu", "h100", "--device", "cpu"), "--target-gpu excludes --device cpu"),
    ],
)
def test_a_target_that_cannot_be_planned_is_refused(run_cli: RunCLI, flags: tuple[str, ...], message: str) -> None:
    done = run_cli("warm", TINY, *flags)
    assert (done.returncode, done.stdout) == (2, "") and f"error: {message}" in done.stderr


def with_winner(folder: Path, gpu: GPU, winner: dict[str, float]) -> Manifest:
    """A cache folder for the GPU, with this result of the autotuner."""
    made = make_small(folder, environment=dataclasses.asdict(as_installed(gpus=(gpu,))))
    (folder / "6n" / f"{HASH}.best_config").write_text(json.dumps(winner))
    made = dataclasses.replace(made, files=hash_files(folder, [file.path for file in made.files]))
    write_manifest(path_of(folder, made), made)
    return made


@pytest.mark.parametrize("is_packed", [False, True])
def test_winners_without_a_measurement_are_refused_before_the_build(
    tmp_path: Path, is_packed: bool, run_cli: RunCLI
) -> None:
    winners = tmp_path / "winners"
    made = with_winner(winners, read_gpu_description("h200").gpu, {"time_taken_ms": -1})
    if is_packed:
        pack(winners, key_of(made), tmp_path / "winners.tcb")
        winners = tmp_path / "winners.tcb"
    flags = ("--target-gpu", "h200", "--winners", str(winners), "--cache-dir", str(tmp_path / "cache"))
    refused = run_cli("warm", TINY, *flags)
    assert refused.returncode == 3, refused.stderr
    assert "error: --winners contains no measured kernel configuration" in refused.stderr
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("is_packed", [False, True])
def test_measurements_of_another_gpu_are_refused(tmp_path: Path, is_packed: bool, run_cli: RunCLI) -> None:
    """Their file names do not depend on the GPU's name, so those of an H200 would be used for an H100."""
    gpu, winners = read_gpu_description("h200").gpu, tmp_path / "cache"
    made = with_winner(winners, gpu, {"time_taken_ms": 1})
    if is_packed:
        pack(winners, key_of(made), tmp_path / "winners.tcb")
        winners = tmp_path / "winners.tcb"
    else:  # also the results of a CPU, which are not copied
        (winners / "6n" / "other.best_config").write_bytes(b"{}")
        other = manifest_for(winners, ["6n/other.best_config"], bucket=64)
        write_manifest(path_of(winners, other), other)
    refused = run_cli("warm", TINY, "--target-gpu", "h100", "--winners", str(winners))
    assert refused.returncode == 3, refused.stderr
    message = f"{winners} has measurements of NVIDIA H200 (132 multiprocessors), and the build is for NVIDIA H100"
    assert f"error: {message} 80GB HBM3 (132 multiprocessors)" in refused.stderr
    with winners_folder(winners, tmp_path / "trusted", dataclasses.replace(gpu, memory_bytes=1)) as folder:
        assert folder is not None and [path.name for path in folder.rglob("*.*")] == [f"{HASH}.best_config"]


@pytest.mark.skipif(HAS_GPU, reason="the machine has a GPU")
def test_a_machine_without_a_gpu_describes_none(run_cli: RunCLI) -> None:
    done = run_cli("doctor", "--describe-gpu")
    assert (done.returncode, done.stdout) == (2, "") and "error: torch sees no GPU" in done.stderr


@pytest.mark.gpu
def test_the_plan_for_the_described_gpu_is_that_of_its_machine(run_cli: RunCLI, tmp_path: Path) -> None:
    description = tmp_path / "gpu.json"
    description.write_text(run_cli("doctor", "--describe-gpu").stdout)
    plans = [
        json.loads(run_cli("warm", TINY, "--dry-run", "--json", *flags).stdout)["plan"]
        for flags in ((), ("--target-gpu", str(description)))
    ]
    assert plans[0]["key"] == plans[1]["key"] and plans[0]["kv_blocks"] == plans[1]["kv_blocks"]
