"""Serving from a damaged cache, and from an imported bundle."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx
import pytest

from tests.conftest import TINY, TINY_FLAGS, RunCLI
from tests.fork_server import ForkServer
from tests.server.conftest import FLAGS, serving, stages_of, wait_for


@pytest.fixture
def plan_key(run_cli: RunCLI, warm_cache: Path) -> str:
    """Key of the plan that these tests serve. Other tests add plans to the same cache."""
    completed = run_cli("warm", TINY, *TINY_FLAGS, "--cache-dir", str(warm_cache), "--dry-run", "--json")
    assert completed.returncode == 0, completed.stderr
    key: str = json.loads(completed.stdout)["plan"]["key"]
    return key


@pytest.fixture
def damaged(tmp_path: Path, warm_cache: Path, plan_key: str) -> tuple[Path, Path]:
    """A copy of the warm cache, and a compiled library in it with one flipped bit."""
    cache = tmp_path / "cache"
    shutil.copytree(warm_cache, cache)
    manifest = cache / "manifests" / f"{plan_key}.json"
    files = [cache / file["path"] for file in json.loads(manifest.read_text())["files"]]
    library = next(path for path in files if path.name.endswith(".main.so"))
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)
    return cache, library


def test_a_server_does_not_start_from_a_damaged_cache(damaged: tuple[Path, Path], run_cli: RunCLI) -> None:
    cache, library = damaged
    completed = run_cli("serve", TINY, *FLAGS, "--cache-dir", str(cache), timeout=120)
    assert completed.returncode == 5, completed.stderr
    assert (
        f"{library} does not match its recorded sha256" in completed.stderr
        and "--on-bad-cache rebuild" in completed.stderr
    )
    assert "ready: " not in completed.stdout and "Traceback" not in completed.stderr


@pytest.mark.long  # `warm` rebuilds in cache/test_integrity.py
def test_on_bad_cache_rebuild_compiles_and_serves(
    damaged: tuple[Path, Path], tmp_path: Path, fork_server: ForkServer
) -> None:
    cache, library = damaged
    with serving(tmp_path, cache, "--on-bad-cache", "rebuild", fork_server=fork_server) as server:
        assert any(", miss," in line for line in server.stderr)
        assert httpx.get(f"{server.address}/ready").status_code == 200
        assert server.client.completions.create(model=TINY, prompt="A list", max_tokens=4).usage is not None
    assert library.exists(), "rebuilt under the same name"


def test_a_server_starts_from_a_signed_bundle_and_rejects_an_unsigned_one(
    warm_cache: Path, plan_key: str, tmp_path: Path, run_cli: RunCLI
) -> None:
    """The server that starts is a new process, as users start it."""
    bundle, cache = tmp_path / "tiny.tcb", tmp_path / "fetched"
    keys = tmp_path / "keys"
    for arguments in (
        ("keygen", str(tmp_path / "ci")),
        ("trust", "ci", str(tmp_path / "ci.pub"), "--trusted-keys", str(keys)),
        ("pack", str(warm_cache), "--plan", plan_key, "-o", str(bundle)),
    ):
        assert run_cli("cache", *arguments).returncode == 0
    flags = ("--cache-from", str(bundle), "--trusted-keys", str(keys))
    rejected = run_cli("serve", TINY, *FLAGS, "--cache-dir", str(cache), *flags, timeout=120)
    assert rejected.returncode == 4 and "is not signed" in rejected.stderr, rejected.stderr
    assert not cache.exists()
    assert run_cli("cache", "sign", str(bundle), "--key", str(tmp_path / "ci.key")).returncode == 0
    with serving(tmp_path, cache, *flags) as started:
        assert any("signed by ci" in line for line in started.stderr)
        assert sum(", hit," in line for line in started.stderr) == 4
        assert started.stderr[0].startswith("tcdeploy ") and started.stderr[0].endswith(f" loads {TINY}\n")
        wait_for(lambda: any("warm-up requests" in line for line in started.stderr))  # a thread reads the lines
        assert stages_of(started.stderr) == [
            "import", "fetch", "decide", "load", "weights", "reference", "compile, 4 of 4", "record",
            "warm-up requests, 5 of 5",
        ]  # fmt: skip
        assert started.client.completions.create(model=TINY, prompt="A list", max_tokens=4).usage is not None
        assert started.metric("recompiles_total") == 0
