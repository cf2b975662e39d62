"""scripts/prewarm through its GitHub Action, from a cold start to a bundle that servers load."""

from __future__ import annotations

import json
import os
import re
import subprocess
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.cache.trust.signing import generate_key
from tcdeploy.cli.cache_target import read_manifests
from tcdeploy.models.load import resolve_model_path
from tests.conftest import ROOT, TINY, RunCLI, cli_environment
from tests.github_actions import ActionRunner
from tests.test_scripts import load_script

SMALL = ("--buckets", "32", "--batch-sizes", "4")  # as in `filled_packages`: g++ need not compile again
WARM = " ".join((TINY, *SMALL, "--load-format", "dummy"))
ROW = re.compile(r"^\| (.+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)  # of the report: cold and warm seconds


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("keys")
    generate_key(folder / "ci")
    return {"key": (folder / "ci.key").read_text(), "public-key": (folder / "ci.pub").read_text()}


def test_a_bundle_is_warmed_without_a_key_then_signed_and_pushed_and_later_runs_check_it(
    keys: dict[str, str], tmp_path: Path, run_cli: RunCLI
) -> None:
    store = tmp_path / "store"
    inputs = {"warm": WARM, "budget": "300s", "requirements": str(lock_of_this_python(tmp_path))}
    first = ActionRunner("prewarm", tmp_path / "first", inputs)
    steps = first.run()
    assert [step.done.returncode for step in steps] == [0, 0], steps[-1].done.stderr
    report = steps[-1].done.stdout
    seconds = {name: (float(cold), float(warm)) for name, cold, warm in re.findall(ROW, report)}
    cold, warm = seconds.pop("total, process start to ready")
    assert min(cold, warm) > 0
    assert seconds.keys() == {"prefill:32", "decode:4"}
    assert first.summary.read_text() == report == Path(first.output("report")).read_text()
    installed = [line for line in first.calls.read_text().splitlines() if "pip install" in line]
    by_hash = [line for line in installed if "--require-hashes --only-binary :all: -r " in line]
    assert len(by_hash) == 2 and [line for line in installed if line not in by_hash] == [installed[-1]]
    assert "--no-deps --no-build-isolation" in installed[-1], "the package itself, from the checkout"

    signing = {**keys, "bundle": first.output("bundle"), "to": str(store)}
    publish = ActionRunner("sign-and-push", tmp_path / "publish", signing)
    steps = publish.run()
    assert [step.done.returncode for step in steps] == [0, 0], steps[-1].done.stderr
    (stored,) = store.iterdir()
    assert re.search(r"; packages: built in [\d.]+ s, [\d.]+ MB unpacked; plan", report), report
    plans = read_manifests(stored)
    kinds = [plan.plan["programs"] for plan in plans]
    assert kinds == ["jit", "aot"], "the bundle has both plans, and is named after the jit programs"
    of_misses = {bucket: f"{cold_s:.1f}" for bucket, cold_s in plans[0].cold_seconds().items()}
    assert {bucket: f"{cold:.1f}" for bucket, (cold, _) in seconds.items()} == of_misses
    assert re.fullmatch(r"[0-9a-f]{16}-[0-9a-f]{64}\.tcb", stored.name)

    checked = {**inputs, "stored": str(store), "public-key": keys["public-key"]}
    second = ActionRunner("prewarm", tmp_path / "second", checked)
    steps = second.run()
    assert [step.done.returncode for step in steps] == [0, 0], steps[-1].done.stderr
    assert re.search(r"was already stored; packages: [\d.]+ MB unpacked; plan", steps[-1].done.stdout)
    assert second.output("bundle") == ""
    [start] = [line for line in steps[-1].done.stderr.splitlines() if line.startswith("+ tcdeploy warm ")]
    assert start.endswith(" --require-hit --budget 300s --json"), "the budget of the action"

    (tmp_path / "trusted").mkdir()
    (tmp_path / "trusted/ci.pub").write_text(keys["public-key"])
    trusted = ("--trusted-keys", str(tmp_path / "trusted"))
    cache = ("--cache-dir", str(tmp_path / "real"), "--cache-from", str(store), *trusted)
    served = run_cli("warm", str(resolve_model_path(TINY)), *SMALL, *cache, "--require-hit")
    assert served.returncode == 0, f"a cache warmed without weights must serve them: {served.stderr}"
    planned = run_cli("serve", TINY, *SMALL, "--cache-dir", str(tmp_path / "real"), "--dry-run", "--json")
    assert json.loads(planned.stdout)["plan"]["programs"] == "aot", "an auto start uses the fetched packages"


def test_the_report_compares_the_seconds_of_the_cold_and_the_warm_start() -> None:
    script = load_script("prewarm")

    def start(cold_seconds: float | None, compile_seconds: float) -> Any:
        plan = {"model": "m", "compute_dtype": "float32", "mode": "auto", "key": "k"}
        bucket = {"bucket": "decode:1", "cold_seconds": cold_seconds, "compile_seconds": compile_seconds}
        stages = {"imports": 4.0, "buckets": compile_seconds}
        return script.CommandResult(0, {"plan": plan, "buckets": [bucket], "stage_seconds": stages})

    cold, warm = start(12.5, 12.5), start(12.5, 0.5)
    total = "total, process start to ready"
    assert re.findall(ROW, script.format_report("", cold, warm)) == [
        ("decode:1", "12.5", "0.5"),
        (total, "16.5", "4.5"),
    ]
    stored = script.format_report("", None, start(None, 0.5))
    assert stored.splitlines()[-2:] == ["| decode:1 | - | 0.5 |", f"| {total} | - | 4.5 |"]


@pytest.mark.parametrize(("exit_code", "is_packed"), [(6, False), (3, True)])
def test_a_stored_bundle_over_its_budget_ends_the_script_and_a_missing_one_is_packed(
    exit_code: int, is_packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("prewarm")
    commands: list[str] = []

    def run_tcdeploy(*arguments: str) -> Any:
        commands.append(" ".join(arguments[:2]) if arguments[0] == "cache" else arguments[0])
        return script.CommandResult(exit_code if "--cache-from" in arguments else 0, {"packed_bytes": 1})

    monkeypatch.setattr(script, "run_tcdeploy", run_tcdeploy)
    monkeypatch.setattr(script, "format_report", lambda *_: "report")
    stored = {"stored": "s3://bundles", "public_key": Path("ci.pub"), "target_gpu": None, "from_bundle": None}
    options = Namespace(warm_args=["model"], bundle=Path("x.tcb"), budget="60s", **stored)
    if is_packed:
        assert script.prewarm(options, tmp_path) == "report"
    else:
        with pytest.raises(SystemExit) as end:
            script.prewarm(options, tmp_path)
        assert end.value.code == exit_code
    packing = ["warm", "warm", "cache pack", "cache verify"] if is_packed else []
    assert commands == ["cache trust", "warm", *packing]


def lock_of_this_python(folder: Path) -> Path:
    """The fake pip of ActionRunner installs nothing."""
    lock = folder / "lock.txt"
    lock.write_text(f"torch=={version('torch').partition('+')[0]} \\\n    --hash=sha256:0\n")
    return lock


def test_a_lock_with_another_torch_than_that_of_production_is_refused_before_pip_replaces_it(tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("torch==1.13.1 ; sys_platform == 'linux' \\\n    --hash=sha256:0\n")
    action = ActionRunner("prewarm", tmp_path, {"warm": WARM, "requirements": str(tmp_path / "other.txt")})
    (step,) = action.run()
    assert step.done.returncode == 2 and f"has torch {version('torch')}, and " in step.done.stdout
    assert "has torch 1.13.1;" in step.done.stdout and "pip install" not in action.calls.read_text()


def test_an_invalid_public_key_fails_before_warming(tmp_path: Path) -> None:
    lock = str(lock_of_this_python(tmp_path))
    inputs = {"public-key": "", "warm": WARM, "stored": str(tmp_path / "store"), "requirements": lock}
    steps = ActionRunner("prewarm", tmp_path, inputs).run()
    assert [step.done.returncode for step in steps] == [0, 2]
    assert "is not a public key" in steps[-1].done.stderr and "tcdeploy warm" not in steps[-1].done.stderr


def test_a_stored_bundle_is_not_checked_without_a_public_key(tmp_path: Path) -> None:
    script = ROOT / "scripts/prewarm"
    assert os.access(script, os.X_OK)
    command = [script, "--bundle", tmp_path / "x.tcb", "--stored", tmp_path, "--", TINY]
    done = subprocess.run(command, capture_output=True, text=True, env=cli_environment(tmp_path))
    assert done.returncode == 2 and "--stored and --public-key must be given together" in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--target-gpu", "h100", "--from-bundle", "x.tcb"),
            "--stored, --target-gpu and --from-bundle exclude each other",
        ),
        (("--winners", "x.tcb"), "--winners needs --target-gpu"),
    ],
)
def test_contradicting_options_are_refused(flags: tuple[str, ...], message: str, tmp_path: Path) -> None:
    command = [ROOT / "scripts/prewarm", "--bundle", tmp_path / "x.tcb", *flags, "--", TINY]
    done = subprocess.run(command, capture_output=True, text=True, env=cli_environment(tmp_path))
    assert done.returncode == 2 and message in done.stderr


def commands_of(monkeypatch: pytest.MonkeyPatch, folder: Path, **options: Any) -> tuple[list[str], str]:
    """What scripts/prewarm would run, without the folder of its cache, and its report."""
    script, commands = load_script("prewarm"), list[str]()
    found = {
        "packed_bytes": 3_600_000, "plan_key": "k", "target_gpu": "h100", "seconds": 309.2, "peak_bytes": 1 << 30,
        "choices": ["a kernel"],
    }  # fmt: skip

    def run_tcdeploy(*arguments: str) -> Any:
        commands.append(" ".join(arguments).replace(f"{folder}/", ""))
        return script.CommandResult(0, found)

    monkeypatch.setattr(script, "run_tcdeploy", run_tcdeploy)
    monkeypatch.setattr(script, "format_report", lambda *_: "report")
    defaults = dict.fromkeys(("stored", "public_key", "target_gpu", "winners", "from_bundle"))
    namespace = Namespace(warm_args=["MODEL"], bundle=Path("x.tcb"), budget="60s", **{**defaults, **options})
    return commands, script.prewarm(namespace, folder)


def test_a_plan_for_another_gpu_is_built_and_packed_and_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands, report = commands_of(monkeypatch, tmp_path, target_gpu="h100", winners="w.tcb")
    assert commands == [
        "warm MODEL --cache-dir filled --target-gpu h100 --winners w.tcb --json",
        "cache pack filled -o x.tcb --json",
        "cache verify x.tcb --allow-unsigned --json",
    ]
    assert "for h100 was packed, 3.6 MB. It was compiled in 309 s with up to 1.0 GiB" in report
    assert report.endswith("without the GPU, so it has not run; 1 choices were not timed.")


def test_the_bundle_of_such_a_build_must_hit_and_is_packed_again_after_its_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands, _ = commands_of(monkeypatch, tmp_path, from_bundle="built.tcb")
    assert commands == [
        "warm MODEL --cache-dir filled --cache-from built.tcb --allow-unsigned --require-hit --json",
        "warm MODEL --cache-dir filled --require-hit --budget 60s --json",
        "cache pack filled -o x.tcb --json",
        "cache verify x.tcb --run --allow-unsigned --json",
    ]


@pytest.mark.parametrize(
    ("inputs", "flags", "headers"),
    [
        ({"target-gpu": "l4", "winners": "w w.tcb"}, ["--target-gpu", "l4", "--winners", "w w.tcb"], True),
        ({"from-bundle": "built.tcb"}, ["--from-bundle", "built.tcb"], False),
    ],
)
def test_the_action_passes_its_inputs_and_the_compiler_of_the_servers(
    inputs: dict[str, str], flags: list[str], headers: bool, tmp_path: Path
) -> None:
    python, calls = tmp_path / "python", tmp_path / "python.calls"
    python.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" "CXX=$CXX" "" >> {calls}\n')
    python.chmod(0o755)
    lock = str(lock_of_this_python(tmp_path))
    given = {**inputs, "warm": WARM, "cxx": "/usr/bin/g++-13", "python": str(python), "requirements": lock}
    steps = ActionRunner("prewarm", tmp_path / "run", given).run()
    assert [step.done.returncode for step in steps] == [0, 0], steps[-1].done.stderr
    *_, script = calls.read_text().removesuffix("\n\n").split("\n\n")
    start = script.split("\n").index(flags[0])
    assert script.split("\n")[start:][: len(flags)] == flags and script.endswith("CXX=/usr/bin/g++-13")
    installed = [call for call in calls.read_text().split("\n\n") if "cuda-headers.txt" in call]
    assert len(installed) == headers and all("--require-hashes" in call for call in installed)
