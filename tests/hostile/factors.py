"""Starts with two values of a factor in one cache folder, in both orders: each start works, and finds its own programs.

A factor is a variable or a flag that may change programs: the instruction set, threads, the C++ compiler and its flags,
settings of Inductor, the locale, the dtype. For two values A and B of a factor, an attack starts A, B, A and B in a new
cache folder. Each start compares the model's logits with those of transformers, so a program that was compiled for the
other value fails it. An attack succeeds if a start fails, or if the second start with a value has to compile: then the
start with the other value has replaced its programs. After all factors, attacks draw random values of several factors.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ("--buckets", "32", "--batch-sizes", "1", "--context", "128", "--programs", "jit")
OTHER_COMPILER = "OTHER_COMPILER"  # stands for the path of a second g++


@dataclass(frozen=True)
class Value:
    """A value of a factor: environment variables and flags of `tcdeploy warm`."""

    variables: tuple[tuple[str, str], ...] = ()
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join([*(f"{name}={value}" for name, value in self.variables), *self.flags]) or "default"

    def __add__(self, other: Value) -> Value:
        return Value(self.variables + other.variables, self.flags + other.flags)


def of(flags: str = "", **variables: str) -> Value:
    return Value(tuple(variables.items()), tuple(flags.split()))


def instruction_sets() -> list[str]:
    """Those of this CPU, as ATEN_CPU_CAPABILITY names them."""
    flags = Path("/proc/cpuinfo").read_text().split()
    return ["default", *(name for name, flag in (("avx2", "avx2"), ("avx512", "avx512f")) if flag in flags)]


DEFAULT = of()
FACTORS: dict[str, tuple[Value, ...]] = {
    "instruction set": (*(of(ATEN_CPU_CAPABILITY=name) for name in instruction_sets()), DEFAULT),
    "instruction set of packages": (of("--programs aot", ATEN_CPU_CAPABILITY="default"), of("--programs aot")),
    "threads": (DEFAULT, of(OMP_NUM_THREADS="2")),
    "compiler": (DEFAULT, of(CXX=OTHER_COMPILER)),
    "debug symbols": (DEFAULT, of(TORCHINDUCTOR_DEBUG_SYMBOL="1")),
    "optimisation": (DEFAULT, of(TORCHINDUCTOR_CPP_ENABLE_UNSAFE_MATH_OPT_FLAG="1")),
    "width of vectors": (DEFAULT, of(TORCHINDUCTOR_VEC_ISA_OK="0")),
    "chunk size": (DEFAULT, of(TORCHINDUCTOR_CPP_MIN_CHUNK_SIZE="64")),
    "size assertions": (DEFAULT, of(TORCHINDUCTOR_SIZE_ASSERTS="0")),
    "tag of the key": (DEFAULT, of(TORCH_COMPILE_CACHE_KEY_TAG="other")),
    "locale": (of(LC_ALL="C"), of(LC_ALL="C.UTF-8")),
    "dtype": (DEFAULT, of("--dtype bfloat16")),
    "region": (DEFAULT, of("--region blocks")),
}
# Both orders of all pairs of values.
ORDERED_PAIRS = [
    (name, first, second)
    for name, values in FACTORS.items()
    for first in values
    for second in values
    if first != second
]
DEFAULT_COUNT = len(ORDERED_PAIRS) + 6


class Campaign:
    """Starts the model with a shared cache of compiled kernels (tests/compilers/g++)."""

    def __init__(self, work_dir: Path, flags: tuple[str, ...] = FLAGS) -> None:
        self.work_dir, self.flags = work_dir, flags
        self.compiler_cache = Path(os.environ.get("TEST_COMPILER_CACHE") or work_dir / "kernels")
        self.compiler_cache.mkdir(exist_ok=True)
        self.other_compiler = work_dir / "other-g++"
        self.other_compiler.write_text('#!/bin/sh\nexec g++ "$@"\n')
        self.other_compiler.chmod(0o755)

    def attack(self, folder: Path, first: Value, second: Value, num_starts: int = 4) -> str:
        """Start `first` and `second` in turn in the folder. Returns the problem; empty if there is none."""
        for number, value in enumerate([first, second, first, second][:num_starts]):
            done = self.start(folder, value)
            if done.returncode:
                return f"start {number + 1} ({value}): exit {done.returncode}, {done.stderr[-300:]}"
            missed = [bucket["bucket"] for bucket in json.loads(done.stdout)["buckets"] if bucket["outcome"] != "hit"]
            if number > 1 and missed:
                return f"start {number + 1} ({value}) compiled {', '.join(missed)} again"
        return ""

    def start(self, folder: Path, value: Value, *flags: str) -> subprocess.CompletedProcess[str]:
        environ = {
            "PATH": f"{ROOT / 'tests' / 'compilers'}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.work_dir), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_VEC_ISA_OK": "1", "TEST_COMPILER_CACHE": str(self.compiler_cache),
            **{name: text.replace(OTHER_COMPILER, str(self.other_compiler)) for name, text in value.variables},
        }  # fmt: skip
        command = [sys.executable, "-P", "-m", "tcdeploy", "warm", "builtin:tiny", "--device", "cpu", "--json"]
        command += [*self.flags, "--cache-dir", str(folder), *value.flags, *flags]
        return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=900)


def run(rng: random.Random, count: int) -> dict[str, Any]:
    """All factors if `count` allows it, else a sample of them; then random values of several factors."""
    pairs = ORDERED_PAIRS if count >= len(ORDERED_PAIRS) else rng.sample(ORDERED_PAIRS, count)
    attacks = [*pairs, *_random_pairs(rng, count - len(pairs))]
    problems: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="factors-") as work_dir:
        campaign = Campaign(Path(work_dir))
        for number, (name, first, second) in enumerate(attacks):
            folder = Path(work_dir, f"cache{number}")
            if problem := campaign.attack(folder, first, second):
                problems[f"{name}: {first} | {second}"] = problem
            print(f"{number + 1}/{len(attacks)} {name}: {first} | {second}: {problem or 'ok'}", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
    return {"attacks": len(attacks), "succeeded": len(problems), "problems": problems}


def _random_pairs(rng: random.Random, count: int) -> Iterator[tuple[str, Value, Value]]:
    """Two sets of values that differ in at least one factor."""
    names = [name for name in FACTORS if name != "instruction set of packages"]
    while count > 0:
        chosen = rng.sample(names, 3)
        first, second = (sum((rng.choice(FACTORS[name]) for name in chosen), DEFAULT) for _ in range(2))
        if first != second:
            count -= 1
            yield ", ".join(chosen), first, second
