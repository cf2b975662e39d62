"""Builds the packages of a model in another process, which runs `tcdeploy warm --programs aot` with the same recipe.

The build loads the model again. In another process, the caller can free its own copy first (`warm`), or keep serving
while the build runs at the lowest priority (`serve --build-packages`). A failed build is returned with its reason and
raises nothing, because jit programs work without packages. Does not import torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tcdeploy.cache.folder.layout import manifest_path
from tcdeploy.cache.record.manifest import read_manifest
from tcdeploy.errors import IntegrityError
from tcdeploy.host.die_with_parent import command
from tcdeploy.host.progress import Progress
from tcdeploy.host.temporary_files import temporary_folder
from tcdeploy.planning.option import ENVIRONMENT_PREFIX
from tcdeploy.planning.recipe import SHARED_VARIABLES, Recipe
from tcdeploy.start.auto_programs import why_not_exported
from tcdeploy.start.planned import Planned

LOWEST_PRIORITY = 19
KEPT_LINES = 20  # of stderr, whose last lines contain the error
JOIN_TIMEOUT_S = 5.0


@dataclasses.dataclass(frozen=True)
class PackageResult:
    """The packages in a cache folder. `bytes`: of all files of their plan. `seconds`: of the build; 0 without one.

    `failure`: why there are no packages, "" if there are. If it is set, `plan_key` is empty and `bytes` is 0.
    `is_damaged`: they are in the folder and damaged, so later starts fail too, except with `--on-bad-cache rebuild`.
    """

    plan_key: str
    seconds: float
    bytes: int
    failure: str = ""
    is_damaged: bool = False


def build_packages(
    recipe: Recipe, planned: Planned, cache_dir: str, progress: Progress, trusted_keys: Path | None = None
) -> PackageResult:
    """Build packages in another process, after a start of `planned` that used the folder `cache_dir`.

    Free the memory of that start first. `trusted_keys`: the folder of trusted public keys; None: the default.
    """
    if reason := obstacle(planned, cache_dir):
        return PackageResult("", 0.0, 0, reason)
    progress.stage("packages")
    try:
        return PackageBuild(recipe, cache_dir, trusted_keys, on_message=progress.detail).wait()
    except OSError as error:
        return PackageResult("", 0.0, 0, f"the process cannot be started: {error}")


def obstacle(planned: Planned, cache_dir: str) -> str:
    """Why no process is started to build packages after a start that used the folder `cache_dir`; "" if one may be."""
    is_read_only = cache_dir != planned.plan.cache_dir
    return why_not_exported(planned) or (f"{planned.plan.cache_dir} cannot be written" if is_read_only else "")


@contextlib.contextmanager
def warm_command(settings: Mapping[str, Any], *flags: str) -> Iterator[tuple[list[str], dict[str, str]]]:
    """A command that warms a plan, and its environment variables. `settings`: the values of the recipe that are set.

    Run the command inside the block, because the recipe is a temporary file. Its process ends with the thread that
    starts it, also if that is killed.
    """
    with temporary_folder("warm") as folder:
        recipe = Path(folder, "recipe.yaml")
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
        recipe.write_text(yaml.safe_dump(plain), encoding="utf-8")
        environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(ENVIRONMENT_PREFIX) or name in SHARED_VARIABLES
        }
        yield command("tcdeploy", "warm", "--recipe", str(recipe), *flags), environ


class PackageBuild:
    """A running build. All methods may be called from any thread."""

    def __init__(
        self, recipe: Recipe, cache_dir: str, trusted_keys: Path | None = None, is_background: bool = False,
        on_message: Callable[[str], None] = lambda line: None,
    ) -> None:  # fmt: skip
        """Start the process. `cache_dir`: the plan's cache folder.

        `is_background`: run at the lowest priority, in a new session, whose processes `pause` stops. `on_message`:
        called in a thread with each line of the process's stderr. Raises OSError if the process cannot be started.
        """
        fields = dataclasses.asdict(dataclasses.replace(recipe, programs="aot", cache_dir=os.path.abspath(cache_dir)))
        settings = {name: value for name, value in fields.items() if value is not None}
        keys = ("--trusted-keys", str(trusted_keys)) if trusted_keys is not None else ()
        self._cache_dir, self._is_background, self._on_message = cache_dir, is_background, on_message
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._started_at = time.monotonic()
        with contextlib.ExitStack() as cleanup:
            words, environ = cleanup.enter_context(warm_command(settings, "--json", *keys))
            self._report = cleanup.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8"))
            self._process = subprocess.Popen(
                words, env=environ, stdin=subprocess.DEVNULL, stdout=self._report, stderr=subprocess.PIPE, text=True,
                errors="replace", start_new_session=is_background,
            )  # fmt: skip
            self._cleanup = cleanup.pop_all()
        if is_background:
            _lower_priority(self._process.pid)
        self._reader = threading.Thread(target=self._read_messages, name="package-build", daemon=True)
        self._reader.start()

    def wait(self) -> PackageResult:
        """Wait for the end of the process, and return its result. An exception during the wait kills the process."""
        try:
            self._process.wait()
        finally:
            self.stop()
        self._reader.join(JOIN_TIMEOUT_S)  # it ends with the process, unless a compiler still holds stderr
        seconds = time.monotonic() - self._started_at
        with self._cleanup:
            self._report.seek(0)
            report = self._report.read()
        if self._process.returncode:
            is_damaged = self._process.returncode == IntegrityError.exit_code
            return PackageResult("", seconds, 0, self._failure(), is_damaged)
        plan, manifest = json.loads(report)["plan"], None
        with contextlib.suppress(IntegrityError):
            manifest = read_manifest(manifest_path(self._cache_dir, plan["key"]))
        if manifest is None or plan["programs"] != "aot":
            return PackageResult("", seconds, 0, "the process left no packages in the cache folder")
        return PackageResult(plan["key"], seconds, manifest.total_bytes)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """Kill the process, and in the background its compilers too."""
        if self.is_running:
            self._send(signal.SIGKILL)
            self._process.wait()

    def pause(self) -> None:
        """Stop the processes of a background build until `resume`."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._is_background:
                os.killpg(self._process.pid, number)
            else:
                os.kill(self._process.pid, number)

    def _read_messages(self) -> None:
        for line in self._process.stderr or ():
            self._lines.append(line.strip())
            self._on_message(" ".join(line.split()))

    def _failure(self) -> str:
        """The message of the last error; without one, how the process has ended."""
        errors = [line.removeprefix("error: ") for line in self._lines if line.startswith("error: ")]
        code = self._process.returncode
        ended = f"the process was killed by signal {-code}" if code < 0 else f"the process exited with code {code}"
        return errors[-1] if errors else ended


def _lower_priority(pid: int) -> None:
    """Give the process only the CPU time that others leave. Its children inherit the priority."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, LOWEST_PRIORITY)
        if hasattr(os, "SCHED_IDLE"):  # Linux
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
