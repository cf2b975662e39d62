"""Where a model's files are: a local folder, a builtin model, or the Hub's cache. Imports no model library."""

from __future__ import annotations

import importlib.util
from pathlib import Path

BUILTIN_MODELS = {"builtin:tiny": Path(__file__).parent / "tiny"}


def local_folder(model: str, revision: str | None) -> Path | None:
    """The folder of a model's files on this machine; None if there is none.

    A model of the Hub may have been downloaded only in part.
    """
    if model in BUILTIN_MODELS:
        return BUILTIN_MODELS[model]
    if Path(model).is_dir():
        return Path(model)
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(model, "config.json", revision=revision)
    except ValueError:  # not an id of the Hub; a start with transformers says so
        return None
    return Path(config).parent if isinstance(config, str) else None
