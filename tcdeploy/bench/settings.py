"""What a benchmark was asked for. No torch: what cannot be measured is refused before a weight is loaded.

The defaults of `tcdeploy bench` stand here, once. A record checks what it can know alone when it is made; what depends
on the model (lengths against its context) is checked against the Plan, which is still before the weights.
"""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import dataclass
from pathlib import Path

from tcdeploy.errors import UsageError
from tcdeploy.planning.plan import Plan

BASELINES = ("eager", "generate", "region")
PLOT_SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """Where figures go beside stdout, and what is measured beside us. All benchmarks have these."""

    baselines: tuple[str, ...] = ()
    plot: str | None = None
    output: str | None = None
    price_per_hour: float | None = None  # of the machine, in any currency
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.baselines:
            if name not in BASELINES:
                raise UsageError(f"there is no baseline {name!r}", f"--baseline {'|'.join(BASELINES)}")
        if self.price_per_hour is not None:
            check_positive("price per hour", self.price_per_hour, "--price-per-hour 2.5")
        if self.output is not None:
            check_writable(self.output, "--output")
        if self.plot is not None:
            _check_plot(self.plot)


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(CommonSettings):
    """`context_length` None: DEFAULT_CONTEXT, or what fits. A number is held where the KV cache can hold it."""

    DEFAULT_CONTEXT = 512
    context_length: int | None = None
    repeats: int = 30  # of a step alone
    steps: int = 64  # of the running engine
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
            raise UsageError(
                "the breakdown of a step needs a GPU: on a CPU there are no kernels", "without --breakdown"
            )


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Requests of one shape to a server. `concurrency` 0: they arrive by themselves, at `request_rate` a second.

    1: the client never sleeps, and takes a core that the server should not need.
    """

    url: str
    served_model: str | None = None
    api_key: str | None = None
    requests: int = 100
    input_length: int = 512
    output_length: int = 128
    request_rate: float = math.inf
    concurrency: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "input_length", "output_length"):
            check_positive(name.replace("_", " "), getattr(self, name), f"--{name.replace('_', '-')} 128")
        _check_load(self.request_rate, self.concurrency)

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(frozen=True, kw_only=True)
class PrefillSettings(CommonSettings):
    """`lengths` None: those of DEFAULT_LENGTHS that the context holds."""

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
    """`request_rate` in requests a second with Poisson arrivals; infinity: all at once. `concurrency`: of clients."""

    requests: int = 64
    input_length: int = 512
    output_length: int = 128
    request_rate: float = math.inf
    concurrency: int = 0  # clients that each wait for their answer; 0: none waits

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("number of requests", self.requests, "--requests 64")
        check_positive("input length", self.input_length, "--input-length 512")
        check_positive("output length", self.output_length, "--output-length 128")
        _check_load(self.request_rate, self.concurrency)

    def check_against_plan(self, plan: Plan) -> None:
        total = self.input_length + self.output_length
        check_length("a request", total, plan, f"({self.input_length} in, {self.output_length} out) ")


@dataclass(frozen=True, kw_only=True)
class StartupSettings(CommonSettings):
    """One cold start, then `warm_runs` on the cache that it filled."""

    warm_runs: int = 1
    prompt_length: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("number of warm runs", self.warm_runs, "--warm-runs 1")
        check_positive("prompt length", self.prompt_length, "--prompt-length 128")

    def check_against_plan(self, plan: Plan) -> None:
        check_length("prompt length", self.prompt_length + 2, plan, "and two new tokens ")


def check_positive(name: str, value: float, hint: str) -> None:
    """NaN is refused as well: it is not above anything."""
    if not value > 0:
        raise UsageError(f"{name} is {value}, and must be above 0", hint)


def _check_load(request_rate: float, concurrency: int) -> None:
    """Requests arrive by themselves, or each of `concurrency` clients asks again when it has its answer."""
    check_positive("request rate", request_rate, "--request-rate inf, or requests a second")
    if concurrency < 0:
        raise UsageError(f"concurrency is {concurrency}", "a number of clients, or 0: none waits")
    if concurrency and not math.isinf(request_rate):
        raise UsageError("a request rate and a concurrency exclude each other", "give one of the two")


def check_length(name: str, tokens: int, plan: Plan, detail: str = "") -> None:
    if tokens > plan.context:
        raise UsageError(
            f"{name} {detail}is {tokens} tokens, and the context is {plan.context}", "a smaller length, or --context"
        )


def check_writable(path: str, option: str) -> None:
    """Before an hour of measuring, not after it. Nothing is written, and a file that is there stays."""
    target = Path(path)
    if target.is_dir():
        raise UsageError(f"{path} is a folder", f"name a file: {option} {target / 'bench'}")
    folder = target.absolute().parent
    if not os.access(target if target.exists() else folder, os.W_OK):
        fact = "cannot be written" if folder.is_dir() else f"is in a folder that does not exist: {folder}"
        raise UsageError(f"{path} {fact}", f"another file: {option} FILE")


def _check_plot(path: str) -> None:
    if Path(path).suffix not in PLOT_SUFFIXES:
        raise UsageError(f"{path} is no kind of picture that is drawn here", f"one of {', '.join(PLOT_SUFFIXES)}")
    check_writable(path, "--plot")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed", "pip install 'tcdeploy[plot]'")
