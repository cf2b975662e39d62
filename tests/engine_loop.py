"""Runs prompts of token ids on an engine to their end, for tests that compare tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tcdeploy.engine.schedule.sequence import NewToken, SamplingParams

if TYPE_CHECKING:  # imports torch
    from tcdeploy.engine.engine import Engine


def new_tokens(engine: Engine, prompts: Iterable[Iterable[int]], params: SamplingParams) -> list[list[NewToken]]:
    """The new tokens of each prompt, the stop token included. Those of other open requests are dropped."""
    tokens: dict[int, list[NewToken]] = {engine.submit(prompt, params): [] for prompt in prompts}
    while not all(received and received[-1].finish_reason for received in tokens.values()):
        for token in engine.step():
            if token.request_id in tokens:
                tokens[token.request_id].append(token)
    return list(tokens.values())


def generate_tokens(engine: Engine, prompts: Iterable[Iterable[int]], params: SamplingParams) -> list[list[int]]:
    """The ids of `new_tokens`."""
    return [[token.token_id for token in received] for received in new_tokens(engine, prompts, params)]


def generate_despite_failures(
    engine: Engine, prompts: Iterable[Iterable[int]], params: SamplingParams
) -> list[list[int]]:
    """As `generate_tokens`, on an engine some of whose steps raise RuntimeError. No other request may be open."""
    tokens: dict[int, list[int]] = {engine.submit(prompt, params): [] for prompt in prompts}
    while engine.has_work:
        with contextlib.suppress(RuntimeError):
            for token in engine.step():
                tokens[token.request_id].append(token.token_id)
    return list(tokens.values())
