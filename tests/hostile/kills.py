"""Kills warm, pack, unpack, push and pull at their system calls, then runs the command that a user would run next.

A preloaded library (kill_at.c) counts the calls that change files in the command's folders: renames, removals, writes,
flushes, links and new folders. Each command runs once to count its calls, and then once per chosen call: the process is
killed before the call, or after half of a write. Nothing may be lost, and the next run must succeed: a start computes
the correct tokens (warming checks them), and a repeated command gives the same result as a command that was not killed.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tcdeploy.cache.files.records import find_damage
from tcdeploy.cache.record.manifest import read_manifests
from tests.fork_server import ForkServer

DEFAULT_COUNT = 220
ROOT = Path(__file__).resolve().parents[2]
KINDS = {"r": "rename", "u": "remove", "w": "write", "f": "fsync", "l": "link", "m": "mkdir"}
START = ("warm", "builtin:tiny", "--buckets", "16", "--batch-sizes", "1", "--programs", "jit")
OTHER_START = (
    "warm",
    "builtin:tiny",
    "--buckets",
    "32",
    "--batch-sizes",
    "1",
    "--programs",
    "jit",
)  # its decode:1 is the same program
COUNTING = "import os; os.environ.update(KILL_PID=str(os.getpid()), {})"


@dataclass(frozen=True)
class Command:
    """A command to kill.

    `prepare` creates its folders. `check` gets the number of the call at which the command was killed, runs the command
    that a user would run next, and returns the problem that it found, or an empty string.
    """

    name: str
    share: float  # of all kills; pack, push and pull make few calls
    arguments: tuple[str, ...]
    prepare: Callable[[], None]
    check: Callable[[int], str]
    calls: str = field(default="", compare=False)


class Outcome(NamedTuple):
    was_killed: bool
    problem: str  # empty if there was none


class Campaign:
    """The folders of a campaign. `filled` and `other` are caches with one plan each. The commands change `folder`,
    `out` and `remote`."""

    def __init__(
        self, work_dir: Path, start: tuple[str, ...] = START, other_start: tuple[str, ...] = OTHER_START
    ) -> None:
        self.work_dir, self.start, self.other_start = work_dir, start, other_start
        self.filled, self.other, self.folder, self.out, self.remote = (
            work_dir / name for name in ("filled", "other", "folder", "out", "remote")
        )
        self.bundle, self.count_file = work_dir / "plan.tcb", work_dir / "calls"
        self.environ = self._environment()
        self.server = ForkServer(self.environ)
        self.start_seconds: list[float] = []
        self._make_inputs()

    def _environment(self) -> dict[str, str]:
        library = self.work_dir / "kill_at.so"
        compiler_cache = os.environ.get("TEST_COMPILER_CACHE") or str(self.work_dir / "kernels")
        os.makedirs(compiler_cache, exist_ok=True)
        source = Path(__file__).with_name("kill_at.c")
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        return {
            "PATH": f"{ROOT / 'tests' / 'compilers'}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.work_dir), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_VEC_ISA_OK": "1", "TEST_COMPILER_CACHE": compiler_cache, "LD_PRELOAD": str(library),
        }  # fmt: skip

    def _make_inputs(self) -> None:
        for start, folder in ((self.start, self.filled), (self.other_start, self.other)):
            for _ in range(1 if folder.exists() else 2):  # the last start compiles nothing, so it can be packed
                self.succeed(*start, "--cache-dir", str(folder))
        for path in (self.other / "manifests").glob(f"{self.filled_key}.json"):
            path.unlink()
        self.succeed("cache", "pack", str(self.filled), "-o", str(self.bundle))
        pushed = self.succeed("cache", "push", str(self.bundle), str(self.work_dir / "pushed"))
        [self.url] = [str(path) for path in (self.work_dir / "pushed").rglob("*.tcb")]
        assert pushed.returncode == 0

    @property
    def filled_key(self) -> str:
        [key] = read_manifests(self.filled)
        return key

    def run(self, *arguments: str, kill_at: int | None = None) -> subprocess.CompletedProcess[str]:
        script = ""
        if kill_at is not None:
            variables = {
                "KILL_BELOW": f"{self.folder}:{self.out}:{self.remote}",
                "KILL_COUNT": str(self.count_file), "KILL_AT": str(kill_at),
            }  # fmt: skip
            script = COUNTING.format(", ".join(f"{name}={value!r}" for name, value in variables.items()))
        return self.server.run(*arguments, environ=self.environ, script=script)

    def succeed(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        done = self.run(*arguments)
        assert done.returncode == 0, (arguments, done.stderr)
        return done

    def commands(self) -> list[Command]:
        folder, out, remote = str(self.folder), str(self.out / "plan.tcb"), str(self.remote)
        warm, unpack = (
            (*self.start, "--cache-dir", folder),
            ("cache", "unpack", str(self.bundle), folder, "--allow-unsigned"),
        )
        return [
            Command("warm, cold", 0.2, warm, self._prepare(), self._check_start),
            Command("warm beside another plan", 0.15, warm, self._prepare(self.other), self._check_start),
            Command("warm, cached", 0.2, warm, self._prepare(self.filled), self._check_start),
            Command("pack", 0.06, ("cache", "pack", str(self.filled), "-o", out), self._prepare(), self._check_pack),
            Command("unpack", 0.2, unpack, self._prepare(self.other), self._check_unpack),
            Command("unpack over a damaged plan", 0.14, unpack, self._prepare_damaged, self._check_unpack),
            Command("push", 0.03, ("cache", "push", str(self.bundle), remote), self._prepare(), self._check_push),
            Command("pull", 0.02, ("cache", "pull", self.url, "-o", out), self._prepare(), self._check_pull),
        ]

    def _prepare(self, *sources: Path) -> Callable[[], None]:
        def prepare() -> None:
            for path in (self.folder, self.out, self.remote):
                shutil.rmtree(path, ignore_errors=True)
            for path in (self.out, self.remote):
                path.mkdir()
            for source in sources:
                shutil.copytree(source, self.folder, dirs_exist_ok=True)

        return prepare

    def _prepare_damaged(self) -> None:
        self._prepare(self.filled, self.other)()
        [manifest], [other] = read_manifests(self.filled).values(), read_manifests(self.other).values()
        for file in manifest.files:
            if file.path.endswith(".so") and file not in other.files:
                os.truncate(self.folder / file.path, file.bytes // 2)

    def _check_start(self, number: int) -> str:
        """Check that a start succeeds and leaves no temporary files, and that the other plan, if any, is intact."""
        had_other = self._has_plan(self.other)
        started = time.perf_counter()
        done = self.run(*self.start, "--cache-dir", str(self.folder))
        self.start_seconds.append(time.perf_counter() - started)
        if done.returncode:
            return f"the next start exited with {done.returncode}: {done.stderr[-500:]}"
        if had_other and not self._has_plan(self.other):
            return "the other plan was lost"
        if not self._has_plan(self.filled):
            return "the next start recorded no plan"
        left = [path.name for path in self.folder.iterdir() if path.name.startswith(".") and path.name != ".lock"]
        return f"left behind: {left}" if left else ""

    def _has_plan(self, source: Path) -> bool:
        """Whether `folder` has the plan of the cache `source`, with undamaged files."""
        [key] = read_manifests(source)
        plan = read_manifests(self.folder).get(key)
        return plan is not None and not find_damage(self.folder, plan.files)

    def _check_unpack(self, number: int) -> str:
        if not self._has_plan(self.other):
            return "the other plan was lost"
        if number % 3 == 0:
            done = self.run(*self.start, "--cache-dir", str(self.folder), "--on-bad-cache", "rebuild")
            return f"the next start exited with {done.returncode}: {done.stderr[-500:]}" if done.returncode else ""
        again = self.run("cache", "unpack", str(self.bundle), str(self.folder), "--allow-unsigned")
        verified = self.run("cache", "verify", str(self.folder), "--allow-unsigned")
        return "" if again.returncode == verified.returncode == 0 else again.stderr + verified.stderr

    def _check_pack(self, number: int) -> str:
        target = self.out / "plan.tcb"
        if target.exists() and target.read_bytes() != self.bundle.read_bytes():
            return "an incomplete bundle has the final name"
        return self._check_file(target, "cache", "pack", str(self.filled), "-o", str(target))

    def _check_pull(self, number: int) -> str:
        target = self.out / "plan.tcb"
        if target.exists() and target.read_bytes() != self.bundle.read_bytes():
            return "an incomplete bundle has the final name"
        return self._check_file(target, "cache", "pull", self.url, "-o", str(target))

    def _check_push(self, number: int) -> str:
        incomplete = [path for path in self.remote.rglob("*.tcb") if path.read_bytes() != self.bundle.read_bytes()]
        if incomplete:
            return "an incomplete bundle has the final name"
        done = self.run("cache", "push", str(self.bundle), str(self.remote))
        pushed = [path for path in self.remote.rglob("*.tcb") if path.read_bytes() == self.bundle.read_bytes()]
        return "" if done.returncode == 0 and len(pushed) == 1 else f"{done.stderr} {pushed}"

    def _check_file(self, target: Path, *again: str) -> str:
        done = self.run(*again)
        if done.returncode or target.read_bytes() != self.bundle.read_bytes():
            return f"the repeated command failed or wrote another file: {done.stderr}"
        left = sorted(path.name for path in self.out.iterdir() if path != target)
        return f"left behind: {left}" if left else ""

    def count_calls(self, command: Command) -> str:
        """Run the command to its end, and return one letter per system call (KINDS)."""
        command.prepare()
        self.count_file.unlink(missing_ok=True)
        done = self.run(*command.arguments, kill_at=0)
        assert done.returncode == 0, (command.name, done.stderr)
        content = self.count_file.read_bytes()
        return content[8 : 8 + int.from_bytes(content[:8], sys.byteorder)].decode()

    def kill(self, command: Command, number: int) -> Outcome:
        """Kill the command at its call `number`, from 1, and check what it left.

        The command may end before that call, because the number of calls varies with the order of threads.
        """
        command.prepare()
        self.count_file.unlink(missing_ok=True)
        done = self.run(*command.arguments, kill_at=number)
        if done.returncode != -signal.SIGKILL:
            is_success = done.returncode == 0
            return Outcome(False, "" if is_success else f"not killed, but exited with {done.returncode}: {done.stderr}")
        return Outcome(True, command.check(number))


@contextlib.contextmanager
def campaign(work_dir: Path, **options: Any) -> Iterator[Campaign]:
    kills = Campaign(work_dir, **options)
    try:
        yield kills
    finally:
        kills.server.shutdown()


def choose(source: random.Random, calls: str, count: int) -> list[int]:
    """Choose the numbers of `count` calls. At least half of them are not writes, because most calls are writes."""
    writes = [number for number, kind in enumerate(calls, 1) if kind == "w"]
    others = [number for number, kind in enumerate(calls, 1) if kind != "w"]
    chosen = source.sample(others, min(len(others), max(count // 2, count - len(writes))))
    return sorted(chosen + source.sample(writes, min(len(writes), count - len(chosen))))


def run(source: random.Random, count: int) -> dict[str, Any]:
    succeeded: list[str] = []
    killed: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="kills-") as work_dir, campaign(Path(work_dir)) as kills:
        for command in kills.commands():
            calls = kills.count_calls(command)
            for number in choose(source, calls, max(1, round(count * command.share))):
                was_killed, problem = kills.kill(command, number)
                if was_killed:
                    killed[command.name] += 1
                    kinds[KINDS[calls[number - 1]]] += 1
                if problem:
                    succeeded.append(f"{command.name}, call {number} of {len(calls)}: {problem}")
            print(f"{command.name}: {killed[command.name]} kills of {len(calls)} calls", flush=True)
        seconds = kills.start_seconds
    return {
        "kills": sum(killed.values()),
        "by_command": dict(killed),
        "by_call": dict(kinds),
        "next_start_seconds": {"median": round(statistics.median(seconds), 2), "largest": round(max(seconds), 2)},
        "succeeded": succeeded,
    }
