"""Finds the weight files in a model's folder. Imports neither torch nor a model library.

safetensors files are chosen as transformers chooses them. A GGUF model is used if the user passes one of its files, or
if it is the only one in the folder and there are no other weights.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from tcdeploy.errors import ModelError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TORCH_WEIGHTS, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
GGUF_SUFFIX = ".gguf"
GGUF_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
PROJECTOR_PREFIX = "mmproj"  # of files with the image encoder of a model


def weight_files(model: str, folder: Path) -> list[Path]:
    """The GGUF or safetensors files of a model that a start reads itself; [] if transformers reads others.

    folder: that of the model's files. Raises ModelError as `gguf_paths`.
    """
    if paths := gguf_paths(model, folder):
        return paths
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    try:
        indexed = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
        return [folder / name for name in sorted(indexed) if Path(name).name == name]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


def is_gguf_file(model: str) -> bool:
    """Whether a model is a GGUF file. Its folder may have other files of the model."""
    return model.endswith(GGUF_SUFFIX) and Path(model).is_file()


def gguf_paths(model: str, folder: Path) -> list[Path]:
    """The GGUF files that a model consists of, in order; [] if its weights are not GGUF.

    model: a GGUF file, a folder, or the builtin model or Hub id whose files are in `folder`. Raises ModelError if a
    folder has several models.
    """
    if is_gguf_file(model):
        return [Path(model).with_name(name) for name in _parts(Path(model).name)]
    folder = Path(model) if Path(model).is_dir() else folder
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if names & {TORCH_WEIGHTS, TORCH_INDEX} or any(".safetensors" in name for name in names):
        return []
    files = (name for name in names if name.endswith(GGUF_SUFFIX) and not name.startswith(PROJECTOR_PREFIX))
    models = sorted({tuple(_parts(name)) for name in files})
    if len(models) > 1:
        listed = ", ".join(parts[0] for parts in models)
        raise ModelError(f"{model} has several GGUF models: {listed}", f"pass one of them: {folder / models[0][0]}")
    return [folder / name for name in models[0]] if models else []


def _parts(name: str) -> list[str]:
    """The names of all files of the model to which this file belongs."""
    if match := GGUF_SHARD.fullmatch(name):
        return [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]
    return [name]
