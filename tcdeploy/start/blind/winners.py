"""Reads the autotuner results of Inductor that `--winners` passes to a build without the GPU. Does not import torch."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from tcdeploy.cache.files.records import WINNER_SUFFIX
from tcdeploy.errors import IntegrityError, MismatchError

WINNER_HASHES = ("configs_hash", "triton_cache_hash")  # the fields of an autotuner result that are text


def measured_winners(folder: Path) -> list[Path]:
    """The autotuner results in a folder that were measured: the others have a negative time.

    Raises IntegrityError for a file that is not such a result, and MismatchError if none was measured.
    """
    measured = [path for path in folder.rglob(f"*{WINNER_SUFFIX}") if _read_winner(path).get("time_taken_ms", 0) >= 0]
    if not measured:
        raise MismatchError(
            "--winners contains no measured kernel configuration",
            "pass a bundle or cache folder that was warmed on this GPU model without --target-gpu, or remove --winners",
        )
    return measured


def _read_winner(path: Path) -> dict[str, Any]:
    """A result of the autotuner: numbers by name, and hashes.

    Inductor writes the values of a result into the source code of launchers, where other text could be code.
    """
    with contextlib.suppress(ValueError, RecursionError):
        result = json.loads(path.read_bytes())
        if isinstance(result, dict) and all(_is_winner_field(name, value) for name, value in result.items()):
            return result
    raise IntegrityError(
        f"the autotuner result {path.name} of --winners does not consist of numbers and hashes",
        "remove --winners, or pass a bundle or a cache folder from a source that you trust",
    )


def _is_winner_field(name: str, value: object) -> bool:
    if name in WINNER_HASHES:
        return value is None or (isinstance(value, str) and re.fullmatch("[0-9A-Za-z]+", value) is not None)
    return name.isidentifier() and isinstance(value, int | float)  # bool is int
