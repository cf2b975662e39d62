"""Fake cache folders: seeded bytes in files of every kind, with a manifest as a warm start writes it. No torch."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tcdeploy.cache.files.records import hash_files
from tcdeploy.cache.folder.layout import manifest_path
from tcdeploy.cache.record.manifest import Manifest, Origin, write_manifest
from tcdeploy.planning.bucket_record import BucketRecord, GreedyTokens, Parity
from tcdeploy.planning.environment import installed_versions
from tcdeploy.planning.plan import make_plan
from tests.conftest import ROOT
from tests.machines import LAPTOP, LLAMA_8B, make_recipe

HASH = "c6nlbwe7fajnjx2cpsoikjvqtmcdrglvmyqrfjnsgs6hjkpbvqkb"
LONG, LONGER = "n" * 90, "m" * 200
KINDS = (
    f"aotautograd/{HASH}/entry",
    f"fxgraph/6n/{HASH}/graph",
    "fxgraph/ab/" + "g" * 60 + "/" + "h" * 27,  # 99, then 100 and 101 characters: the limit of short tar names
    "fxgraph/ab/" + "g" * 60 + "/" + "h" * 28,
    "fxgraph/ab/" + "g" * 60 + "/" + "h" * 29,
    f"fxgraph/{LONG}/{LONG}/graph",
    f"fxgraph/{LONGER}/{LONGER}/{'k' * 255}",
    f"6n/{HASH}.py",
    f"6n/{HASH}.best_config",
    f"6n/{HASH}.main.so",
    f"6n/{HASH}.main.cpp",
    "triton/AB12/__grp__kernel.json",
    "triton/AB12/kernel.cubin",
    "triton/AB12/kernel.ptx",
    "toolchain/answers.json",
    "triton/größe/naïve 文件.bin",
    "6n/one-byte",
)
SIZES = (1, 511, 512, 513, 700, 1024, 4096, 9000)


_installed_versions = functools.cache(installed_versions)


def as_installed(**differences: Any) -> Any:
    """An environment with the installed versions, so that the real `unpack` command accepts the bundle."""
    versions = _installed_versions()
    installed = {name: versions[name] for name in ("torch", "transformers", "triton", "flash_packages")}
    return replace(LAPTOP, **{"python": versions["python"], **installed, **differences})


def record_of(bucket: str, outcome: str = "hit", **differences: Any) -> BucketRecord:
    greedy_tokens = GreedyTokens("a" * 64, (3, 5), (-0.5, -0.25))
    default = BucketRecord(
        bucket=bucket, outcome=outcome, compile_seconds=0.5, capture_seconds=0.0, check_seconds=0.1, compiles=1,
        programs=1, cache_hits=1, cache_misses=0, graph_breaks=0, cudagraph_skips=0, captured=False,
        parity=Parity(32, "float64", 1e-6, 1e-7, 1e-12, 1e-12, 1e-6, 1e-12, 2e-6, 4e-12, 4e-12, 0, 1, False, True),
        eager_greedy_tokens=greedy_tokens, greedy_tokens=greedy_tokens, peak_memory_bytes=0,
        variant="default", cold_seconds=12.5,
    )  # fmt: skip
    return replace(default, **differences)


def manifest_for(
    folder: Path, files: list[str], bucket: int = 32, outcome: str = "hit", **differences: Any
) -> Manifest:
    """The manifest of a plan with this prefill bucket; another bucket gives another plan."""
    recipe = make_recipe(context=4096, buckets=(bucket,), batch_sizes=(1,), cache_dir=str(folder))
    environment = as_installed()
    plan = make_plan(recipe, environment, LLAMA_8B)
    config = {"model_type": "llama", "hidden_size": 4096}
    origin = Origin(
        asdict(recipe), config, {"kernels/linear/ops.py": "5" * 64}, {"epilogue_fusion": "True"}, {"model": "6" * 64}
    )
    buckets = (record_of(f"prefill:{bucket}", outcome), record_of("decode:1"))
    hashed = hash_files(folder, files)
    manifest = Manifest(asdict(plan), asdict(environment), origin, {"compile": 1.0}, buckets, hashed, 1 << 20)
    return replace(manifest, **differences)


def fill(folder: Path, sizes: dict[str, int], seed: int = 0) -> list[str]:
    """Write seeded bytes under each name; every second file is compressible."""
    source = random.Random(seed)
    for number, (name, size) in enumerate(sizes.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source.randbytes(size) if number % 2 else (source.randbytes(16) * (size // 16 + 1))[:size])
    return list(sizes)


def make_cache(folder: Path, seed: int = 0, large: int = 3 << 20, bucket: int = 32, **manifest_fields: Any) -> Manifest:
    """About thirty files of every kind, one of `large` bytes, and the manifest of a warm start."""
    source = random.Random(seed)
    sizes = {name: source.choice(SIZES) for name in KINDS}
    sizes |= {f"7{number:x}/{HASH[number:]}.so": source.choice(SIZES) for number in range(12)}
    sizes |= {"6n/one-byte": 1, "6n/large.so": large}
    manifest = manifest_for(folder, fill(folder, sizes, seed), bucket, **manifest_fields)
    write_manifest(path_of(folder, manifest), manifest)
    return manifest


def make_small(folder: Path, seed: int = 0, **manifest_fields: Any) -> Manifest:
    """Like `make_cache`, but small enough to be verified a thousand times."""
    sizes = {name: 1 + (37 * number) % 900 for number, name in enumerate(KINDS)}
    manifest = manifest_for(folder, fill(folder, sizes, seed), **manifest_fields)
    write_manifest(path_of(folder, manifest), manifest)
    return manifest


def key_of(manifest: Manifest) -> str:
    return str(manifest.plan["key"])


def path_of(folder: Path, manifest: Manifest) -> Path:
    return manifest_path(folder, key_of(manifest))


Listing = dict[str, tuple[int, bytes]]


def listing(folder: Path) -> Listing:
    """Every file and folder below `folder`: modification time and content. Excludes the lock file."""
    entries: Listing = {}
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(parent, name)
            content = path.read_bytes() if path.is_file() else b""
            entries[path.relative_to(folder).as_posix()] = (path.stat().st_mtime_ns, content)
    entries.pop(".lock", None)
    return entries


def contents(folder: Path) -> dict[str, bytes]:
    return {name: content for name, (_, content) in listing(folder).items() if (folder / name).is_file()}


def staging_files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.name.startswith(".") and path.name != ".lock")


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@contextlib.contextmanager
def flipped_on_disk(path: Path, bit: int) -> Iterator[None]:
    """Flip one bit of the file in place and restore it afterwards. Rewriting the whole file would take longer."""
    with open(path, "r+b", buffering=0) as file:
        original = os.pread(file.fileno(), 1, bit // 8)
        os.pwrite(file.fileno(), flipped(original, bit % 8), bit // 8)
        try:
            yield
        finally:
            os.pwrite(file.fileno(), original, bit // 8)


def fill_disk_leaving(folder: Path, free: int) -> None:
    """Fill the disk that `folder` is mounted on, except for `free` bytes."""
    with open(folder / "filler", "wb") as filler:
        filler.write(bytes(shutil.disk_usage(folder).free - free))


class Child:
    """A Python subprocess that runs a script, and is killed at the end of the `with` block."""

    def __init__(self, script: str, *arguments: object, **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT, **options,
        )  # fmt: skip

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def line(self) -> str:
        assert self.process.stdout is not None
        text = self.process.stdout.readline().strip()
        assert text, self.process.communicate()[1]
        return text

    def kill(self) -> None:
        """Send SIGKILL unless the process has ended."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


FORK_PER_LINE = """
import json, os, signal, sys, time
from pathlib import Path
import cryptography.hazmat.primitives.serialization, zstandard
from tcdeploy.bundle.pack import pack
from tcdeploy.bundle.unpack import unpack
print("ready", flush=True)
while line := sys.stdin.readline():
    if child := os.fork():
        print("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    print(os.getpid(), flush=True)
    exec(sys.argv[1], {**globals(), "arguments": json.loads(line)})
    sys.stdout.flush()
    os._exit(0)
"""


class Forks(Child):
    """A process that has imported what packing and unpacking need. Each run of `script` is a fork of it.

    The script reads `arguments`, and may be killed at any time.
    """

    def __init__(self, script: str) -> None:
        super().__init__(FORK_PER_LINE, script, start_new_session=True)
        assert self.line() == "ready"

    def kill(self) -> None:
        """Kill the process and its forks, which share its pipes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def start(self, *arguments: object) -> int:
        """Start a run; returns the id of its process."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(list(map(str, arguments))) + "\n")
        self.process.stdin.flush()
        return int(self.line())

    def exit_code(self) -> int:
        """Wait for the end of the run. Reads what is left of its output."""
        while not (line := self.line()).startswith("ended "):
            pass
        return int(line.removeprefix("ended "))

    def run_and_kill_after(self, seconds: float, *arguments: object, check: Callable[[], None] = lambda: None) -> None:
        """Start a run, call `check` repeatedly for `seconds`, then kill the run unless it has ended."""
        child = self.start(*arguments)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            check()
            time.sleep(0.0002)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        assert self.exit_code() in (0, -signal.SIGKILL), "the run failed before the kill"
