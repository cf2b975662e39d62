"""Settings of `bench quality`, of which `compile` has those of the text. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from tcdeploy.bench.settings import check_files, check_length, json_copy, measurement_option
from tcdeploy.errors import UsageError
from tcdeploy.planning.option import flag_name
from tcdeploy.planning.plan import Plan

MIN_TOKENS = 2  # of a window and of a text: the first token is not scored


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """`window` None: `DEFAULT_WINDOW`, or the smallest context if that is less."""

    DEFAULT_WINDOW = 2048
    text: str | None = measurement_option(None, "Measure the perplexity on this UTF-8 text file", metavar="FILE")
    against: str | None = measurement_option(
        None,
        "With --text: also measure the KL divergence from this model, such as the 16-bit one from which MODEL was "
        "quantised, and how often both have the same most likely token",
        metavar="MODEL",
    )
    tokens: int = measurement_option(65_536, "Most tokens of the text that are used")
    window: int | None = measurement_option(
        None,
        f"Tokens per window, of which all but the first are scored [default: {DEFAULT_WINDOW}, or the context if less]",
    )

    def __post_init__(self) -> None:
        for name in ("tokens", "window"):
            value = getattr(self, name)
            if value is not None and value < MIN_TOKENS:
                flag = flag_name(name)
                raise UsageError(f"{flag} is {value}; it must be {MIN_TOKENS} or more", f"{flag} {self.DEFAULT_WINDOW}")
        if self.against is not None and self.text is None:
            raise UsageError("--against needs --text", "add --text FILE, or remove --against")

    def check_against_plan(self, plan: Plan) -> None:
        if self.window is not None:
            check_length(f"--window for {plan.model}", self.window, plan)

    def window_within(self, *contexts: int) -> int:
        return self.window or min(self.DEFAULT_WINDOW, *contexts)


@dataclass(frozen=True, kw_only=True)
class QualitySettings(TextSettings):
    output: str | None = json_copy()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text is None:
            raise UsageError("--text is missing", "name a text file: --text FILE")
        check_files(self.output, None)
