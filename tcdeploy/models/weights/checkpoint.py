"""Checks a model's files before its weights are loaded: formats, quantisation, adapters, and tensor names and shapes.

transformers ignores tensors that it does not know, such as the scales of quantised weights, or a bias that the config
does not declare. Such a model would start, pass the parity check (which compares it with the same weights), and
generate wrong text. Only the headers of safetensors and GGUF files are read.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from tcdeploy.errors import ModelError, UnsupportedModelError
from tcdeploy.models.auto_classes import check_task, model_class
from tcdeploy.models.convert.quantised_weights import check_not_quantised
from tcdeploy.models.formats.gguf_config import describe_gguf
from tcdeploy.models.formats.methods import check_method, quantisation_settings
from tcdeploy.models.hub import uses_local_files_only
from tcdeploy.models.json_files import HINT, read_json_object
from tcdeploy.models.load_errors import DOWNLOAD_HINT
from tcdeploy.models.location import local_folder
from tcdeploy.models.refusals import Refusals
from tcdeploy.models.weights.files import (
    FORMAT_HINT,
    OTHER_FORMATS,
    Checkpoint,
    TensorHeader,
    check_format,
    explicit_file,
    read_headers,
)
from tcdeploy.models.weights.tensor_names import check_experts, first_names, text_depends_on
from tcdeploy.models.weights.weight_paths import GGUF_SUFFIX, gguf_paths, is_gguf_file

MODEL_OPTIMIZER_FILE = "hf_quant_config.json"  # of TensorRT Model Optimizer; config.json may not mention it
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", {"adapter_model.safetensors", "adapter_model.bin"}
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
HUB_TIMEOUT_S = 10
GGUF_HINT = "download one of its GGUF files (hf download REPO FILE --local-dir FOLDER), and pass its path"
SAFETENSORS_PATTERNS = ("model*.safetensors", "model.safetensors.index.json")


def tensor_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes in a model's state dict, by name."""
    state = model.state_dict(keep_vars=True)  # some modules add objects other than tensors
    return {name: tuple(tensor.shape) for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}


def check_path(model: str) -> None:
    """Refuse a file, and a folder that contains an adapter or weights in another format instead of a config.json."""
    path = Path(model)
    if is_gguf_file(model):
        return
    if path.is_file():
        raise ModelError(f"{model} is a file, not a model folder", "pass the folder that contains config.json")
    if path.is_dir() and not (path / "config.json").is_file():
        with contextlib.suppress(OSError):  # unreadable; reported as a folder without config.json
            if not gguf_paths(model, path):
                _check_formats(f"folder {model}", {item.name for item in path.iterdir()}, path)


def check_repository(model: str, revision: str | None) -> None:
    """Refuse a Hub repository without config.json, by what it contains instead. `load_config` has failed for it."""
    config = huggingface_hub.try_to_load_from_cache(model, "config.json", revision=revision)
    # only the cache's "no such file" entry proves that the repository lacks a config.json
    if config is None or isinstance(config, str):
        return
    adapter_config = _path_of(ADAPTER_CONFIG, model, revision, None)
    folder = adapter_config.parent if adapter_config else None
    _check_formats(model, _file_names(model, revision, folder), folder)
    raise ModelError(f"{model} has no config.json on the hub", FORMAT_HINT)


def _check_formats(model: str, names: set[str], folder: Path | None) -> None:
    """Refuse an adapter, and weights in another format, of a model without config.json."""
    if ADAPTER_CONFIG in names:
        raise _adapter_error(model, folder)
    if formats := {OTHER_FORMATS[suffix] for name in names if (suffix := Path(name).suffix) in OTHER_FORMATS}:
        if formats == {OTHER_FORMATS[GGUF_SUFFIX]}:
            raise ModelError(f"{model} has weights in the format GGUF, and no config.json", GGUF_HINT)
        message = f"{model} has weights in the format {', '.join(sorted(formats))}, which is not supported"
        raise ModelError(f"{message}, and no config.json", FORMAT_HINT)


def check_files(
    model: str, revision: str | None, config: PreTrainedConfig, refusals: Refusals, reads_weights: bool = True
) -> None:
    """Refuse adapters, quantised weights, weights in other formats, and models for other tasks. Needs no weights.

    `model`: a folder or Hub id whose config has been loaded. `reads_weights`: False if they will be random.
    """
    folder = local_folder(model, revision)
    names, is_local = _file_names(model, revision, folder), Path(model).exists()
    gguf_files: list[Path] | None = None
    with refusals.collecting():
        gguf_files = gguf_paths(model, folder) if folder else []
    if ADAPTER_CONFIG in names and names & ADAPTER_WEIGHTS:
        remedy = f"delete {ADAPTER_CONFIG}"
        if not is_local:
            remedy = f"download the repository without {ADAPTER_CONFIG} and pass that folder"
        refusals.add(_adapter_error(model, folder, f"; if it is merged already, {remedy}"))
    with refusals.collecting():
        check_task(model, config, names)
    with refusals.collecting():
        if gguf_files:
            describe_gguf(model, config, gguf_files)
        elif MODEL_OPTIMIZER_FILE in names and quantisation_settings(config) is None:
            config.quantization_config = _model_optimizer_settings(
                model, _path_of(MODEL_OPTIMIZER_FILE, model, revision, folder)
            )
        check_method(model, config)
    is_complete = is_local or not folder or {item.name for item in folder.iterdir()} < names
    with refusals.collecting():
        if reads_weights and is_complete and gguf_files == [] and not explicit_file(model, config):
            check_format(model, names)


def _model_optimizer_settings(model: str, path: Path | None) -> dict[str, Any] | None:
    """The settings in MODEL_OPTIMIZER_FILE, None if only the KV cache is quantised.

    `path`: None if the file cannot be read, because the model has not been downloaded.
    """
    if path is None:
        raise ModelError(f"{MODEL_OPTIMIZER_FILE} of {model} is not downloaded", DOWNLOAD_HINT)
    settings = read_json_object(path).get("quantization")
    if not isinstance(settings, dict) or "quant_algo" not in settings:
        raise ModelError(f"{path} does not state quant_algo, the format of the weights", HINT)
    return None if settings["quant_algo"] is None else {"quant_method": "modelopt", **settings}


def read_stored_tensors(
    model: str, revision: str | None, config: PreTrainedConfig, may_download: bool = False
) -> Checkpoint | None:
    """The headers of a model's safetensors or GGUF files.

    may_download: download safetensors files first. None if no such files have been downloaded.
    Raises ModelError for broken files, and what huggingface_hub raises.
    """
    folder, name = local_folder(model, revision), explicit_file(model, config)
    found = read_headers(model, folder, name) if folder else None
    if found is None and may_download and not Path(model).exists() and not uses_local_files_only(model, revision):
        patterns = [*SAFETENSORS_PATTERNS, *([name] if name else [])]
        folder = Path(huggingface_hub.snapshot_download(model, revision=revision, allow_patterns=patterns))
        found = read_headers(model, folder, name)
    return found


def check_tensors(
    model: str, config: PreTrainedConfig, tensors: dict[str, TensorHeader], shapes: Mapping[str, tuple[int, ...]],
    trust_remote_code: bool = False,
) -> None:  # fmt: skip
    """Refuse quantised weights, two tensors for one of the model, and incomplete experts. Raises ModelError.

    `shapes`: of the model's tensors, by name. Missing and unknown tensors are found when the model is traced or loaded,
    because transformers renames and converts tensors.
    """
    check_not_quantised(model, tensors)
    known_class = model_class(config, trust_remote_code)
    if known_class is not None:
        _check_prefixes(model, tensors, shapes, known_class.base_model_prefix)
        check_experts(model, tensors)


def _check_prefixes(
    model: str, tensors: dict[str, TensorHeader], shapes: Mapping[str, tuple[int, ...]], prefix: str
) -> None:
    """Refuse a tensor of the model that occurs with and without the prefix, which transformers adds and removes."""
    for name in tensors:
        names = {name, f"{prefix}.{name}"}
        if names <= tensors.keys() and len(names & shapes.keys()) == 1:
            message = f"{model} has two tensors for one of the model: {name}, {prefix}.{name}"
            raise ModelError(message, "save the model again with only one of them; transformers would have used either")


def stored_dtype(checkpoint: Checkpoint) -> str:
    """The dtype that transformers' `dtype="auto"` takes if the config states none: of the first floating tensor."""
    tensors = checkpoint.tensors.items()
    dtypes = (DTYPES.get(tensor.dtype) for name, tensor in tensors if name not in checkpoint.quantised)
    return str(next(filter(None, dtypes), "")).removeprefix("torch.")


def check_loading_report(model: str, loaded: PreTrainedModel, report: dict[str, Any]) -> None:
    """Raise ModelError if tensors are missing, have another shape, or are not used by the model.

    `report`: as transformers returns it with `output_loading_info`, without tensors that the class declares ignorable.
    """
    if missing := sorted(report["missing_keys"]):
        message = f"the checkpoint of {model} lacks {len(missing)} of the model's tensors: {first_names(missing)}"
        raise ModelError(message, "download it again; transformers would have used random weights for them")
    mismatches = (f"{name} ({[*stored]} instead of {[*shape]})" for name, stored, shape in report["mismatched_keys"])
    if mismatched := sorted(mismatches):
        message = f"tensors of {model} have other shapes than config.json describes ({len(mismatched)})"
        hint = "use the config.json that belongs to these weights"
        raise ModelError(f"{message}: {first_names(mismatched)}", hint)
    if unexpected := text_depends_on(report["unexpected_keys"], loaded.config):
        message = f"the checkpoint of {model} has tensors that the model does not use ({len(unexpected)})"
        hint = "use the config.json that belongs to these weights; transformers would have ignored the tensors"
        raise ModelError(f"{message}: {first_names(unexpected)}", hint)


def _file_names(model: str, revision: str | None, folder: Path | None) -> set[str]:
    """Names of the model's files. The Hub is asked once, as long as no weights have been downloaded."""
    names = {item.name for item in folder.iterdir()} if folder else set()
    has_weights = any(name.endswith((".safetensors", ".bin")) for name in names)
    if not (has_weights or Path(model).exists() or uses_local_files_only(model, revision)):
        with contextlib.suppress(Exception):  # huggingface_hub raises many types without a network
            info = huggingface_hub.HfApi().model_info(model, revision=revision, timeout=HUB_TIMEOUT_S)
            names |= {item.rfilename for item in info.siblings or ()}
    return names


def _path_of(name: str, model: str, revision: str | None, folder: Path | None) -> Path | None:
    """The path of a small file of the model, downloaded if necessary; None if that is not possible."""
    if folder and (folder / name).is_file():
        return folder / name
    with contextlib.suppress(Exception):  # huggingface_hub raises many types, also if there is no such file
        is_local = uses_local_files_only(model, revision)
        return Path(huggingface_hub.hf_hub_download(model, name, revision=revision, local_files_only=is_local))
    return None


def _adapter_error(model: str, folder: Path | None, remedy: str = "") -> UnsupportedModelError:
    """`folder` contains the adapter's config, if it is known. `remedy` ends the hint."""
    base = ""
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        name = json.loads((folder / ADAPTER_CONFIG).read_bytes()).get("base_model_name_or_path") if folder else None
        base = f" for {name}" if name else ""
    return UnsupportedModelError(
        f"{model} contains a PEFT adapter{base}, which is not supported",
        f"merge it into the base model with PEFT's merge_and_unload(), save that, and pass the new folder{remedy}",
    )
