"""Checks a model's files before its weights are loaded: formats, quantisation, adapters, and tensor names and shapes.

transformers loads the tensors that it knows and ignores the others, such as the scales of quantised weights, a bias
that the config does not announce, or an adapter. Such a model would start, pass the parity check (which compares it
with the same weights), and generate wrong text. It is refused here instead. Only the headers of safetensors files are
read.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub import HfApi, try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig

from tcdeploy.errors import ModelError, UnsupportedModelError
from tcdeploy.torch_compat import fake_tensors

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
QUANTISATION_FILES = {  # written by quantisers beside config.json, which may not mention them
    "hf_quant_config.json": "TensorRT Model Optimizer",
    "quantize_config.json": "AutoGPTQ",
    "quant_config.json": "AutoAWQ",
}
DEQUANTISED_METHODS = {"mxfp4"}  # transformers converts these to the plan's dtype if its kernels are not installed
QUANTISED_SUFFIXES = ("weight_scale", "weight_scale_inv", "weight_packed", "qweight", "SCB", "weight.absmax")
QUANTISED_DTYPES = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4")  # as safetensors names them
INTEGER_DTYPES = ("I8", "U8", "I16", "I32")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NOT_QUANTISED_HINT = "use the original model in bfloat16, or dequantise the weights first"
# Files that hold weights in other formats, by suffix.
OTHER_FORMATS = {".gguf": "GGUF", ".ggml": "GGML", ".pth": "PyTorch's .pth", ".onnx": "ONNX", ".nemo": "NeMo"}


class Tensor(NamedTuple):
    """A tensor as a safetensors header describes it."""

    dtype: str
    shape: tuple[int, ...]


def check_path(model: str) -> None:
    """Refuse a file, and a folder without config.json that holds something else than a transformers model."""
    path = Path(model)
    if path.suffix == ".gguf":
        raise ModelError(f"{model} is a GGUF file, which is not supported", "pass the folder of the safetensors model")
    if path.is_file():
        raise ModelError(f"{model} is a file, not a model folder", "pass the folder that contains config.json")
    if not path.is_dir() or (path / "config.json").is_file():
        return
    if (path / ADAPTER_CONFIG).is_file():
        raise _adapter_error(model, path / ADAPTER_CONFIG)
    suffixes = {item.suffix for item in path.iterdir()} & OTHER_FORMATS.keys()
    if suffixes:
        names = ", ".join(OTHER_FORMATS[suffix] for suffix in sorted(suffixes))
        raise ModelError(
            f"folder {model} has weights in the format {names}, which is not supported, and no config.json",
            "pass a folder in transformers' format, with config.json and safetensors files",
        )


def check_files(model: str, revision: str | None, config: PreTrainedConfig) -> None:
    """Raise UnsupportedModelError for an adapter, and for quantised weights. Needs no weights.

    `model`: a folder or Hub id whose config has been loaded.
    """
    folder = model_folder(model, revision)
    names = _file_names(model, revision, folder)
    if ADAPTER_CONFIG in names:
        raise _adapter_error(model, folder / ADAPTER_CONFIG if folder else None)
    if method := _quantisation_method(config):
        if method not in DEQUANTISED_METHODS:
            raise UnsupportedModelError(
                f"{model} is quantised with {method}, which is not supported yet", NOT_QUANTISED_HINT
            )
    elif found := sorted(QUANTISATION_FILES.keys() & names):
        tool = QUANTISATION_FILES[found[0]]
        raise UnsupportedModelError(
            f"{model} is quantised with {tool} (it has {found[0]}), which is not supported yet", NOT_QUANTISED_HINT
        )


def check_tensors(model: str, revision: str | None, config: PreTrainedConfig, class_name: str) -> None:
    """Compare the tensors in the safetensors headers with those of the model.

    `class_name`: of the model in transformers. Does nothing if the files have not been downloaded, or are not
    safetensors; then load.py checks the tensors while it loads them. Raises ModelError and UnsupportedModelError.
    """
    model_class = getattr(transformers, class_name, None)  # None for a class from the model's repository
    folder = model_folder(model, revision)
    if model_class is None or folder is None or _quantisation_method(config) or not fake_tensors.supported():
        return
    tensors = read_headers(model, folder)
    if tensors is None:
        return
    check_not_quantised(model, tensors)
    stored = {name: (tensor.shape, DTYPES.get(tensor.dtype, torch.float32)) for name, tensor in tensors.items()}
    with fake_tensors.fake_tensors(), torch.no_grad(), _sequential_loading():
        state_dict = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in stored.items()}
        _, report = model_class.from_pretrained(
            None,
            config=copy.deepcopy(config),
            state_dict=state_dict,
            dtype=torch.bfloat16,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    check_loading_report(model, report)


def check_not_quantised(model: str, tensors: dict[str, Tensor]) -> None:
    """Recognise quantised weights by the dtypes and names of their tensors."""
    for name, tensor in tensors.items():
        has_integers = tensor.dtype in INTEGER_DTYPES and name.endswith("weight")
        if has_integers or tensor.dtype in QUANTISED_DTYPES or name.endswith(QUANTISED_SUFFIXES):
            raise UnsupportedModelError(
                f"{model} has quantised weights, which are not supported yet: {name} has the dtype {tensor.dtype}",
                NOT_QUANTISED_HINT,
            )


def check_loading_report(model: str, report: dict[str, Any]) -> None:
    """Raise ModelError if tensors are missing, have another shape, or are not used by the model.

    `report`: as transformers returns it with `output_loading_info`. Tensors that the model's class declares ignorable
    are not in it.
    """
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"the checkpoint of {model} lacks {len(missing)} of the model's tensors: {_first(missing)}",
            "download it again; transformers would have used random weights for them",
        )
    if mismatched := sorted(_describe_mismatch(*item) for item in report["mismatched_keys"]):
        raise ModelError(
            f"{len(mismatched)} tensors of {model} do not have the shape of its config.json: {_first(mismatched)}",
            "use the config.json that belongs to these weights",
        )
    if unexpected := sorted(report["unexpected_keys"]):
        raise ModelError(
            f"the checkpoint of {model} has {len(unexpected)} tensors that its config.json does not need: "
            f"{_first(unexpected)}",
            "use the config.json that belongs to these weights; transformers would have ignored the tensors",
        )


def _describe_mismatch(name: str, stored: Any, expected: Any) -> str:
    return f"{name} ({list(stored)} instead of {list(expected)})"


def _first(names: list[str]) -> str:
    return ", ".join(names[:3])


def model_folder(model: str, revision: str | None) -> Path | None:
    """The folder of a local model, or of a Hub id's downloaded files; None if there is none."""
    if Path(model).is_dir():
        return Path(model)
    config = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(config).parent if isinstance(config, str) else None


def _file_names(model: str, revision: str | None, folder: Path | None) -> set[str]:
    """Names of the model's files; of those that have been downloaded if the Hub cannot be reached."""
    if not Path(model).is_dir():
        with contextlib.suppress(Exception):  # huggingface_hub raises many types without a network
            return set(HfApi().list_repo_files(model, revision=revision))
    return {item.name for item in folder.iterdir()} if folder else set()


def read_headers(model: str, folder: Path) -> dict[str, Tensor] | None:
    """The tensors in a folder's safetensors files, by name; None if it has none. Raises ModelError for broken files."""
    if (folder / INDEX).is_file():
        names = _indexed_files(model, folder)
    elif (folder / WEIGHTS).is_file():
        names = [WEIGHTS]
    else:
        return None
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - not a dict
                    piece = file.get_slice(key)
                    tensors[key] = Tensor(piece.get_dtype(), tuple(piece.get_shape()))
        except FileNotFoundError:
            raise ModelError(
                f"{model} lacks {name}, which its index lists", "download the model again, with all its files"
            ) from None
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{folder / name} is damaged: {error}", "download the file again") from None
    return tensors


def _indexed_files(model: str, folder: Path) -> list[str]:
    try:
        names = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
        if all(isinstance(name, str) and Path(name).name == name for name in names):
            return sorted(names)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise ModelError(f"{folder / INDEX} is damaged: weight_map must name the file of each tensor", "download it again")


def _quantisation_method(config: PreTrainedConfig) -> str | None:
    """The quantisation method that the config or its text config names."""
    for part in (config, config.get_text_config()):
        for name in ("quantization_config", "compression_config"):
            if settings := getattr(part, name, None):
                values = settings if isinstance(settings, dict) else settings.to_dict()
                method = values.get("quant_method") or values.get("quant_algo") or "an unknown method"
                return str(getattr(method, "value", method))
    return None


def _adapter_error(model: str, path: Path | None) -> UnsupportedModelError:
    base = ""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        name = json.loads(path.read_bytes()).get("base_model_name_or_path") if path else None
        base = f" for {name}" if name else ""
    return UnsupportedModelError(
        f"{model} contains a PEFT adapter{base}, which is not supported",
        "merge it into the base model with PEFT's merge_and_unload(), save that, and pass the new folder",
    )


@contextlib.contextmanager
def _sequential_loading() -> Iterator[None]:
    """Make transformers load tensors in one thread: fake tensors cannot be used in several."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    earlier = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if earlier is None:
            del os.environ[name]
        else:
            os.environ[name] = earlier
