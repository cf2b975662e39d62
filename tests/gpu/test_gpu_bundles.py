"""A bundle packed on a GPU: checked, verified, and started in another folder without a compiler."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import TINY

pytestmark = pytest.mark.gpu
SMALL = ("--buckets", "16,48", "--batch-sizes", "1,3", "--kv-blocks", "256", "--programs", "jit")
PROMPT = "This module provides"
Run = Callable[..., subprocess.CompletedProcess[str]]


def test_a_bundle_is_self_contained(run_cli: Run, tmp_path: Path) -> None:
    """With another HOME, folder and working directory, and an empty PATH. The packed folder is deleted."""
    here, there, bundle = tmp_path / "here", tmp_path / "deep" / "down" / "there", tmp_path / "tiny.tcb"
    home, empty = tmp_path / "home", tmp_path / "no-programs"
    home.mkdir(), empty.mkdir()
    packed = run_cli("cache", "pack", TINY, *SMALL, "--cache-dir", str(here), "-o", str(bundle))
    assert packed.returncode == 0, packed.stderr
    generated_here = run_cli("generate", TINY, PROMPT, *SMALL, "--cache-dir", str(here))
    shutil.rmtree(here)

    assert run_cli("cache", "why", str(bundle)).returncode == 0
    other = run_cli("cache", "why", str(bundle), "--dtype", "float16")
    assert other.returncode == 3 and "dtype" in other.stdout, other.stdout

    verified = run_cli("cache", "verify", str(bundle), "--run", "--allow-unsigned", "--json")
    assert verified.returncode == 0, verified.stderr
    (replays,) = json.loads(verified.stdout)["replayed"].values()
    assert [replay["passed"] for replay in replays] == [True] * 4

    environ = {"HOME": str(home), "PATH": str(empty)}
    unpacked = run_cli("cache", "unpack", str(bundle), str(there), "--allow-unsigned", **environ)
    assert unpacked.returncode == 0, unpacked.stderr
    start = ("warm", TINY, *SMALL, "--cache-dir", str(there), "--require-hit", "--json")
    warmed = run_cli(*start, cwd=str(empty), **environ)
    assert warmed.returncode == 0, warmed.stderr
    records = json.loads(warmed.stdout)["buckets"]
    counts = [(record["outcome"], record["kernels_compiled"], record["kernels_timed"]) for record in records]
    assert counts == [("hit", 0, 0)] * 4
    generated = run_cli("generate", TINY, PROMPT, *SMALL, "--cache-dir", str(there), **environ)
    assert (generated.returncode, generated.stdout) == (0, generated_here.stdout), generated.stderr
