"""Relocation: a cache packed on one machine is unpacked on another, where every bucket is a hit.

The other machine is simulated: another HOME and working directory, and a read-only root with one writable folder for
temporary files (bind mounts in a mount namespace).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tcdeploy.remote.transfer import push
from tests.bundle.conftest import Keys
from tests.conftest import ROOT, TINY, RunCLI, cli_environment
from tests.fork_server import ForkServer

pytestmark = pytest.mark.usefixtures("with_instruction_probes")
SMALL = ("--buckets", "32", "--batch-sizes", "4", "--programs", "jit")  # kernels that `filled_cache` has too
PROMPT = "This module provides"
ENTER_NAMESPACE = """
import ctypes, os, subprocess
assert ctypes.CDLL(None).unshare(0x20000) == 0, "CLONE_NEWNS"
subprocess.run(["/bin/sh", "-c", {!r}], env={!r}, check=True)
os.chdir("/")  # again: the working directory is still on the mount of the other namespace
"""


class RelocatedBundle(NamedTuple):
    bundle: Path
    plan_key: str
    text: str  # generated on the packing machine


@pytest.fixture(scope="module")
def relocated(tmp_path_factory: pytest.TempPathFactory, keys: Keys, run_cli_in: RunCLI) -> RelocatedBundle:
    """`cache pack MODEL` on a machine with an empty cache."""
    home, folder = tmp_path_factory.mktemp("packer"), tmp_path_factory.mktemp("packed")
    bundle = folder / "tiny.tcb"
    packed = run_cli_in(
        home, "cache", "pack", TINY, *SMALL, "--cache-dir", str(folder / "deep" / "cache"), "-o", str(bundle),
        "--sign", str(keys.secret), "--json",
    )  # fmt: skip
    assert packed.returncode == 0, packed.stderr
    generated = run_cli_in(home, "generate", TINY, PROMPT, *SMALL, "--cache-dir", str(folder / "deep" / "cache"))
    assert generated.returncode == 0, generated.stderr
    return RelocatedBundle(bundle, json.loads(packed.stdout)["plan_key"], generated.stdout)


@pytest.fixture(scope="module")
def unpacked(
    relocated: RelocatedBundle, keys: Keys, tmp_path_factory: pytest.TempPathFactory, run_cli_in: RunCLI
) -> Path:
    folder = tmp_path_factory.mktemp("elsewhere") / "baked" / "in"
    done = run_cli_in(
        tmp_path_factory.mktemp("baker"), "cache", "unpack", str(relocated.bundle), str(folder),
        "--trusted-keys", str(keys.trusted),
    )  # fmt: skip
    assert done.returncode == 0 and "signed by ci" in done.stdout, done.stderr
    return folder


@pytest.fixture
def run_on_other_machine(
    tmp_path: Path, unpacked: Path, fork_server: ForkServer
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command with a read-only root and one writable folder for temporary files.

    The process is a fork that leaves the mount namespace of the tests, or with `new` a new one.
    """
    writable = tmp_path / "scratch"
    writable.mkdir()
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("cannot make a namespace of mounts here")

    def start(*arguments: str, new: bool = False) -> subprocess.CompletedProcess[str]:
        mounts = f"mount --bind {writable} {writable} && mount -o remount,ro,bind /"
        for point in ("/tmp", "/var", "/root", "/home"):
            if os.path.ismount(point):
                mounts += f" && mount -o remount,ro,bind {point}"
        environ = {**cli_environment(tmp_path / "nobody"), "TMPDIR": str(writable)}
        if not new and fork_server.supports(environ):
            script = ENTER_NAMESPACE.format(f"mount --make-rprivate / && {mounts}", {"PATH": os.environ["PATH"]})
            return fork_server.run(*arguments, environ=environ, script=script, cwd="/")
        return subprocess.run(
            ["unshare", "-m", "sh", "-c", f'{mounts} && cd / && exec env -i "$@"', "sh",
             *(f"{name}={value}" for name, value in environ.items()), sys.executable, "-m", "tcdeploy", *arguments],
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip

    return start


def test_on_a_read_only_root_every_bucket_hits_and_text_is_generated(
    run_on_other_machine: Callable[..., subprocess.CompletedProcess[str]], relocated: RelocatedBundle, unpacked: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in unpacked.rglob("*")}
    warmed = run_on_other_machine(
        "warm", TINY, *SMALL, "--cache-dir", str(unpacked), "--require-hit", "--json", new=True
    )
    assert warmed.returncode == 0, warmed.stderr
    document = json.loads(warmed.stdout)
    assert [record["outcome"] for record in document["buckets"]] == ["hit"] * 2
    assert document["plan"]["key"] == relocated.plan_key
    generated = run_on_other_machine("generate", TINY, PROMPT, *SMALL, "--cache-dir", str(unpacked))
    assert (generated.returncode, generated.stdout) == (0, relocated.text), generated.stderr
    assert {path: path.stat().st_mtime_ns for path in unpacked.rglob("*")} == before, "the folder was modified"


def test_the_simulated_machine_has_a_read_only_root(
    run_on_other_machine: Callable[..., subprocess.CompletedProcess[str]], unpacked: Path
) -> None:
    """Checks the simulation: a bucket that is not in the bundle cannot be compiled there."""
    missed = run_on_other_machine(
        "warm", TINY, "--buckets", "32,64", "--batch-sizes", "4", "--cache-dir", str(unpacked)
    )
    assert missed.returncode == 1, missed.stderr
    assert "read-only" in missed.stderr


def test_the_unpacked_cache_reproduces_the_packers_tokens(
    unpacked: Path, relocated: RelocatedBundle, keys: Keys, tmp_path: Path, run_cli: RunCLI
) -> None:
    trusted = ("--trusted-keys", str(keys.trusted))
    before = {path: path.stat().st_mtime_ns for path in unpacked.rglob("*")}
    for target in (str(unpacked), str(relocated.bundle)):
        done = run_cli("cache", "verify", target, "--run", "--json", *trusted)
        assert done.returncode == 0, done.stderr
        (replayed,) = json.loads(done.stdout)["replayed"].values()
        assert [bucket["passed"] for bucket in replayed] == [True] * 2
        assert sum(bucket["rows"] for bucket in replayed) == (4 + 2) + 4, "two rows of a mixed step"
        assert [bucket["mismatched_tokens"] for bucket in replayed] == [0] * 2
        assert all(bucket["max_logprob_difference"] < 1e-4 for bucket in replayed)
    assert {path: path.stat().st_mtime_ns for path in unpacked.rglob("*")} == before, "verification modified the folder"


def test_other_weights_fail_the_replay(relocated: RelocatedBundle, keys: Keys, tmp_path: Path, run_cli: RunCLI) -> None:
    """The same architecture with other weights: every bucket hits, but the deployment is wrong."""
    import torch
    from transformers import AutoModelForCausalLM

    from tcdeploy.models.load import resolve_model_path

    torch.manual_seed(1)
    shutil.copytree(resolve_model_path(TINY), tmp_path / "other")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "other")
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "other")
    done = run_cli(
        "cache", "verify", str(relocated.bundle), "--run", "--model", str(tmp_path / "other"),
        "--trusted-keys", str(keys.trusted),
    )  # fmt: skip
    assert done.returncode == 5, done.stderr
    assert "outputs differ from the packed ones" in done.stderr and "other weights" in done.stdout


def test_a_start_fetches_its_plan_from_a_folder_of_bundles(
    relocated: RelocatedBundle, keys: Keys, tmp_path: Path, run_cli: RunCLI
) -> None:
    store, cache = tmp_path / "store", tmp_path / "cache"
    pushed = push(relocated.bundle, str(store), relocated.plan_key)
    fetching = (
        "--cache-dir", str(cache), "--cache-from", str(store), "--trusted-keys", str(keys.trusted), "--require-signed",
    )  # fmt: skip
    first = run_cli("warm", TINY, *SMALL, *fetching, "--require-hit", "--budget", "300s")
    assert first.returncode == 0, first.stderr
    assert f"cache: {pushed.url}" in first.stderr and "signed by ci" in first.stderr
    shutil.rmtree(store)
    packed = [tmp_path / "first.tcb", tmp_path / "second.tcb"]
    run_cli("cache", "pack", str(cache), "-o", str(packed[0]))
    second = run_cli("warm", TINY, *SMALL, *fetching, "--require-hit", "--budget", "0.5s")
    run_cli("cache", "pack", str(cache), "-o", str(packed[1]))
    assert packed[0].read_bytes() == packed[1].read_bytes(), "another start does not change the bundle"
    assert "is already present, nothing fetched" in second.stderr
    assert second.returncode == 6 and re.search(r"startup took [\d.]+ s, over the budget of 0.5 s", second.stderr)


def test_a_damaged_plan_is_fetched_again_with_on_bad_cache_rebuild(
    relocated: RelocatedBundle, keys: Keys, tmp_path: Path, run_cli: RunCLI
) -> None:
    cache, trusted = tmp_path / "cache", ("--trusted-keys", str(keys.trusted))
    assert run_cli("cache", "unpack", str(relocated.bundle), str(cache), *trusted).returncode == 0
    library = next(cache.glob("*/*.main.so"))
    library.write_bytes(library.read_bytes()[:-1] + b"!")
    fetching = ("--cache-dir", str(cache), "--cache-from", relocated.bundle.as_uri(), *trusted, "--require-hit")
    assert run_cli("warm", TINY, *SMALL, *fetching).returncode == 5
    rebuilt = run_cli("warm", TINY, *SMALL, *fetching, "--on-bad-cache", "rebuild")
    assert rebuilt.returncode == 0 and "signed by ci" in rebuilt.stderr, rebuilt.stderr


def test_the_suggested_next_command_contains_no_secret_and_runs(
    unpacked: Path, keys: Keys, tmp_path: Path, run_cli: RunCLI
) -> None:
    url = "http://someone:HUNTER2@127.0.0.1:9/bundles?signature=SECRET"
    flags = ("--cache-dir", str(unpacked), "--cache-from", url, f"--trusted-keys={keys.trusted}", "--budget", "300")
    done = run_cli("warm", TINY, *SMALL, *flags, "--require-hit")
    assert done.returncode == 0, done.stderr
    assert "HUNTER2" not in done.stdout + done.stderr and "SECRET" not in done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("next: tcdeploy "))
    again = run_cli(*shlex.split(line.removeprefix("next: tcdeploy ")), "--max-new-tokens", "4")
    assert again.returncode == 0 and again.stdout.strip(), again.stderr


def test_a_start_without_a_matching_bundle_exits_with_3(
    relocated: RelocatedBundle, keys: Keys, tmp_path: Path, run_cli: RunCLI
) -> None:
    store = tmp_path / "store"
    pushed = push(relocated.bundle, str(store), relocated.plan_key)
    trusted = ("--trusted-keys", str(keys.trusted), "--cache-dir", str(tmp_path / "cache"))
    other = (*SMALL, "--dtype", "bfloat16")
    absent = run_cli("warm", TINY, *other, *trusted, "--cache-from", str(store))
    assert absent.returncode == 3 and "holds no bundle of the plan" in absent.stderr
    for missing in (str(tmp_path / "missing.tcb"), (tmp_path / "missing").as_uri(), "memory://missing/x.tcb"):
        absent = run_cli("warm", TINY, *other, *trusted, "--cache-from", missing)
        assert absent.returncode == 3 and f"error: {missing} does not exist" in absent.stderr
    named = run_cli("warm", TINY, *other, *trusted, "--cache-from", pushed.url)
    assert named.returncode == 3 and "was made for another plan: weight_dtype, kv_dtype, compute_dtype" in named.stderr
    assert re.search(r"^weight_dtype +bfloat16 +float32", named.stderr, re.MULTILINE), "a table of the differences"
    assert not (tmp_path / "cache").exists()


def test_a_bundle_without_a_trusted_signer_is_not_used(
    relocated: RelocatedBundle, tmp_path: Path, run_cli: RunCLI
) -> None:
    done = run_cli("warm", TINY, *SMALL, "--cache-dir", str(tmp_path / "cache"), "--cache-from", str(relocated.bundle))
    assert done.returncode == 4 and "no trusted key signed the bundle" in done.stderr
    assert not (tmp_path / "cache").exists()


def test_warm_pushes_its_cache(keys: Keys, relocated: RelocatedBundle, tmp_path: Path, run_cli: RunCLI) -> None:
    """The folder was filled by unpacking, so its warm start is enough to pack."""
    cache, store = tmp_path / "cache", tmp_path / "store"
    trusted = ("--trusted-keys", str(keys.trusted))
    assert run_cli("cache", "unpack", str(relocated.bundle), str(cache), *trusted).returncode == 0
    done = run_cli(
        "warm", TINY, *SMALL, "--cache-dir", str(cache), "--cache-to", str(store), "--sign", str(keys.secret)
    )
    assert done.returncode == 0, done.stderr
    (stored,) = store.iterdir()
    assert stored.name.startswith(f"{relocated.plan_key}-") and f"{stored} pushed" in done.stderr
    listed = run_cli("cache", "find", str(store), "--plan", relocated.plan_key)
    assert listed.stdout.strip() == str(stored)
    pulled = run_cli("cache", "pull", str(stored), "-o", str(tmp_path / "pulled.tcb"))
    assert pulled.returncode == 0 and (tmp_path / "pulled.tcb").read_bytes() == stored.read_bytes()
    again = run_cli("cache", "push", str(tmp_path / "pulled.tcb"), str(store))
    assert again.returncode == 0 and "already present" in again.stdout


def test_a_bundle_of_another_environment_is_unpacked_only_on_request(
    relocated: RelocatedBundle, keys: Keys, tmp_path: Path, run_cli: RunCLI
) -> None:
    """Simulates another torch version by its installed metadata."""
    site = tmp_path / "site" / "torch-9.9.9.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9\n")
    other = {"PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}"}
    arguments = (
        "cache",
        "unpack",
        str(relocated.bundle),
        str(tmp_path / "cache"),
        "--trusted-keys",
        str(keys.trusted),
    )
    done = run_cli(*arguments, **other)
    assert done.returncode == 3 and re.search(r"^torch +9.9.9 +\d", done.stderr, re.MULTILINE), done.stderr
    assert not (tmp_path / "cache").exists()
    assert run_cli(*arguments, "--any-environment", **other).returncode == 0
