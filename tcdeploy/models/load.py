"""Loads a model: a Hub id, a local folder, `builtin:tiny`, or a config with random weights.

Errors of other libraries are raised as TcdeployErrors with the next command. Modelling code from a repository runs only
if `trust_remote_code` was requested.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import importlib.util
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, Mxfp4Config, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import logging as transformers_logging

from tcdeploy.errors import ModelError, SpaceError, TcdeployError, UnknownModelError, UnsupportedModelError
from tcdeploy.models.auto_classes import auto_class, model_class, remote_class
from tcdeploy.models.convert.packed_linears import pack_linears
from tcdeploy.models.convert.quantisation import cast_experts, is_dequantised
from tcdeploy.models.convert.static_rope import freeze_rope
from tcdeploy.models.convert.traced_tensor import Trace, TracedTensor
from tcdeploy.models.hub import uses_local_files_only
from tcdeploy.models.load_errors import first_line, translate_error
from tcdeploy.models.location import BUILTIN_MODELS, local_folder, read_config_file
from tcdeploy.models.refusals import Refusals
from tcdeploy.models.weights import checkpoint
from tcdeploy.models.weights.dummy_weights import draw_dummy_weights
from tcdeploy.models.weights.early_weights import EarlyWeights, PreloadedSlice
from tcdeploy.models.weights.reader import StoredTensor
from tcdeploy.models.weights.sources import Source, WeightNotInCheckpointError
from tcdeploy.planning.extras import check_interpreter
from tcdeploy.planning.plan import Plan
from tcdeploy.planning.recipe import Recipe
from tcdeploy.torch_compat.tensors_without_storage import supported as can_trace
from tcdeploy.torch_compat.transformers.float32_tensors import float32_tensors

DUMMY_SEED = 0
HUB_URLS = ("https://huggingface.co/", "http://huggingface.co/", "https://hf.co/")
# Planning builds every layer on fake tensors, in 20 ms each. Llama 3.1 405B has 126 layers.
MAX_LAYERS = 512
LAYER_COUNT_NAMES = {"num_hidden_layers", "n_layer", "n_layers", "num_layers"}
log = logging.getLogger("tcdeploy.models")


def resolve_model_path(model: str) -> str:
    """What to pass to transformers: the folder of a builtin or local model, else the Hub id. Raises ModelError."""
    if model.startswith("builtin:"):
        if model not in BUILTIN_MODELS:
            raise UnknownModelError(f"unknown builtin model {model}", f"builtin models: {', '.join(BUILTIN_MODELS)}")
        return str(BUILTIN_MODELS[model])
    checkpoint.check_path(model)
    path = Path(model)
    if path.is_dir() and not (path / "config.json").is_file():
        hint = "pass the folder that contains config.json"
        with contextlib.suppress(OSError):  # such a folder in it, as in the Hub's cache
            configs = [*sorted(path.glob("*/config.json")), *sorted(path.glob("snapshots/*/config.json"))]
            hint += f": {configs[0].parent}" if configs else ""
        raise ModelError(f"folder {model} is not a model: it has no config.json", hint)
    if model.startswith(HUB_URLS):
        hub_id = "/".join(model.split("/")[3:5])
        raise UnknownModelError(f"{model} is a URL, not a hub id", f"pass the hub id: {hub_id}")
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
    with _translate_errors(recipe.model):
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


def check_checkpoint(recipe: Recipe, config: PreTrainedConfig, expected: checkpoint.ExpectedTensors) -> str:
    """Check the tensors of a model's downloaded files against its config, before they are loaded (checkpoint.py).

    Returns the dtype in which they are stored, or "" if it is not known, or nothing is loaded. Raises ModelError.
    """
    if recipe.model in BUILTIN_MODELS or recipe.load_format == "dummy":
        return ""
    transformers_logging.disable_progress_bar()
    with quiet_transformers(), _translate_errors(recipe.model):
        tensors = checkpoint.read_stored_tensors(recipe.model, recipe.revision, config)
        if tensors is None:
            return ""
        checkpoint.check_tensors(recipe.model, config, tensors, expected, recipe.trust_remote_code)
        return checkpoint.stored_dtype(tensors)


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


def load_model(
    plan: Plan, config: PreTrainedConfig, attn_implementation: str, early_weights: EarlyWeights | None = None
) -> PreTrainedModel:
    """The model in eval mode, on the plan's device and in its weight_dtype.

    `early_weights`: of the plan's checkpoint; used by the first call only. Raises ModelError, NetworkError, SpaceError.
    """
    transformers_logging.disable_progress_bar()
    dtype = getattr(torch, plan.weight_dtype)
    with quiet_transformers(), _translate_errors(plan.model):
        model = None
        if plan.load_format == "dummy":
            model = _dummy_model(plan, config, dtype, attn_implementation)
        elif early_weights is not None:
            model = _model_from_early_weights(plan, config, dtype, attn_implementation, early_weights)
        if model is None:
            model = _pretrained_model(plan, config, dtype, attn_implementation)
    model.requires_grad_(False)
    freeze_rope(model)
    return model.eval()


def trace_weights(
    plan: Plan,
    config: PreTrainedConfig,
    stored: Mapping[str, StoredTensor],
    packed_linears: tuple[tuple[str, ...], ...],
) -> dict[str, Source]:
    """The sources of the model's tensors in its checkpoint `stored`, by name after `pack_linears`.

    Loads the model with tensors that have no values (convert/traced_tensor.py). Tensors that are not from the
    checkpoint are left out. Raises WeightNotInCheckpointError.
    """
    if not can_trace():
        raise WeightNotInCheckpointError(f"its weights cannot be traced with torch {torch.__version__}")
    trace, dtype = Trace(stored), getattr(torch, plan.weight_dtype)
    on_cpu = dataclasses.replace(plan, device="cpu")
    try:
        with quiet_transformers(), torch.no_grad():
            model = _pretrained_model(on_cpu, copy.deepcopy(config), dtype, "eager", trace.tensors())
            pack_linears(model, packed_linears)
    except Exception as error:  # transformers raises many types
        raise WeightNotInCheckpointError(trace.problem or first_line(error)) from error
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor.source for name, tensor in named if isinstance(tensor, TracedTensor)}


def _dummy_model(plan: Plan, config: PreTrainedConfig, dtype: torch.dtype, attn_implementation: str) -> PreTrainedModel:
    """Random weights, created on the device; equal for equal config, device and torch version.

    They have the dtypes of loaded weights, so that both run the same programs.
    """
    torch.manual_seed(DUMMY_SEED)
    with torch.device(plan.device):
        model: PreTrainedModel = auto_class(config, plan.trust_remote_code).from_config(
            config, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=plan.trust_remote_code
        )
    tensors: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    for name in float32_tensors(model, dtype):
        tensors[name].data = tensors[name].data.float()
    draw_dummy_weights(model)
    return model


def _model_from_early_weights(
    plan: Plan, config: PreTrainedConfig, dtype: torch.dtype, attn_implementation: str, early_weights: EarlyWeights
) -> PreTrainedModel | None:
    """The model with tensors that have been read already; None if that is not possible.

    After any error the model is loaded from its files, so that the error is the same as without early reading.
    """
    model = None
    if tensors := early_weights.take(local_folder(plan.model, plan.revision), plan.device, dtype):
        try:
            model = _pretrained_model(plan, config, dtype, attn_implementation, tensors)
        except Exception as error:  # logged as text: a handler may keep the record, and the error refers to the tensors
            log.info("the model is loaded from its files, not from tensors that were read early: %s", str(error))
            early_weights.weights_read = None
    del tensors
    if model is None:
        gc.collect()
    torch.cuda.empty_cache()  # release cached blocks of tensors that were converted or not used
    return model


def _pretrained_model(
    plan: Plan,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    attn_implementation: str,
    tensors: Mapping[str, PreloadedSlice | torch.Tensor] | None = None,
) -> PreTrainedModel:
    """The model, from `tensors` on the device or, if None, from the checkpoint's files.

    Files are read directly to the device if accelerate is installed; otherwise through host memory.
    """
    loader_class, path, is_local, placement = auto_class(config, plan.trust_remote_code), None, False, {}
    if tensors is None:
        path = resolve_model_path(plan.model)
        is_local = uses_local_files_only(path, plan.revision)
        placement = {"device_map": {"": plan.device}} if importlib.util.find_spec("accelerate") else {}
    else:  # an auto class needs a path, which a state dict does not have
        loader_class = model_class(config, trust_remote_code=False)
        if loader_class is None:
            message = f"{config.model_type} cannot be loaded from a state dict"
            raise UnsupportedModelError(message, "load it from its files")
        if loader_class.config_class is type(config.get_text_config()):
            config = config.get_text_config()  # as an auto class does
    model, report = loader_class.from_pretrained(
        path,
        state_dict=tensors,
        config=config,
        revision=plan.revision,
        local_files_only=is_local,
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=plan.trust_remote_code,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are in the report, and refused below with their names
        generation_config=GenerationConfig(),  # otherwise its file is read, see generation_config.py
        **placement,
        **({"quantization_config": Mxfp4Config(dequantize=True)} if is_dequantised(config) else {}),
    )
    if is_dequantised(config):
        cast_experts(model, dtype)
    checkpoint.check_loading_report(plan.model, model, report)
    return model.to(plan.device)


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
def _translate_errors(model: str) -> Iterator[None]:
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
