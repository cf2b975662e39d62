"""The GitHub Action that signs a bundle which another job has packed. It imports only what its lock names, no torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tcdeploy.bundle.pack import pack
from tcdeploy.bundle.verify import verify_bundle
from tcdeploy.cache.trust.signing import generate_key
from tests.bundle.fake_caches import key_of, make_small
from tests.github_actions import ActionRunner


@pytest.fixture(scope="module")
def unsigned(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("unsigned")
    pack(folder / "cache", key_of(make_small(folder / "cache")), folder / "bundle.tcb")
    return (folder / "bundle.tcb").read_bytes()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    for name in ("ci", "other"):
        generate_key(folder / name)
    return folder


def inputs(keys: Path, tmp_path: Path, unsigned: bytes, public_key: str = "ci.pub") -> dict[str, str]:
    bundle = tmp_path / "bundle.tcb"
    bundle.write_bytes(unsigned)
    public = (keys / public_key).read_text() if public_key else ""
    return {
        "bundle": str(bundle), "to": str(tmp_path / "store"), "key": (keys / "ci.key").read_text(), "public-key": public
    }  # fmt: skip


def test_a_bundle_is_signed_verified_and_pushed_and_the_key_is_removed(
    keys: Path, tmp_path: Path, unsigned: bytes
) -> None:
    runner = ActionRunner("sign-and-push", tmp_path / "run", inputs(keys, tmp_path, unsigned))
    steps = runner.run()
    assert [step.done.returncode for step in steps] == [0, 0], steps[-1].done.stderr
    (stored,) = (tmp_path / "store").iterdir()
    assert str(stored) in runner.summary.read_text()
    assert re.search(
        r"pip install --quiet --require-hashes --only-binary :all: -r \S+/sign\.txt", runner.calls.read_text()
    )
    assert not list(runner.temporary.glob("keys-*")), "the secret key is gone"
    assert "PRIVATE" not in "".join(step.done.stdout + step.done.stderr for step in steps) + runner.calls.read_text()
    assert verify_bundle(stored, keys, allow_unsigned=False)[0].plan_key in stored.name


@pytest.mark.parametrize(
    ("public_key", "exit_code", "message"),
    [("", 2, "is not a public key"), ("other.pub", 4, "trusted")],
    ids=["no public key", "the public key of another secret key"],
)
def test_nothing_is_pushed_with_a_wrong_public_key(
    keys: Path, tmp_path: Path, unsigned: bytes, public_key: str, exit_code: int, message: str
) -> None:
    runner = ActionRunner("sign-and-push", tmp_path / "run", inputs(keys, tmp_path, unsigned, public_key))
    steps = runner.run()
    assert [step.done.returncode for step in steps] == [0, exit_code] and message in steps[-1].done.stderr
    assert not (tmp_path / "store").exists() and not list(runner.temporary.glob("keys-*"))


def test_the_lock_of_the_signing_job_holds_the_client_for_s3_and_no_torch(tmp_path: Path) -> None:
    runner = ActionRunner("sign-and-push", tmp_path, {})
    environ = {**os.environ, "PYTHONPATH": ""}
    outcomes = {}
    for module in ("s3fs", "torch"):
        (tmp_path / f"use_{module}.py").write_text(f"import {module}")
        command = [sys.executable, runner.programs / "locked_python.py", tmp_path, "-m", f"use_{module}"]
        outcomes[module] = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert outcomes["s3fs"].returncode == 0, outcomes["s3fs"].stderr
    assert "torch is not in the lock" in outcomes["torch"].stderr
