"""Runs commands as a container would, without a container runtime: in mount and PID namespaces of Linux.

The commands see a read-only root file system, run as the user of the image without capabilities, and can write only to
volumes, whose owner and mode are those of a Kubernetes emptyDir. The virtual environment of the image has the packages
that its extras require, from the tests' own environment.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.conftest import PACKAGES, ROOT
from tests.linked_packages import create_environment

UID = 10001
EXTRAS = ("serve", "s3", "oci", "structured")  # of scripts/locks/serve.txt
EMPTY_DIR_MODE = 0o2777  # of a Kubernetes emptyDir with fsGroup


def skip_unless_supported() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can create mount namespaces and act as the user of the image")
    probe = "mount --make-rprivate / && mount -o remount,bind,ro /"
    if shutil.which("setpriv") is None or subprocess.run(["unshare", "--mount", "sh", "-c", probe]).returncode:
        pytest.skip("mount namespaces (unshare, setpriv) are not available here")
    closed = [path for path in (Path(sys.executable), ROOT) if not is_readable_by_others(path)]
    if closed:
        pytest.skip(f"other users cannot read {closed[0]}")


def is_readable_by_others(path: Path) -> bool:
    return all(parent.stat().st_mode & 0o001 for parent in path.absolute().parents)


class Container:
    """The root file system of one container, and its volumes below `folder`, which all users can read."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tmp, self.cache = folder, folder / "tmp", folder / "cache"
        self.image = folder / "image"  # its /etc and /opt
        for volume in (self.tmp, self.cache):
            volume.mkdir()
            os.chown(volume, 0, UID)
            volume.chmod(EMPTY_DIR_MODE)
        create_environment(self.image / "opt/tcdeploy", *EXTRAS, packages=("triton",))  # as torch for GPUs requires
        shutil.copytree(
            "/etc", self.image / "etc", symlinks=True, ignore_dangling_symlinks=True, copy_function=_copy_if_present
        )

    def build(self, script: str, **environ: str) -> None:
        """Run a shell script as root that may write to /etc and /opt of the image."""
        command = [*self._enter(writable=True), "sh", "-ec", script]
        done = subprocess.run(command, capture_output=True, text=True, env=self._environ(environ))
        assert done.returncode == 0, done.stderr

    @property
    def log(self) -> Path:
        """The stderr of the command that was started last."""
        return self.folder / "log"

    def start(self, *command: str, **environ: str) -> subprocess.Popen[str]:
        """Start a command as PID 1 and as the user of the image."""
        user = (
            "setpriv",
            f"--reuid={UID}",
            f"--regid={UID}",
            "--clear-groups",
            "--no-new-privs",
            "--bounding-set=-all",
        )
        full_command = [*self._enter(writable=False), *user, *command]
        with self.log.open("w") as log:
            return subprocess.Popen(
                full_command, env=self._environ(environ), stdout=subprocess.PIPE, stderr=log, text=True
            )

    def _enter(self, writable: bool) -> list[str]:
        """A command that runs the command behind it in the container. It must have the same PID as the shell."""
        own = f"{self.folder}/python"
        lines = ["set -e", "mount --make-rprivate /"]
        if Path(sys.base_prefix).is_relative_to("/root"):  # other users may not enter it
            prefix = shlex.quote(sys.base_prefix)
            lines += [f"mkdir -p {own}", f"mount --bind {prefix} {own}", "mount -t tmpfs -o mode=755 tmpfs /root"]
            lines += [f"mkdir -p {prefix}", f"mount --bind {own} {prefix}"]
        lines += [f"mount --bind {self.image}/{name} /{name}" for name in ("etc", "opt")]
        if not writable:
            lines += [f"mount --bind {volume} {volume}" for volume in (self.tmp, self.cache)]
            lines += [f"mount -o remount,bind,ro {path}" for path in ("/etc", "/opt", "/")]
        isolate = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return [*isolate, "/bin/sh", "-c", "\n".join([*lines, 'exec "$@"']), "sh"]

    def _environ(self, environ: dict[str, str]) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "PYTHONPATH": PACKAGES, "OMP_NUM_THREADS": "1", **environ}


def _copy_if_present(source: str, destination: str) -> None:
    """Copy a file of /etc, unless apt-get, which another test may run, has just removed it."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(source, destination)


def child_of(process: subprocess.Popen[str]) -> psutil.Process:
    """The process that `unshare --fork` started: PID 1 of the container."""
    [child] = psutil.Process(process.pid).children()
    return child
