"""Another user cannot make a start run code: not through TMPDIR, HOME, a cache folder or a remote folder.

The attacker is an unprivileged user id, the victim is root. The attacker's cache is a copy of a real cache in which
each pickle runs a command. Its manifests match the changed files.
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
from tcdeploy.cache.files.records import hash_files
from tcdeploy.cache.folder.layout import manifest_path
from tcdeploy.cache.record.manifest import read_manifests, write_manifest
from tests.conftest import TINY, TINY_FLAGS, RunCLI

ATTACKER = 12002
START = ("warm", TINY, *TINY_FLAGS, "--json", "--require-hit")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as several users")


class MaliciousObject:
    """An object whose unpickling runs the shell command `command`."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


class Machine:
    """A TMPDIR that all users can write, the victim's HOME with a warmed cache, and the attacker's cache.

    The pickles in the attacker's cache create the file `evidence`.
    """

    def __init__(self, folder: Path, filled_cache: Path) -> None:
        folder.chmod(0o755)
        self.tmp, self.home, self.poisoned = folder / "tmp", folder / "home", folder / "tmp" / "poisoned"
        self.tmp.mkdir()
        self.tmp.chmod(0o1777)
        self.evidence = folder / "evidence"
        shutil.copytree(filled_cache, self.home / ".cache" / "tcdeploy")
        shutil.copytree(filled_cache, self.poisoned)
        self._poison()
        change_owner(self.poisoned, ATTACKER)

    def _poison(self) -> None:
        [manifest] = read_manifests(self.poisoned).values()
        for file in manifest.files:
            if file.path.startswith(("fxgraph/", "aotautograd/")):
                (self.poisoned / file.path).write_bytes(pickle.dumps(MaliciousObject(f"touch {self.evidence}")))
        files = hash_files(self.poisoned, [file.path for file in manifest.files])
        write_manifest(manifest_path(self.poisoned, manifest.plan["key"]), replace(manifest, files=files))


def change_owner(folder: Path, uid: int) -> None:
    for path in (folder, *folder.rglob("*")):
        os.lchown(path, uid, uid)


@pytest.fixture
def machine(filled_cache: Path) -> Iterator[Machine]:
    with tempfile.TemporaryDirectory() as folder:
        yield Machine(Path(folder), filled_cache)


def test_the_attackers_cache_runs_code_where_it_is_trusted(machine: Machine, run_cli_in: RunCLI) -> None:
    """If it did not, the other tests would prove nothing."""
    run_cli_in(machine.home, *START, "--cache-dir", str(machine.poisoned), "--trust-cache-dir")
    assert machine.evidence.exists()


def test_the_folder_in_tmpdir_that_torch_uses_by_default_is_not_used(machine: Machine, run_cli_in: RunCLI) -> None:
    """The victim's own cache is used instead."""
    machine.poisoned.rename(machine.tmp / f"torchinductor_{getpass.getuser()}")
    result = run_cli_in(machine.home, *START, TMPDIR=str(machine.tmp))
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["plan"]["cache_dir"] == str(machine.home / ".cache" / "tcdeploy")
    assert not machine.evidence.exists()


@pytest.mark.parametrize("name", [".cache/tcdeploy", ".cache", ""])
def test_a_home_or_cache_folder_of_the_attacker_is_refused(machine: Machine, run_cli_in: RunCLI, name: str) -> None:
    cache = machine.home / ".cache" / "tcdeploy"
    shutil.rmtree(cache)
    machine.poisoned.rename(cache)
    change_owner(machine.home, 0)
    os.chown(machine.home / name, ATTACKER, ATTACKER)
    assert_refused(run_cli_in, machine)


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777])
def test_a_cache_dir_of_the_attacker_is_refused(machine: Machine, run_cli_in: RunCLI, mode: int) -> None:
    machine.poisoned.chmod(mode)
    assert_refused(run_cli_in, machine, "--cache-dir", str(machine.poisoned))


def test_a_cache_dir_of_the_victim_that_all_users_can_write_is_refused(machine: Machine, run_cli_in: RunCLI) -> None:
    change_owner(machine.poisoned, 0)
    machine.poisoned.chmod(0o777)
    assert_refused(run_cli_in, machine, "--cache-dir", str(machine.poisoned))


def test_the_attackers_unsigned_bundle_in_a_remote_folder_is_refused(machine: Machine, run_cli_in: RunCLI) -> None:
    """The bundle has the key of the victim's plan."""
    remote = machine.tmp / "remote"
    remote.mkdir()
    [(key, manifest)] = read_manifests(machine.poisoned).items()
    hits = tuple(replace(record, outcome="hit") for record in manifest.buckets)  # pack requires that all buckets hit
    write_manifest(manifest_path(machine.poisoned, key), replace(manifest, buckets=hits))
    pack(machine.poisoned, key, remote / "plan.tcb")
    change_owner(remote, ATTACKER)
    shutil.rmtree(machine.home / ".cache")
    assert_refused(run_cli_in, machine, "--cache-from", str(remote / "plan.tcb"))


def assert_refused(run_cli_in: RunCLI, machine: Machine, *flags: str) -> None:
    result = run_cli_in(machine.home, *START, *flags)
    assert result.returncode == 4, result.stderr
    assert result.stderr.count("error: ") == 1 and "Traceback" not in result.stderr
    assert not machine.evidence.exists()
