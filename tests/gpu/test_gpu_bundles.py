"""A bundle that was made on a GPU: forecast, proved, and started elsewhere with no program to call."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import TINY

pytestmark = pytest.mark.gpu
SMALL = ("--buckets", "16,48", "--batch-sizes", "1,3", "--kv-blocks", "256")
PROMPT = "This module provides"
Run = Callable[..., subprocess.CompletedProcess[str]]


def test_a_bundle_is_all_that_another_place_needs(run_cli: Run, tmp_path: Path) -> None:
    """Another HOME, folder and working directory, an empty PATH; the folder that was packed is gone."""
    here, there, bundle = tmp_path / "here", tmp_path / "deep" / "down" / "there", tmp_path / "tiny.tcb"
    home, nothing = tmp_path / "home", tmp_path / "no-programs"
    home.mkdir(), nothing.mkdir()
    packed = run_cli("cache", "pack", TINY, *SMALL, "--cache-dir", str(here), "-o", str(bundle))
    assert packed.returncode == 0, packed.stderr
    said = run_cli("generate", TINY, PROMPT, *SMALL, "--cache-dir", str(here))
    shutil.rmtree(here)

    assert run_cli("cache", "why", str(bundle)).returncode == 0
    other = run_cli("cache", "why", str(bundle), "--dtype", "float16")
    assert other.returncode == 3 and "dtype" in other.stdout, other.stdout

    proved = run_cli("cache", "verify", str(bundle), "--run", "--allow-unsigned", "--json")
    assert proved.returncode == 0, proved.stderr
    (answers,) = json.loads(proved.stdout)["replayed"].values()
    assert [one["passed"] for one in answers] == [True] * 4

    elsewhere = {"HOME": str(home), "PATH": str(nothing)}
    unpacked = run_cli("cache", "unpack", str(bundle), str(there), "--allow-unsigned", **elsewhere)
    assert unpacked.returncode == 0, unpacked.stderr
    start = ("warm", TINY, *SMALL, "--cache-dir", str(there), "--require-hit", "--json")
    warmed = run_cli(*start, cwd=str(nothing), **elsewhere)
    assert warmed.returncode == 0, warmed.stderr
    records = json.loads(warmed.stdout)["buckets"]
    assert [(one["outcome"], one["kernels_compiled"], one["kernels_timed"]) for one in records] == [("hit", 0, 0)] * 4
    generated = run_cli("generate", TINY, PROMPT, *SMALL, "--cache-dir", str(there), **elsewhere)
    assert (generated.returncode, generated.stdout) == (0, said.stdout), generated.stderr
