"""Settings of `bench serve`: the load, its limits and its output files. Does not import torch.

A setting that has no effect on the chosen load is an error. With a trace, the file decides what is sent and when.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tcdeploy.bench.settings import (
    LoadSettings,
    check_fields,
    check_files,
    check_positive,
    json_copy,
    measurement_option,
    output_option,
    parse_list,
    random_seed,
)
from tcdeploy.bench.stats import SLO_METRICS, parse_slo
from tcdeploy.errors import UsageError
from tcdeploy.planning.option import Option, flag_name, option

LOAD_FIELDS = (  # of loads that are not a trace
    "requests", "duration", "input_length", "output_length", "length_spread", "request_rate", "concurrency",
    "shared_prefix", "sweep",
)  # fmt: skip
SWEEP_FIELDS = ("sweep", "plot", "compare", "ttft_limit", "tpot_limit")
SAMPLING: dict[str, dict[str, float]] = {  # sampling parameters of the requests, by the name that --sampling accepts
    # All are sent that a model's generation_config.json may set.
    "random": {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1},
    "greedy": {"temperature": 0, "repetition_penalty": 1},
    "penalties": {
        "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1, "presence_penalty": 1.5,
        "frequency_penalty": 0.1,
    },
    "model": {},
}  # fmt: skip
SLO_OPTION = Option(
    f"Report the requests that meet these limits in ms, of {', '.join(SLO_METRICS)}: ttft=200,itl=50",
    "Measurement", metavar="LIST", parse=parse_slo,
)  # fmt: skip
server_option = partial(option, panel="Server")


@dataclass(frozen=True, kw_only=True)
class ServeSettings(LoadSettings):
    """A load on a server. With `concurrency` 1 the client busy-waits, and needs a core that the server does not use."""

    url: str = server_option(
        "http://127.0.0.1:8000", "Base URL of the server, without /v1", parse=lambda text: text.rstrip("/")
    )
    served_model: str | None = server_option(
        None, "Model name in the requests [default: the first that the server lists]", metavar="NAME"
    )
    api_key: str | None = server_option(  # the variable may have several keys for `serve`
        None, "API key, sent as a bearer token", has_variable=True, parse=lambda text: next(iter(text.split()), None)
    )
    label: str | None = server_option(
        None, "Name of the server in table and plot [default: the model name]", metavar="NAME"
    )
    requests: int = measurement_option(100, "Number of requests")
    duration: float | None = measurement_option(
        None, "Seconds during which requests arrive at the request rate, instead of --requests"
    )
    length_spread: float = measurement_option(0.0, "Lengths are uniform within this share of both lengths; 0.5: +-50%")
    sampling: str = measurement_option(
        "random", "random: temperature 1; greedy: temperature 0; penalties: all three, with temperature 0.7, top-p 0.8 "
        "and top-k 20; model: the server's defaults for the model",
        metavar="|".join(SAMPLING),
    )  # fmt: skip
    shared_prefix: int = measurement_option(0, "Tokens that all prompts share, before those of --input-length")
    trace: str | None = measurement_option(
        None,
        "Send the requests of a JSONL file with timestamp (s), input_length and output_length per line",
        metavar="FILE",
    )
    slo: dict[str, float] = field(default_factory=dict, metadata={"option": SLO_OPTION})
    sweep: tuple[float, ...] = measurement_option(
        (),
        "Run the load at each of these request rates: 4,8,12",
        metavar="LIST",
        parse=partial(parse_list, "--sweep", float, "numbers", "4,8"),
    )
    ttft_limit: float = measurement_option(500.0, "With --sweep: limit of the 99th percentile of the first token, ms")
    tpot_limit: float = measurement_option(20.0, "With --sweep: limit of the mean time per token, ms")
    plot: str | None = output_option(None, "With --sweep: plot latency over rate to this .png, .svg or .pdf file")
    compare: tuple[str, ...] = output_option(
        (), "Add the JSON document of an earlier sweep to the plot; may be repeated"
    )
    output: str | None = json_copy()
    seed: int = random_seed()

    def __post_init__(self) -> None:
        self.check_load()
        check_fields(self, requests=100, duration=30, ttft_limit=500, tpot_limit=20)
        if self.shared_prefix < 0:
            raise UsageError(f"shared prefix is {self.shared_prefix}, and must not be negative", "--shared-prefix 0")
        if self.sampling not in SAMPLING:
            raise UsageError(f"unknown --sampling {self.sampling!r}", f"use {', '.join(SAMPLING)}")
        if not 0 <= self.length_spread < 1:
            raise UsageError(
                f"length spread is {self.length_spread}, and must be at least 0 and below 1", "--length-spread 0.5"
            )
        for rate in self.sweep:
            check_positive("a rate of --sweep", rate, "--sweep 4,8 (requests per second)")
        for name, limit in self.slo.items():
            if name not in SLO_METRICS:
                raise UsageError(f"unknown metric {name!r} in --slo", f"use {', '.join(SLO_METRICS)}")
            check_positive(f"the limit of {name}", limit, f"--slo {name}=200 (ms)")
        self._check_unused()
        check_files(self.output, self.plot)

    @property
    def num_requests(self) -> int:
        """`requests`, or as many as arrive in `duration` on average."""
        return self.requests if self.duration is None else max(1, round(self.request_rate * self.duration))

    def at_rate(self, request_rate: float) -> ServeSettings:
        """The load of one rate of the sweep."""
        return dataclasses.replace(self, request_rate=request_rate, **{name: _DEFAULTS[name] for name in SWEEP_FIELDS})

    def _check_unused(self) -> None:
        """Raises UsageError for an option that has no effect with another one, or without it."""
        has_rate = bool(self.sweep) or not math.isinf(self.request_rate)
        for option_name, is_set, excluded, dependent in (
            ("--trace", self.trace is not None, LOAD_FIELDS, ()),
            ("--sweep", bool(self.sweep), ("request_rate", "concurrency"), SWEEP_FIELDS),
            ("--request-rate", has_rate, (), ("duration",)),
            ("--duration", self.duration is not None, ("requests",), ()),
            ("--plot", self.plot is not None, (), ("compare",)),
        ):
            for name in excluded if is_set else dependent:
                if getattr(self, name) != _DEFAULTS[name]:
                    flag = flag_name(name)
                    if is_set:
                        raise UsageError(f"{flag} has no effect with {option_name}", "remove one of the two")
                    message = f"{flag} has no effect without {option_name}"
                    raise UsageError(message, f"add {option_name}, or remove {flag}")


_DEFAULTS: dict[str, Any] = {item.name: item.default for item in dataclasses.fields(ServeSettings)}
