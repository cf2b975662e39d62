"""Runs the checks of one client, and prints a JSON line for each: its feature, and the error if it failed.

Usage of each file in this folder: FILE BASE_URL MODEL_FOLDER, in an environment with the client's package. The model
is served under the name `tiny`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

MODEL = "tiny"
URL, MODEL_FOLDER = sys.argv[1:3]
QUESTION = "What is a list?"
LONG_TEXT = "long " * 3000  # beyond the context
CLOCK_SCHEMA = {
    "type": "object",
    "properties": {"utc": {"type": "boolean"}},
    "required": ["utc"],
    "additionalProperties": False,
}
_checks: list[tuple[str, Callable[[], None]]] = []


def check(feature: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Registers a function that raises an exception if the feature does not work."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        _checks.append((feature, function))
        return function

    return register


def run_checks() -> None:
    for feature, function in _checks:
        error = ""
        try:
            function()
        except Exception as exception:
            error = f"{type(exception).__name__}: {exception}"
        print(json.dumps({"feature": feature, "error": error}), flush=True)
