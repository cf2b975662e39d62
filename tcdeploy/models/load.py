"""Finds a model (a Hub id, a local folder or `builtin:tiny`), and reads its config and the headers of its weight files.

Errors of other libraries are raised as TcdeployErrors with the next command. Modelling code from a repository runs only
if `trust_remote_code` was requested.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import logging as transformers_logging

from tcdeploy.errors import ModelError, SpaceError, TcdeployError, UnknownModelError, UnsupportedModelError
from tcdeploy.models.auto_classes import auto_class, remote_class
from tcdeploy.models.convert.quantised_weights import find_quantised_weights, with_stand_ins
from tcdeploy.models.formats.methods import is_quantised
from tcdeploy.models.hub import uses_local_files_only
from tcdeploy.models.load_errors import first_line, translate_error
from tcdeploy.models.location import BUILTIN_MODELS, local_folder, read_config_file
from tcdeploy.models.refusals import Refusals
from tcdeploy.models.weights import checkpoint
from tcdeploy.models.weights.files import Checkpoint
from tcdeploy.models.weights.reader import stored_tensors
from tcdeploy.models.weights.weight_paths import GGUF_SUFFIX, is_gguf_file
from tcdeploy.planning.extras import check_interpreter
from tcdeploy.planning.recipe import Recipe

HUB_URLS = ("https://huggingface.co/", "http://huggingface.co/", "https://hf.co/")
# Planning builds every layer on fake tensors, in 20 ms each. Llama 3.1 405B has 126 layers.
MAX_LAYERS = 512
LAYER_COUNT_NAMES = {"num_hidden_layers", "n_layer", "n_layers", "num_layers"}
log = logging.getLogger("tcdeploy.models")


def resolve_model_path(model: str) -> str:
    """What to pass to transformers: the folder of a builtin, local or GGUF model, else the Hub id.

    Raises ModelError.
    """
    if model.startswith("builtin:"):
        if model not in BUILTIN_MODELS:
            raise UnknownModelError(f"unknown builtin model {model}", f"builtin models: {', '.join(BUILTIN_MODELS)}")
        return str(BUILTIN_MODELS[model])
    checkpoint.check_path(model)
    path = Path(model)
    has_config = (path / "config.json").is_file()
    if is_gguf_file(model) or (path.is_dir() and not has_config):
        folder = local_folder(model, None)
        if folder and folder != path:
            return str(folder)
    if path.is_dir() and not has_config:
        hint = "pass the folder that contains config.json"
        with contextlib.suppress(OSError):  # such a folder in it, as in the Hub's cache
            configs = [*sorted(path.glob("*/config.json")), *sorted(path.glob("snapshots/*/config.json"))]
            hint += f": {configs[0].parent}" if configs else ""
        raise ModelError(f"folder {model} is not a model: it has no config.json", hint)
    if model.startswith(HUB_URLS):
        hub_id = "/".join(model.split("/")[3:5])
        raise UnknownModelError(f"{model} is a URL, not a hub id", f"pass the hub id: {hub_id}")
    if model.endswith(GGUF_SUFFIX) and not path.is_dir():
        raise UnknownModelError(f"file {model} does not exist", "check the path, or download it: hf download REPO FILE")
    if not path.is_dir() and (model.startswith((".", "/", "~")) or model.count("/") > 1):
        hint = "check the path, or pass a hub id such as Qwen/Qwen2.5-7B"
        raise UnknownModelError(f"folder {model} does not exist", hint)
    return model


def load_config(recipe: Recipe, refusals: Refusals | None = None) -> PreTrainedConfig:
    """Load the model's config. Raises ModelError, and UsageError under `python -OO`.

    `refusals`: collects the reasons for which the checkpoint is refused, so that the architecture can still be probed.
    """
    collected = refusals or Refusals(recipe.model)
    check_interpreter()
    path = resolve_model_path(recipe.model)
    with translating_errors(recipe.model):
        local_config = Path(path, "config.json")
        if local_config.is_file():  # check it before transformers creates a list with one entry per layer
            _check_layer_count(recipe.model, read_config_file(local_config))
        config = _read_config(path, recipe)
        auto_class(config, recipe.trust_remote_code, recipe.model)  # raises for other kinds of models
        if recipe.trust_remote_code and (reference := remote_class(config)):  # code that cannot be imported fails here
            is_local = uses_local_files_only(path, recipe.revision)
            get_class_from_dynamic_module(reference, path, revision=recipe.revision, local_files_only=is_local)
        if recipe.model not in BUILTIN_MODELS:
            checkpoint.check_files(recipe.model, recipe.revision, config, collected, recipe.load_format != "dummy")
    try:
        _check_layer_count(recipe.model, config.to_dict())
    except ModelError as error:  # the architecture cannot be examined
        collected.add(error)
        collected.raise_all()
    if refusals is None:
        collected.raise_all()
    return config


def _read_config(path: str, recipe: Recipe) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(
            path, revision=recipe.revision, trust_remote_code=recipe.trust_remote_code,
            local_files_only=uses_local_files_only(path, recipe.revision),
        )  # fmt: skip
    except (OSError, ValueError):
        if not Path(path).is_dir():
            checkpoint.check_repository(recipe.model, recipe.revision)
        raise


def read_checkpoint(
    recipe: Recipe, config: PreTrainedConfig, shapes: Mapping[str, tuple[int, ...]], may_download: bool = False
) -> Checkpoint | None:
    """The headers of a model's safetensors files, unless they are refused (weights/checkpoint.py).

    `shapes`: of the model's tensors, by name. may_download: download the files of a quantised model, whose tensors say
    which layers have a scheme; transformers downloads others while it loads them. None if they are in another format
    or not downloaded, or if the weights will be random. Raises ModelError.
    """
    if recipe.load_format == "dummy":
        return None
    with translating_errors(recipe.model):
        downloads = may_download and is_quantised(config)
        found = checkpoint.read_stored_tensors(recipe.model, recipe.revision, config, downloads)
        if found is not None:
            quantised = find_quantised_weights(recipe.model, config, stored_tensors(found.paths), shapes)
            found = Checkpoint(with_stand_ins(found.tensors, quantised), found.paths, quantised)
            checkpoint.check_tensors(recipe.model, config, found.tensors, shapes, recipe.trust_remote_code)
        return found


def _check_layer_count(model: str, config: Any) -> None:
    """Raise UnsupportedModelError if the config, or a config in it, has more than MAX_LAYERS layers."""
    if not isinstance(config, dict):
        return
    for name, value in config.items():
        if name in LAYER_COUNT_NAMES and isinstance(value, int) and value > MAX_LAYERS:
            message = f"{model} has {value} layers; at most {MAX_LAYERS} are supported"
            raise UnsupportedModelError(message, f"check {name} in the model's config.json")
        _check_layer_count(model, value)


def config_to_dict(config: PreTrainedConfig) -> dict[str, Any]:
    """All values, including defaults, as JSON types; without the path that the config was loaded from."""
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    values.pop("_name_or_path", None)
    return values


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Log only transformers' errors: it warns at length about configs that work."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


@contextlib.contextmanager
def translating_errors(model: str) -> Iterator[None]:
    """Raise errors of libraries in the block as ModelError, NetworkError or SpaceError."""
    try:
        yield
    except TcdeployError:
        raise
    except torch.OutOfMemoryError as error:
        message = f"the weights of {model} do not fit into the GPU's free memory: {first_line(error)}"
        raise SpaceError(message, "free GPU memory (nvidia-smi lists the processes), or use a smaller model") from error
    except Exception as error:  # libraries raise many types for bad files
        raise translate_error(model, error) from error
    except SystemExit as error:
        raise ModelError(f"the modelling code of {model} calls sys.exit()", "review the code") from error
