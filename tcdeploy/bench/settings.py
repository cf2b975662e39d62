"""Settings of each benchmark, which are the options of its command, and their validation. Does not import torch.

A settings object validates itself on construction. Lengths are checked against the model's context in
`check_against_plan`, before weights are loaded.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tcdeploy.errors import UsageError
from tcdeploy.planning.installation import install_command
from tcdeploy.planning.option import flag_name, option
from tcdeploy.planning.plan import Plan

BASELINES = ("eager", "generate", "region")
PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def parse_list(flag: str, kind: Callable[[str], Any], numbers: str, example: str, text: str) -> tuple[Any, ...]:
    """Numbers between commas. Raises UsageError."""
    try:
        return tuple(kind(word) for word in text.split(","))
    except ValueError:
        raise UsageError(f"{flag} is {text!r}, expected a list of {numbers}", f"{flag} {example}") from None


def _parse_rate(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--request-rate is {text!r}, expected a number", f"--request-rate 4, or {math.inf}") from None


# Options of several benchmarks. Each call makes a field.
measurement_option = partial(option, panel="Measurement")
output_option = partial(option, panel="Output", metavar="FILE")
json_copy = partial(output_option, None, "Also write the JSON document to this file")
random_seed = partial(measurement_option, 0, "Seed of the random prompts and arrival times")
baselines_option = partial(
    measurement_option, (),
    "Also measure transformers' model with its own attention (eager: in a plain loop; generate: by its `generate`), or "
    "attention and MLP as regions with CUDA graphs of their own; may be repeated",
    name="baseline", metavar="|".join(BASELINES),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """Settings of all benchmarks of a deployment. Baselines are an option of those that declare them again."""

    baselines: tuple[str, ...] = ()
    plot: str | None = output_option(None, "Write a plot to this .png, .svg or .pdf file")
    output: str | None = json_copy()
    seed: int = random_seed()

    def __post_init__(self) -> None:
        for name in self.baselines:
            if name not in BASELINES:
                raise UsageError(f"unknown baseline {name!r}", f"--baseline {'|'.join(BASELINES)}")
        check_files(self.output, self.plot)


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(CommonSettings):
    """`context_length` None: DEFAULT_CONTEXT. Either is reduced for buckets whose sequences do not fit the KV cache."""

    DEFAULT_CONTEXT = 512
    context_length: int | None = measurement_option(
        None, f"Context tokens per sequence [default: {DEFAULT_CONTEXT}, or less if the KV cache is smaller]"
    )
    repeats: int = measurement_option(30, "Isolated steps per bucket")
    steps: int = measurement_option(64, "Engine steps per bucket")
    breakdown: bool = measurement_option(False, "Add GPU time by kind of kernel and between kernels; needs a GPU")
    baselines: tuple[str, ...] = baselines_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, context_length=self.DEFAULT_CONTEXT, repeats=30, steps=64)

    def check_against_plan(self, plan: Plan) -> None:
        if self.context_length is not None:
            check_length("context length", self.context_length, plan)
        if self.breakdown and plan.device != "cuda":
            raise UsageError("--breakdown needs a GPU: it profiles CUDA kernels", "remove --breakdown")


@dataclass(frozen=True, kw_only=True)
class PrefillSettings(CommonSettings):
    """`lengths` None: those of DEFAULT_LENGTHS that fit the context."""

    DEFAULT_LENGTHS = (128, 512, 1024, 2048)
    lengths: tuple[int, ...] | None = measurement_option(
        None,
        f"Prompt lengths in tokens [default: {','.join(map(str, DEFAULT_LENGTHS))}, up to the context]",
        metavar="LIST",
        parse=partial(parse_list, "--lengths", int, "integers", "128,512"),
    )
    repeats: int = measurement_option(20, "Prompts per length")
    baselines: tuple[str, ...] = baselines_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        for length in self.lengths or ():
            check_positive("prompt length", length, "--lengths 128,512")
        check_fields(self, repeats=20)

    def check_against_plan(self, plan: Plan) -> None:
        for length in self.lengths_within(plan):
            check_length("prompt length", length + 2, plan, "and two new tokens ")

    def lengths_within(self, plan: Plan) -> tuple[int, ...]:
        """The requested lengths, or the default ones that fit the context. Raises UsageError if none fits."""
        lengths = self.lengths or tuple(length for length in self.DEFAULT_LENGTHS if length + 2 <= plan.context)
        if not lengths:
            raise UsageError(f"no default prompt length fits into a context of {plan.context} tokens", "--lengths 32")
        return lengths


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """Requests with Poisson arrivals at `request_rate` per second (infinity: all at once), or by `concurrency`
    clients."""

    input_length: int = measurement_option(512, "Tokens per prompt")
    output_length: int = measurement_option(128, "Output tokens per request")
    request_rate: float = measurement_option(
        math.inf, "Requests per second, with Poisson arrivals; inf: all at once", metavar="FLOAT", parse=_parse_rate
    )
    concurrency: int = measurement_option(
        0, "Clients that each send the next request after a response; 0: use --request-rate"
    )

    def check_load(self) -> None:
        check_fields(self, input_length=512, output_length=128)
        if self.request_rate != math.inf:
            check_positive("request rate", self.request_rate, "--request-rate 4 (per second), or --request-rate inf")
        if self.concurrency < 0:
            message = f"concurrency is {self.concurrency}, and must not be negative"
            raise UsageError(message, "--concurrency 8, or 0 for no limit")
        if self.concurrency and self.request_rate != math.inf:
            raise UsageError("--request-rate and --concurrency exclude each other", "remove one of the two")


@dataclass(frozen=True, kw_only=True)
class ThroughputSettings(LoadSettings, CommonSettings):
    requests: int = measurement_option(64, "Number of requests")
    baselines: tuple[str, ...] = baselines_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, requests=64)
        self.check_load()

    def check_against_plan(self, plan: Plan) -> None:
        total = self.input_length + self.output_length
        check_length("a request", total, plan, f"({self.input_length} in, {self.output_length} out) ")


@dataclass(frozen=True, kw_only=True)
class StartupSettings(CommonSettings):
    """`warm` with an empty cache folder, then `warm_runs` starts of `serve` from the cache that it filled.

    `source` "cache": only `serve`, from the recipe's own cache folder; "bundle": from a `bundle` that has been unpacked
    into it.
    """

    source: Literal["cold", "cache", "bundle"] = measurement_option(
        "cold",
        "cold: `warm` with an empty cache folder, then starts of `serve` from it; cache: starts of `serve` from the "
        "folder in --cache-dir; bundle: starts of `serve` from the file in --bundle",
        name="from",
    )
    bundle: str | None = measurement_option(
        None, "With --from bundle: the file, which is unpacked into a temporary folder", metavar="FILE"
    )
    warm_runs: int = measurement_option(2, "Number of starts of `serve`")
    prompt_length: int = measurement_option(128, "Tokens of the first prompt")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.source == "bundle") != (self.bundle is not None):
            raise UsageError("--from bundle and --bundle FILE belong together", "add the other, or remove both")
        check_fields(self, warm_runs=1, prompt_length=128)


def check_fields(settings: Any, **examples: float) -> None:
    """Raises UsageError unless the fields, each given with a valid value, are positive or None."""
    for name, example in examples.items():
        if (value := getattr(settings, name)) is not None:
            check_positive(name.replace("_", " "), value, f"{flag_name(name)} {example}")


def check_positive(name: str, value: float, hint: str) -> None:
    """Raises UsageError, for infinity and NaN too."""
    if not 0 < value < math.inf:
        raise UsageError(f"{name} is {value}, and must be {'finite' if value > 0 else 'above 0'}", hint)


def check_length(name: str, tokens: int, plan: Plan, detail: str = "") -> None:
    if tokens > plan.context:
        raise UsageError(
            f"{name} {detail}is {tokens} tokens, and the context is {plan.context}",
            "use a smaller length, or a larger --context",
        )


def check_files(output: str | None, plot: str | None) -> None:
    """Raises UsageError before a long run rather than after it. Writes nothing; existing files are not touched."""
    if output is not None:
        _check_writable(output, "--output")
    if plot is None:
        return
    if Path(plot).suffix not in PLOT_SUFFIXES:
        raise UsageError(f"{plot} is not a supported plot format", f"use one of {', '.join(PLOT_SUFFIXES)}")
    _check_writable(plot, "--plot")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed", install_command("plot"))


def _check_writable(path: str, flag: str) -> None:
    target = Path(path)
    if target.is_dir():
        raise UsageError(f"{path} is a folder", f"name a file: {flag} {target / 'bench'}")
    folder = target.absolute().parent
    if not os.access(target if target.exists() else folder, os.W_OK):
        fact = "cannot be written" if folder.is_dir() else f"is in a folder that does not exist: {folder}"
        raise UsageError(f"{path} {fact}", f"name another file: {flag} FILE")
