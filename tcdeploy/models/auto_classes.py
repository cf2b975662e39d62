"""Chooses the auto class of transformers that loads a model.

AutoModelForMultimodalLM is used if the model's type has a multimodal class, else AutoModelForCausalLM. Multimodal
models are served as text only: image and audio towers are loaded but never run. A few types also have a causal LM class
that loads the text model alone (Emu3, Llama 4). It is not used, because it leaves the towers' tensors unused, and the
checkpoint check could not distinguish them from text tensors that the model lacks.
"""

from __future__ import annotations

from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
)

from tcdeploy.errors import UnsupportedModelError

HINT = "docs/models.md describes the models that can be served"


def auto_class(config: PreTrainedConfig, model: str = "") -> Any:
    """AutoModelForCausalLM or AutoModelForMultimodalLM. `model` names the model in errors.

    Raises UnsupportedModelError for encoder-decoders, and for types that transformers loads as neither.
    """
    name, model = config.model_type, model or config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{model} is an encoder-decoder model ({name}); only models without an encoder are supported", HINT
        )
    if type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return AutoModelForMultimodalLM
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or remote_class(config):
        return AutoModelForCausalLM
    if config.get_text_config() is not config:
        raise UnsupportedModelError(
            f"{model} is a multimodal model ({name}) that transformers does not load as a text generator", HINT
        )
    raise UnsupportedModelError(
        f"{model} is not a causal LM: transformers has no causal LM or multimodal LM class for {name}", HINT
    )


def remote_class(config: PreTrainedConfig) -> str | None:
    """The causal LM class in the model's repository, as "module.Class", if the config names one."""
    reference: str | None = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    return reference


def model_class(config: PreTrainedConfig, trust_remote_code: bool) -> Any | None:
    """The class that `auto_class` makes an instance of; None if it comes from the model's repository."""
    if trust_remote_code and remote_class(config):
        return None
    for mapping in (MODEL_FOR_MULTIMODAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    return None


def is_multimodal(config: PreTrainedConfig) -> bool:
    """Whether the model also has parts for images, audio or video."""
    if type(config) not in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return False
    modalities = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)].input_modalities
    return {modalities} != {"text"} if isinstance(modalities, str) else {*modalities} != {"text"}
