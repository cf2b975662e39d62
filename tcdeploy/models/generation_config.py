"""Reads a model's generation_config.json: the sampling defaults and end-of-sequence ids that its author suggests.

transformers looks for the file where it looks for config.json, and ignores one that it cannot parse. Here a broken
file is reported, because the model would run with other defaults, and perhaps without its end-of-sequence ids.
engine/generation_defaults.py checks the values.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from tcdeploy.models.load import resolve_model_path


class GenerationConfigFile(NamedTuple):
    """The path and content of a generation_config.json. `problem`: why it cannot be used, or ""."""

    path: str
    values: dict[str, Any]
    problem: str = ""


def read_generation_config(model: str, revision: str | None) -> GenerationConfigFile | None:
    """The model's file, or None if it has none."""
    path = _find(resolve_model_path(model), revision)
    if path is None:
        return None
    try:
        values = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        return GenerationConfigFile(path, {}, f"cannot be read: {error}")
    if not isinstance(values, dict):
        return GenerationConfigFile(path, {}, "is not a JSON object")
    return GenerationConfigFile(path, values)


def config_stop_token_ids(config: PreTrainedConfig) -> Any:
    """`eos_token_id` of config.json, of the text model if the model has several parts: an id, a list of ids or None."""
    ids = getattr(config, "eos_token_id", None)
    return getattr(config.get_text_config(), "eos_token_id", None) if ids is None else ids


def _find(path: str, revision: str | None) -> str | None:
    """The file in a folder, or in the Hub's cache after a download."""
    if os.path.isdir(path):
        file = os.path.join(path, GENERATION_CONFIG_NAME)
        return file if os.path.lexists(file) else None
    try:
        return cached_file(path, GENERATION_CONFIG_NAME, revision=revision)
    except OSError:  # the file is missing, or its download failed; transformers' error does not distinguish the two
        return None
