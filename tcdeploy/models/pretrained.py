"""Calls transformers' `from_pretrained`, and refuses what it would only warn about."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from tcdeploy.models.auto_classes import auto_class, model_class
from tcdeploy.models.convert.attention_interface import with_interface
from tcdeploy.models.hub import uses_local_files_only
from tcdeploy.models.load import resolve_model_path
from tcdeploy.models.weights.checkpoint import check_loading_report
from tcdeploy.planning.plan import Plan


class LoadSettings(Protocol):
    """The fields of a Plan on which a traced model depends."""

    @property
    def model(self) -> str: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def trust_remote_code(self) -> bool: ...
    @property
    def weight_dtype(self) -> str: ...


def pretrained_model(plan: Plan, config: PreTrainedConfig, attn_implementation: str) -> PreTrainedModel:
    """The model in the plan's weight_dtype, from its files, on the plan's device.

    Files are read directly to the device if accelerate is installed; otherwise through host memory. Raises ModelError,
    and what transformers raises.
    """
    path = resolve_model_path(plan.model)
    options = {"device_map": {"": plan.device}} if importlib.util.find_spec("accelerate") else {}
    is_local = uses_local_files_only(path, plan.revision)
    loader_class = auto_class(config, plan.trust_remote_code)
    model = _load(loader_class, path, plan, config, attn_implementation, local_files_only=is_local, **options)
    return model.to(plan.device)


def model_of_tensors(
    plan: LoadSettings, config: PreTrainedConfig, attn_implementation: str, tensors: Mapping[str, Tensor]
) -> PreTrainedModel:
    """The model in the plan's weight_dtype, from the tensors of its checkpoint. Raises as `pretrained_model`."""
    loader_class = model_class(config, trust_remote_code=False)
    assert loader_class is not None, "an auto class needs a path"
    if loader_class.config_class is type(config.get_text_config()):
        config = config.get_text_config()  # as an auto class does
    return _load(loader_class, None, plan, config, attn_implementation, state_dict=tensors)


def _load(
    loader_class: Any,
    path: str | None,
    plan: LoadSettings,
    config: PreTrainedConfig,
    attn_implementation: str,
    **options: Any,
) -> PreTrainedModel:
    transformers_logging.disable_progress_bar()
    dtype = getattr(torch, plan.weight_dtype)

    def build(implementation: str) -> PreTrainedModel:
        model, report = loader_class.from_pretrained(
            path,
            config=config,
            revision=plan.revision,
            dtype=dtype,
            attn_implementation=implementation,
            trust_remote_code=plan.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report, and refused below with their names
            generation_config=GenerationConfig(),  # otherwise its file is read, see generation_config.py
            **options,
        )
        check_loading_report(plan.model, model, report)
        return model  # type: ignore[no-any-return]

    model: PreTrainedModel = with_interface(model_class(config, plan.trust_remote_code), attn_implementation, build)
    return model
