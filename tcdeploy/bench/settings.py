"""Settings of each benchmark, with their defaults and validation. Does not import torch.

A settings object validates itself on construction. Lengths are checked against the model's context in
`check_against_plan`, before weights are loaded.
"""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tcdeploy.errors import UsageError
from tcdeploy.planning.extras import require_extra
from tcdeploy.planning.plan import Plan

BASELINES = ("eager", "generate", "region")
PLOT_SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """Settings that all benchmarks of a deployment share: baselines, output files, price and seed."""

    baselines: tuple[str, ...] = ()
    plot: str | None = None  # path of a picture
    output: str | None = None  # path of a copy of the JSON document
    price_per_hour: float | None = None  # of the machine, in any currency
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.baselines:
            if name not in BASELINES:
                raise UsageError(f"unknown baseline {name!r}", f"--baseline {'|'.join(BASELINES)}")
        if self.price_per_hour is not None:
            check_positive("price per hour", self.price_per_hour, "--price-per-hour 2.5")
        if self.output is not None:
            check_writable(self.output, "--output")
        if self.plot is not None:
            check_plot(self.plot)


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(CommonSettings):
    """`context_length` None: DEFAULT_CONTEXT. Either is reduced for buckets whose sequences do not fit the KV cache."""

    DEFAULT_CONTEXT = 512
    context_length: int | None = None
    repeats: int = 30  # isolated steps
    steps: int = 64  # engine steps
    breakdown: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.context_length is not None:
            check_positive("context length", self.context_length, f"--context-length {self.DEFAULT_CONTEXT}")
        check_positive("repeats", self.repeats, "--repeats 30")
        check_positive("steps", self.steps, "--steps 64")

    def check_against_plan(self, plan: Plan) -> None:
        if self.context_length is not None:
            check_length("context length", self.context_length, plan)
        if self.breakdown and plan.device != "cuda":
            raise UsageError("--breakdown needs a GPU: it profiles CUDA kernels", "remove --breakdown")


@dataclass(frozen=True, kw_only=True)
class PrefillSettings(CommonSettings):
    """`lengths` None: those of DEFAULT_LENGTHS that fit the context."""

    DEFAULT_LENGTHS = (128, 512, 1024, 2048)
    lengths: tuple[int, ...] | None = None
    repeats: int = 20  # prompts of each length

    def __post_init__(self) -> None:
        super().__post_init__()
        for length in self.lengths or ():
            check_positive("prompt length", length, "--lengths 128,512")
        check_positive("repeats", self.repeats, "--repeats 20")

    def check_against_plan(self, plan: Plan) -> None:
        for length in self.lengths or ():
            check_length("prompt length", length + 2, plan, "and two new tokens ")


@dataclass(frozen=True, kw_only=True)
class ThroughputSettings(CommonSettings):
    """Requests with Poisson arrivals at `request_rate` per second (infinity: all at once), or by `concurrency`
    clients."""

    requests: int = 64
    input_length: int = 512
    output_length: int = 128
    request_rate: float = math.inf
    concurrency: int = 0  # clients that send a request after each response; 0: arrivals by request_rate

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("number of requests", self.requests, "--requests 64")
        check_positive("input length", self.input_length, "--input-length 512")
        check_positive("output length", self.output_length, "--output-length 128")
        check_arrivals(self.request_rate, self.concurrency)

    def check_against_plan(self, plan: Plan) -> None:
        total = self.input_length + self.output_length
        check_length("a request", total, plan, f"({self.input_length} in, {self.output_length} out) ")


@dataclass(frozen=True, kw_only=True)
class StartupSettings(CommonSettings):
    """One cold start, then `warm_runs` starts from the cache that it filled.

    `source` "cache": only the warm starts, from the recipe's own cache folder; "bundle": from a `bundle` that has been
    unpacked into it.
    """

    source: Literal["cold", "cache", "bundle"] = "cold"
    bundle: str | None = None
    warm_runs: int = 1
    prompt_length: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.source == "bundle") != (self.bundle is not None):
            raise UsageError("--from bundle and --bundle FILE belong together", "add the other, or remove both")
        check_positive("number of warm runs", self.warm_runs, "--warm-runs 1")
        check_positive("prompt length", self.prompt_length, "--prompt-length 128")

    def check_against_plan(self, plan: Plan) -> None:
        check_length("prompt length", self.prompt_length + 2, plan, "and two new tokens ")


def check_positive(name: str, value: float, hint: str) -> None:
    """Raises UsageError, for NaN too."""
    if not value > 0:
        raise UsageError(f"{name} is {value}, and must be above 0", hint)


def check_arrivals(request_rate: float, concurrency: int) -> None:
    check_positive("request rate", request_rate, "--request-rate 4 (per second), or --request-rate inf")
    if concurrency < 0:
        raise UsageError(
            f"concurrency is {concurrency}, and must not be negative", "--concurrency 8, or 0 for no limit"
        )
    if concurrency and not math.isinf(request_rate):
        raise UsageError("--request-rate and --concurrency exclude each other", "remove one of the two")


def check_length(name: str, tokens: int, plan: Plan, detail: str = "") -> None:
    if tokens > plan.context:
        raise UsageError(
            f"{name} {detail}is {tokens} tokens, and the context is {plan.context}",
            "use a smaller length, or a larger --context",
        )


def check_writable(path: str, option: str) -> None:
    """Raises UsageError before a long run rather than after it. Writes nothing; an existing file is not touched."""
    target = Path(path)
    if target.is_dir():
        raise UsageError(f"{path} is a folder", f"name a file: {option} {target / 'bench'}")
    folder = target.absolute().parent
    if not os.access(target if target.exists() else folder, os.W_OK):
        fact = "cannot be written" if folder.is_dir() else f"is in a folder that does not exist: {folder}"
        raise UsageError(f"{path} {fact}", f"name another file: {option} FILE")


def check_plot(path: str) -> None:
    if Path(path).suffix not in PLOT_SUFFIXES:
        raise UsageError(f"{path} is not a supported plot format", f"use one of {', '.join(PLOT_SUFFIXES)}")
    check_writable(path, "--plot")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed", "pip install 'tcdeploy[plot]'")
    require_extra("serve", "plot the results of `bench serve`")
