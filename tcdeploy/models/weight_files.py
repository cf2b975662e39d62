"""Finds a model's weight files as transformers does, and reads the headers of safetensors files.

A header has the name, the dtype and the shape of each tensor, so it is read in milliseconds. Files that transformers
would read incompletely, or not at all, are errors that name the file.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig

from tcdeploy.errors import ModelError
from tcdeploy.models.config_file import HINT, LFS_HINT, LFS_POINTER
from tcdeploy.models.quantisation import Tensor

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DOWNLOAD_HINT = "download the model again, with all its files"


def explicit_file(model: str, config: PreTrainedConfig) -> str | None:
    """The file that `transformers_weights` in config.json names, which transformers loads instead of WEIGHTS."""
    name = getattr(config, "transformers_weights", None)
    if name is None:
        return None
    is_inside = isinstance(name, str) and not Path(name).is_absolute() and ".." not in Path(name).parts
    if not is_inside or not name.endswith((".safetensors", ".safetensors.index.json")):
        raise ModelError(
            f"config.json of {model}: transformers_weights is {name!r:.80}; it must name a safetensors file, or an "
            "index of such files, in the folder",
            HINT,
        )
    return str(name)


def read_headers(model: str, folder: Path, explicit_name: str | None = None) -> dict[str, Tensor] | None:
    """The tensors in a folder's safetensors files, by name. Raises ModelError for broken files.

    `explicit_name`: as `explicit_file` returns it. None if the folder has no such files, or not all files of a Hub
    model have been downloaded.
    """
    names = _safetensors_files(folder, explicit_name)
    if names is None:
        return None
    tensors: dict[str, Tensor] = {}
    files: dict[str, str] = {}
    for name in names:
        try:
            for key, tensor in _read_header(folder / name):
                if key in files:
                    raise ModelError(f"{model} has the tensor {key} in two files: {files[key]}, {name}", DOWNLOAD_HINT)
                tensors[key], files[key] = tensor, name
        except FileNotFoundError:
            if not Path(model).is_dir():  # a download that is running or was interrupted
                return None
            source = "transformers_weights in config.json names" if name == explicit_name else "its index lists"
            raise ModelError(f"{model} lacks {name}, which {source}", DOWNLOAD_HINT) from None
    return tensors


def _safetensors_files(folder: Path, explicit_name: str | None) -> list[str] | None:
    if explicit_name and (not explicit_name.endswith(".json") or not (folder / explicit_name).is_file()):
        return [explicit_name]
    if explicit_name:
        return _indexed_files(folder / explicit_name)
    if (folder / WEIGHTS).is_file():  # transformers prefers it to an index
        return [WEIGHTS]
    return _indexed_files(folder / INDEX) if (folder / INDEX).is_file() else None


def _read_header(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                piece = file.get_slice(key)
                yield key, Tensor(piece.get_dtype(), tuple(piece.get_shape()))
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError) as error:
        if _is_lfs_pointer(path):
            raise ModelError(f"{path} is a Git LFS pointer, not the weights", LFS_HINT) from None
        raise ModelError(f"{path} is damaged: {error}", "download the file again") from None


def _is_lfs_pointer(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(len(LFS_POINTER)) == LFS_POINTER.encode()
    return False


def _indexed_files(index: Path) -> list[str]:
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        if all(isinstance(name, str) and Path(name).name == name for name in names):
            return sorted(names)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise ModelError(f"{index} is damaged: weight_map must name the file of each tensor", "download it again")
