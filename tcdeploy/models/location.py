"""Where a model's files are, and checks of its config.json before transformers reads it. Imports no model library.

transformers' errors name neither the file nor the key. Only values that transformers needs to choose a config class are
checked here; the config class checks the others.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from tcdeploy.errors import ModelError
from tcdeploy.models.gguf.folder import folder_from_metadata
from tcdeploy.models.json_files import HINT, read_json_object
from tcdeploy.models.weights.weight_paths import is_gguf_file

BUILTIN_MODELS = {"builtin:tiny": Path(__file__).parent / "tiny"}


def local_folder(model: str, revision: str | None) -> Path | None:
    """The local folder with a model's config and tokenizer. None for a Hub model of which no config.json is downloaded.

    For a GGUF model without a config.json, the folder is made from the metadata of its file. A Hub model may lack other
    files. Raises ModelError as `folder_from_metadata`.
    """
    if model in BUILTIN_MODELS:
        return BUILTIN_MODELS[model]
    if is_gguf_file(model) or Path(model).is_dir():
        folder = Path(model) if Path(model).is_dir() else Path(model).parent
        return folder if (folder / "config.json").is_file() else folder_from_metadata(model, folder) or folder
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(model, "config.json", revision=revision)
    except ValueError:  # not an id of the Hub; a start with transformers says so
        return None
    return Path(config).parent if isinstance(config, str) else None


def read_config_file(path: Path) -> dict[str, Any]:
    """The content of a config.json. Raises ModelError."""
    values = read_json_object(path)
    expected = {"model_type": str, "auto_map": dict, "quantization_config": dict, "compression_config": dict}
    for name, kind in expected.items():
        if (value := values.get(name)) is not None and not isinstance(value, kind):
            text = "a string" if kind is str else "an object"
            raise ModelError(f"{path}: {name} is {value!r:.80}; it must be {text}", HINT)
    for name, value in (values.get("auto_map") or {}).items():
        for reference in value if isinstance(value, list) else [value]:
            if reference is not None and (not isinstance(reference, str) or "." not in reference):
                raise ModelError(f"{path}: {name} in auto_map is {reference!r:.80}; it must name FILE.CLASS", HINT)
    return values
