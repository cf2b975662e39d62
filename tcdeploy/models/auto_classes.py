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

from tcdeploy.errors import UnsupportedArchitectureError


def auto_class(config: PreTrainedConfig, trust_remote_code: bool, model: str = "") -> Any:
    """AutoModelForCausalLM or AutoModelForMultimodalLM. `model` names the model in errors.

    Raises UnsupportedArchitectureError for encoder-decoders, and for types that transformers loads as neither.
    """
    name, model = config.model_type, model or config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedArchitectureError(
            f"{model} is an encoder-decoder model ({name}); only models without an encoder are supported"
        )
    chosen, _ = _classes(config, trust_remote_code)
    if chosen:
        return chosen
    if config.get_text_config() is not config:
        raise UnsupportedArchitectureError(
            f"{model} is a multimodal model ({name}) that transformers does not load as a text generator"
        )
    raise UnsupportedArchitectureError(
        f"{model} is not a causal LM: transformers has no causal LM or multimodal LM class for {name}"
    )


def model_class(config: PreTrainedConfig, trust_remote_code: bool) -> Any | None:
    """The class that `auto_class` makes an instance of; None if it comes from the model's repository."""
    return _classes(config, trust_remote_code)[1]


def _classes(config: PreTrainedConfig, trust_remote_code: bool) -> tuple[Any | None, Any | None]:
    """The auto class, and transformers' class that it makes an instance of. Trusted code takes precedence over both."""
    is_remote = remote_class(config) is not None
    if not (trust_remote_code and is_remote):
        for chosen, mapping in (
            (AutoModelForMultimodalLM, MODEL_FOR_MULTIMODAL_LM_MAPPING),
            (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
        ):
            if type(config) in mapping:
                return chosen, mapping[type(config)]
    return (AutoModelForCausalLM if is_remote else None), None


def remote_class(config: PreTrainedConfig) -> str | None:
    """The causal LM class in the model's repository, as "module.Class", if the config names one."""
    reference: str | None = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    return reference


def is_multimodal(config: PreTrainedConfig) -> bool:
    """Whether the model also has parts for images, audio or video."""
    if type(config) not in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return False
    modalities = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)].input_modalities
    return {modalities} != {"text"} if isinstance(modalities, str) else {*modalities} != {"text"}
