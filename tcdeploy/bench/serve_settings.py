"""Settings of `bench serve`: the load, its limits and its output files. Does not import torch.

A setting that has no effect on the chosen load is an error. With a trace, the file decides what is sent and when.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from tcdeploy.bench.goodput import SLO_METRICS
from tcdeploy.bench.lengths import DISTRIBUTIONS
from tcdeploy.bench.settings import check_arrivals, check_plot, check_positive, check_writable
from tcdeploy.errors import UsageError

LENGTH_FIELDS = ("input_length", "output_length", "length_spread")
TRACED_FIELDS = (
    "requests", "duration", *LENGTH_FIELDS, "lengths", "request_rate", "burstiness", "concurrency", "shared_prefix",
    "prefix_groups", "turns", "think_time", "sweep",
)  # fmt: skip
SWEEP_FIELDS = ("sweep", "plot", "compare", "ttft_limit", "tpot_limit")


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """A load on a server: sessions of `turns` requests, which start at `request_rate` per second or are taken by
    `concurrency` clients if it is not 0. With `turns` 1, a session is a request.

    With `concurrency` 1 the client busy-waits, and needs a core that the server does not use.
    """

    url: str
    label: str | None = None  # None: the model's name
    served_model: str | None = None
    api_key: str | None = None
    requests: int = 100  # sessions, if turns > 1
    duration: float | None = None  # seconds during which requests arrive, instead of `requests`
    input_length: int = 512
    output_length: int = 128
    length_spread: float = 0.0  # lengths are uniform within this share of the two above
    lengths: str = "uniform"
    request_rate: float = math.inf
    burstiness: float = 1.0
    concurrency: int = 0
    shared_prefix: int = 0  # tokens before those of input_length
    prefix_groups: int = 1
    turns: int = 1
    think_time: float = 0.0  # seconds
    trace: str | None = None
    sweep: tuple[float, ...] = ()  # request rates
    ttft_limit: float = 500.0  # ms, of the 99th percentile
    tpot_limit: float = 20.0  # ms, of the mean
    slo: dict[str, float] = field(default_factory=dict)  # limit in ms by metric
    plot: str | None = None
    compare: tuple[str, ...] = ()  # JSON documents of earlier sweeps
    output: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "input_length", "output_length", "burstiness", "prefix_groups", "turns"):
            check_positive(name.replace("_", " "), getattr(self, name), f"--{name.replace('_', '-')} 1")
        for name in ("ttft_limit", "tpot_limit"):
            check_positive(name.replace("_", " "), getattr(self, name), f"--{name.replace('_', '-')} 100 (ms)")
        for name in ("shared_prefix", "think_time"):
            if getattr(self, name) < 0:
                raise UsageError(
                    f"{name.replace('_', ' ')} is {getattr(self, name)}, and must not be negative",
                    f"--{name.replace('_', '-')} 0",
                )
        for name in ("burstiness", "ttft_limit", "tpot_limit", "think_time", "duration"):
            _check_finite(name.replace("_", " "), getattr(self, name) or 0.0)
        check_arrivals(self.request_rate, self.concurrency)
        self._check_lengths()
        self._check_sweep()
        self._check_unused()
        self._check_files()

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    @property
    def num_sessions(self) -> int:
        """`requests`, or as many as arrive in `duration` on average."""
        return self.requests if self.duration is None else max(1, round(self.request_rate * self.duration))

    def at_rate(self, request_rate: float) -> ServeSettings:
        """The load of one rate of the sweep."""
        return dataclasses.replace(self, request_rate=request_rate, **{name: _DEFAULTS[name] for name in SWEEP_FIELDS})

    def _check_lengths(self) -> None:
        if self.lengths not in DISTRIBUTIONS:
            raise UsageError(f"unknown lengths {self.lengths!r}", f"--lengths {'|'.join(DISTRIBUTIONS)}")
        if not 0 <= self.length_spread < 1:
            raise UsageError(
                f"length spread is {self.length_spread}, and must be at least 0 and below 1", "--length-spread 0.5"
            )

    def _check_sweep(self) -> None:
        for rate in self.sweep:
            check_arrivals(rate, 0)
            _check_finite("a rate of --sweep", rate)
        for name, limit in self.slo.items():
            if name not in SLO_METRICS:
                raise UsageError(f"unknown metric {name!r} in --slo", f"use {', '.join(SLO_METRICS)}")
            check_positive(f"the limit of {name}", limit, f"--slo {name}=200 (ms)")
            _check_finite(f"the limit of {name}", limit)

    def _check_unused(self) -> None:
        if self.trace is not None:
            self._refuse("--trace", *TRACED_FIELDS)
        if self.sweep:
            self._refuse("--sweep", "request_rate", "concurrency")
        else:
            self._refuse_without("--sweep", *SWEEP_FIELDS)
            if math.isinf(self.request_rate):
                self._refuse_without("--request-rate", "burstiness", "duration")
        if self.duration is not None:
            check_positive("duration", self.duration, "--duration 30 (s)")
            self._refuse("--duration", "requests")
        if self.lengths != "uniform":
            self._refuse(f"--lengths {self.lengths}", *LENGTH_FIELDS)
        if not self.shared_prefix:
            self._refuse_without("--shared-prefix", "prefix_groups")
        if self.turns == 1:
            self._refuse_without("--turns", "think_time")
        if self.plot is None:
            self._refuse_without("--plot", "compare")

    def _refuse(self, option: str, *names: str) -> None:
        for flag in self._set_flags(names):
            raise UsageError(f"{flag} has no effect with {option}", "remove one of the two")

    def _refuse_without(self, option: str, *names: str) -> None:
        for flag in self._set_flags(names):
            raise UsageError(f"{flag} has no effect without {option}", f"add {option}, or remove {flag}")

    def _set_flags(self, names: tuple[str, ...]) -> list[str]:
        """The flags of those fields that differ from their defaults."""
        return [f"--{name.replace('_', '-')}" for name in names if getattr(self, name) != _DEFAULTS[name]]

    def _check_files(self) -> None:
        if self.output is not None:
            check_writable(self.output, "--output")
        if self.plot is not None:
            check_plot(self.plot)


def _check_finite(name: str, value: float) -> None:
    """Raises UsageError, for NaN too."""
    if not math.isfinite(value):
        raise UsageError(f"{name} is {value}, and must be finite", "use a number, such as 10")


_DEFAULTS: dict[str, Any] = {item.name: item.default for item in dataclasses.fields(ServeSettings)}
