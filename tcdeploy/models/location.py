"""Where a model's files are, and checks of its config.json before transformers reads it. Imports no model library.

transformers' errors name neither the file nor the key. Only values that transformers needs to choose a config class are
checked here; the config class checks the others.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from tcdeploy.errors import ModelError

BUILTIN_MODELS = {"builtin:tiny": Path(__file__).parent / "tiny"}
LFS_POINTER = "version https://git-lfs"
LFS_PROBLEM, LFS_HINT = "is a Git LFS pointer, not the file itself", "git lfs pull"
HINT = "download the model again, or correct the file"


def is_gguf_file(model: str) -> bool:
    """Whether a model is a GGUF file. Its folder has the other files of the model."""
    return model.endswith(".gguf") and Path(model).is_file()


def local_folder(model: str, revision: str | None) -> Path | None:
    """The folder of a model's files on this machine; None if there is none.

    A model of the Hub may have been downloaded only in part.
    """
    if model in BUILTIN_MODELS:
        return BUILTIN_MODELS[model]
    if is_gguf_file(model):
        return Path(model).parent
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


def read_json_object(path: Path) -> dict[str, Any]:
    """Raises ModelError."""
    if problem := json_problem(path):
        raise ModelError(f"{path} {problem}", LFS_HINT if problem == LFS_PROBLEM else HINT)
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


def json_problem(path: Path) -> str:
    """Why a file is not a JSON object: a phrase that follows its name; "" if it is one."""
    try:
        text = path.read_text(encoding="utf-8")
        if text.startswith(LFS_POINTER):
            return LFS_PROBLEM
        return "" if isinstance(json.loads(text), dict) else "is not a JSON object"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        return f"is not JSON: {error}" if path.stat().st_size else "is empty"
