"""Reads a model's generation_config.json: the sampling defaults and end-of-sequence ids that its author suggests.

transformers looks for the file where it looks for config.json, and ignores one that it cannot parse. Here a broken
file is reported, because the model would run with other defaults, and perhaps without its end-of-sequence ids.
A Hub model has no file only if the Hub's cache records that; otherwise the file may exist and was not downloaded.
engine/generation_defaults.py checks the values.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from tcdeploy.models.hub import uses_local_files_only
from tcdeploy.models.load import resolve_model_path


class GenerationConfigFile(NamedTuple):
    """A generation_config.json. `is_downloaded`: False if the Hub's cache does not show whether the model has one."""

    path: str
    values: dict[str, Any]
    problem: str = ""  # why it cannot be used
    is_downloaded: bool = True


def read_generation_config(model: str, revision: str | None) -> GenerationConfigFile | None:
    """The model's file in its folder, or in the Hub's cache after a download; None if it has none."""
    source = resolve_model_path(model)
    path: str | None
    if os.path.isdir(source):
        path = os.path.join(source, GENERATION_CONFIG_NAME)
        if not os.path.lexists(path):
            return None
    else:
        try:
            is_local = uses_local_files_only(source, revision)
            path = cached_file(source, GENERATION_CONFIG_NAME, revision=revision, local_files_only=is_local)
        except OSError:  # the file is missing, or its download failed; transformers' error does not distinguish the two
            path = None
        if path is None:
            # for a recorded absence huggingface_hub returns an object that is neither None nor a path
            cached = try_to_load_from_cache(source, GENERATION_CONFIG_NAME, revision=revision)
            is_absent = cached is not None and not isinstance(cached, str)
            return None if is_absent else GenerationConfigFile(model, {}, is_downloaded=False)
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
