"""Finds a model's weight files, and reads the headers of safetensors and GGUF files.

A header has the name, the dtype and the shape of each tensor, so it is read in milliseconds. Files that transformers
would read incompletely, or not at all, are errors that name the file.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig

from tcdeploy.errors import ModelError
from tcdeploy.models.formats.quantised_weight import QuantisedWeight
from tcdeploy.models.json_files import HINT, LFS_HINT, LFS_POINTER
from tcdeploy.models.load_errors import DOWNLOAD_HINT
from tcdeploy.models.weights.gguf_names import named_tensors
from tcdeploy.models.weights.weight_paths import (
    GGUF_SUFFIX,
    INDEX,
    TORCH_INDEX,
    TORCH_WEIGHTS,
    WEIGHTS,
    gguf_paths,
)

# Files that hold weights in other formats, by suffix.
OTHER_FORMATS = {
    ".gguf": "GGUF", ".ggml": "GGML", ".pth": "PyTorch's .pth", ".onnx": "ONNX", ".nemo": "NeMo",
    ".h5": "TensorFlow's .h5", ".msgpack": "Flax's .msgpack",
}  # fmt: skip
SHARD = re.compile(r"(model|pytorch_model)-\d+-of-\d+\.(safetensors|bin)")
# Files of transformers' distributed checkpoints, which it prefers to all others. Their headers are not those of the
# model's tensors.
DISTRIBUTED = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")
STAND_IN_DTYPE = "F32"  # in the place of quantised weights
FORMAT_HINT = "pass a model in transformers' format, with config.json and safetensors files"


class TensorHeader(NamedTuple):
    """A tensor as a header describes it. dtype: as safetensors names it; in GGUF files, the name of its type."""

    dtype: str
    shape: tuple[int, ...]


class Checkpoint(NamedTuple):
    """The safetensors or GGUF files of a model, and the tensors in their headers, by name.

    quantised: the quantised weights, by the name of the dense weight. `tensors` has stand-ins for them.
    """

    tensors: dict[str, TensorHeader]
    paths: list[Path]
    quantised: Mapping[str, QuantisedWeight] = MappingProxyType({})


def check_format(model: str, names: set[str]) -> None:
    """Raise ModelError for weights that transformers does not read. `names`: of all files of the model.

    No weights at all are an error later, while they are loaded.
    """
    if distributed := sorted(filter(DISTRIBUTED.fullmatch, names)):
        message = f"{model} is a distributed checkpoint ({distributed[0]}), which is not supported"
        raise ModelError(message, "load it with transformers, call save_pretrained(), and pass the new folder")
    if names & {WEIGHTS, INDEX, TORCH_WEIGHTS, TORCH_INDEX}:
        return
    for name in sorted(names):
        if match := SHARD.fullmatch(name):
            index = f"{match[1]}.{match[2]}.index.json"
            raise ModelError(f"{model} has {name}, but not the index {index} of its files", DOWNLOAD_HINT)
    for name in sorted(name for name in names if "/" not in name):
        suffix = Path(name).suffix
        other = "mistral-inference" if name == "consolidated.safetensors" else OTHER_FORMATS.get(suffix)
        if other:
            message = f"{model} has weights in the format {other} ({name}), which is not supported, and no {WEIGHTS}"
            hint = "download the file, and pass its path" if suffix == GGUF_SUFFIX else FORMAT_HINT
            raise ModelError(message, hint)
        if suffix == ".safetensors":
            hint = f"rename it to {WEIGHTS} if its tensors have the names that transformers gives them"
            raise ModelError(f"{model} has {name}, but no {WEIGHTS} and no index", hint)


def explicit_file(model: str, config: PreTrainedConfig) -> str | None:
    """The file that `transformers_weights` in config.json names, which transformers loads instead of WEIGHTS."""
    name = getattr(config, "transformers_weights", None)
    if name is None:
        return None
    is_inside = isinstance(name, str) and not Path(name).is_absolute() and ".." not in Path(name).parts
    if not is_inside or not name.endswith((".safetensors", ".safetensors.index.json")):
        expected = "it must name a safetensors file, or an index of such files, in the folder"
        raise ModelError(f"config.json of {model}: transformers_weights is {name!r:.80}; {expected}", HINT)
    return str(name)


def read_headers(model: str, folder: Path, explicit_name: str | None = None) -> Checkpoint | None:
    """The safetensors or GGUF files in a folder. Raises ModelError for broken files.

    `explicit_name`: as `explicit_file` returns it. None if there are no such files, or not all have been downloaded.
    """
    if paths := gguf_paths(model, folder):
        return Checkpoint(
            {name: TensorHeader(tensor.type.name, tensor.shape) for _, name, tensor in named_tensors(paths)}, paths
        )
    is_local = Path(model).is_dir()
    names = _safetensors_files(folder, explicit_name)
    if names is None:
        if is_local and (folder / TORCH_INDEX).is_file() and not (folder / TORCH_WEIGHTS).is_file():
            for name in _indexed_files(folder / TORCH_INDEX):
                if not (folder / name).is_file():
                    raise ModelError(f"{model} lacks {name}, which its index lists", DOWNLOAD_HINT)
        return None
    tensors: dict[str, TensorHeader] = {}
    files: dict[str, str] = {}
    for name in names:
        try:
            for key, tensor in _read_header(folder / name):
                if key in files:
                    raise ModelError(f"{model} has the tensor {key} in two files: {files[key]}, {name}", DOWNLOAD_HINT)
                tensors[key], files[key] = tensor, name
        except FileNotFoundError:
            if not is_local:  # a download that is running or was interrupted
                return None
            source = "transformers_weights in config.json names" if name == explicit_name else "its index lists"
            raise ModelError(f"{model} lacks {name}, which {source}", DOWNLOAD_HINT) from None
    return Checkpoint(tensors, [folder / name for name in names])


def _safetensors_files(folder: Path, explicit_name: str | None) -> list[str] | None:
    if explicit_name:
        is_index = explicit_name.endswith(".json") and (folder / explicit_name).is_file()
        return _indexed_files(folder / explicit_name) if is_index else [explicit_name]
    if (folder / WEIGHTS).is_file():  # transformers prefers it to an index
        return [WEIGHTS]
    return _indexed_files(folder / INDEX) if (folder / INDEX).is_file() else None


def _read_header(path: Path) -> Iterator[tuple[str, TensorHeader]]:
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                piece = file.get_slice(key)
                yield key, TensorHeader(piece.get_dtype(), tuple(piece.get_shape()))
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError) as error:
        with contextlib.suppress(OSError), path.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER.encode():
                raise ModelError(f"{path} is a Git LFS pointer, not the weights", LFS_HINT) from None
        raise ModelError(f"{path} is damaged: {error}", "download the file again") from None


def _indexed_files(index: Path) -> list[str]:
    try:
        values = json.loads(index.read_bytes())
        names = set(values["weight_map"].values())
        if not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        message = f"{index} is damaged: weight_map must name the file of each tensor"
        raise ModelError(message, "download it again") from None
    if not isinstance(values.get("metadata"), dict):
        message = f"{index} has no metadata, which transformers requires"
        raise ModelError(message, 'download it again, or add "metadata": {}')
    return sorted(names)
