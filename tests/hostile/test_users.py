"""Another user cannot make a start run code: not through TMPDIR, HOME, a cache folder or a remote folder.

The attacker is a user id without rights, the victim is root. The attacker's cache is a copy of a real one in which each
pickle runs a command, with manifests that match.
"""

from __future__ import annotations

import getpass
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tcdeploy.bundle.pack import pack
from tcdeploy.cache.contents import hash_files
from tcdeploy.cache.manifest import manifest_path, read_manifests, write_manifest
from tests.conftest import TINY, TINY_FLAGS, RunCLI

ATTACKER = 12002
START = ("warm", TINY, *TINY_FLAGS, "--json", "--require-hit")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as several users")


class Command:
    """Unpickling it runs `command`."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


class Machine:
    """A TMPDIR that everybody can write, the victim's HOME with a warmed cache, and a cache made by the attacker."""

    def __init__(self, folder: Path, filled_cache: Path) -> None:
        folder.chmod(0o755)
        self.tmp, self.home, self.poisoned = folder / "tmp", folder / "home", folder / "tmp" / "poisoned"
        self.tmp.mkdir()
        self.tmp.chmod(0o1777)
        self.ran = folder / "ran"
        shutil.copytree(filled_cache, self.home / ".cache" / "tcdeploy")
        shutil.copytree(filled_cache, self.poisoned)
        self._poison()
        give(self.poisoned, ATTACKER)

    def _poison(self) -> None:
        [manifest] = read_manifests(self.poisoned).values()
        for file in manifest.files:
            if file.path.startswith(("fxgraph/", "aotautograd/")):
                (self.poisoned / file.path).write_bytes(pickle.dumps(Command(f"touch {self.ran}")))
        files = hash_files(self.poisoned, [file.path for file in manifest.files])
        write_manifest(manifest_path(self.poisoned, manifest.plan["key"]), replace(manifest, files=files))


def give(folder: Path, uid: int) -> None:
    for path in (folder, *folder.rglob("*")):
        os.lchown(path, uid, uid)


@pytest.fixture
def machine(filled_cache: Path) -> Iterator[Machine]:
    with tempfile.TemporaryDirectory() as folder:
        yield Machine(Path(folder), filled_cache)


def test_the_attackers_cache_runs_code_where_it_is_trusted(machine: Machine, run_cli_in: RunCLI) -> None:
    """Otherwise the other tests would prove nothing."""
    run_cli_in(machine.home, *START, "--cache-dir", str(machine.poisoned), "--trust-cache-dir")
    assert machine.ran.exists()


def test_tmpdir(machine: Machine, run_cli_in: RunCLI) -> None:
    """The folder that torch would use by default: the victim's own cache is used instead."""
    machine.poisoned.rename(machine.tmp / f"torchinductor_{getpass.getuser()}")
    result = run_cli_in(machine.home, *START, TMPDIR=str(machine.tmp))
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["plan"]["cache_dir"] == str(machine.home / ".cache" / "tcdeploy")
    assert not machine.ran.exists()


@pytest.mark.parametrize("name", [".cache/tcdeploy", ".cache", ""])
def test_home(machine: Machine, run_cli_in: RunCLI, name: str) -> None:
    """HOME, or a folder in it, belongs to the attacker."""
    cache = machine.home / ".cache" / "tcdeploy"
    shutil.rmtree(cache)
    machine.poisoned.rename(cache)
    give(machine.home, 0)
    os.chown(machine.home / name, ATTACKER, ATTACKER)
    refused(run_cli_in, machine)


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777])
def test_cache_folder(machine: Machine, run_cli_in: RunCLI, mode: int) -> None:
    machine.poisoned.chmod(mode)
    refused(run_cli_in, machine, "--cache-dir", str(machine.poisoned))


def test_a_cache_folder_of_the_victim_that_everybody_can_write(machine: Machine, run_cli_in: RunCLI) -> None:
    give(machine.poisoned, 0)
    machine.poisoned.chmod(0o777)
    refused(run_cli_in, machine, "--cache-dir", str(machine.poisoned))


def test_remote_folder(machine: Machine, run_cli_in: RunCLI) -> None:
    """The attacker put an unsigned bundle of the victim's plan there."""
    remote = machine.tmp / "remote"
    remote.mkdir()
    [(key, manifest)] = read_manifests(machine.poisoned).items()
    hits = tuple(replace(record, outcome="hit") for record in manifest.buckets)  # pack wants that
    write_manifest(manifest_path(machine.poisoned, key), replace(manifest, buckets=hits))
    pack(machine.poisoned, key, remote / "plan.tcb")
    give(remote, ATTACKER)
    shutil.rmtree(machine.home / ".cache")
    refused(run_cli_in, machine, "--cache-from", str(remote / "plan.tcb"))


def refused(run_cli_in: RunCLI, machine: Machine, *flags: str) -> None:
    result = run_cli_in(machine.home, *START, *flags)
    assert result.returncode == 4, result.stderr
    assert result.stderr.count("error: ") == 1 and "Traceback" not in result.stderr
    assert not machine.ran.exists()
