"""Chooses the auto class of transformers that loads a model, and refuses checkpoints that do not generate text.

AutoModelForMultimodalLM is used if the model's type has a multimodal class, else AutoModelForCausalLM. Multimodal
models are served as text only: image and audio towers are loaded but never run. A few types also have a causal LM class
that loads the text model alone (Emu3, Llama 4). It is not used: the checkpoint check could not distinguish the towers'
unused tensors from text tensors that the model lacks.

A checkpoint of a reward, classification or embedding model has the same `model_type` as a text generator, and
transformers would load it as one, with a random or a tied language model head. `architectures` in config.json names the
class that it was saved from, and the files of sentence-transformers mark an embedding model.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
)

from tcdeploy.errors import UnsupportedArchitectureError, UnsupportedModelError

SENTENCE_TRANSFORMERS_FILES = {"modules.json", "config_sentence_transformers.json"}
# Parts of class names, and what such a class is.
KINDS = {
    r"For\w*Classification|Classifier|ForMultipleChoice|ForQuestionAnswering|Reward|Rerank":
        "a reward or classification model",
    "ForMaskedLM": "a fill-mask model",
    "Embedding|ForRetrieval|Bidirectional|BiEncoder": "an embedding model",
}  # fmt: skip
TASK_HINT = "pass the text generator of the same family, such as its instruct model"


def auto_class(config: PreTrainedConfig, trust_remote_code: bool, model: str = "") -> Any:
    """AutoModelForCausalLM or AutoModelForMultimodalLM. `model` names the model in errors.

    Raises UnsupportedArchitectureError for encoder-decoders, and for types that transformers loads as neither.
    """
    name, model = config.model_type, model or config.model_type
    chosen, _ = _classes(config, trust_remote_code)
    if getattr(config, "is_encoder_decoder", False):
        problem = f"an encoder-decoder model ({name}); only models without an encoder are supported"
    elif chosen:
        return chosen
    elif config.get_text_config() is not config:
        problem = f"a multimodal model ({name}) that transformers does not load as a text generator"
    else:
        problem = f"not a causal LM: transformers has no causal LM or multimodal LM class for {name}"
    raise UnsupportedArchitectureError(f"{model} is {problem}")


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
    return {*([modalities] if isinstance(modalities, str) else modalities)} != {"text"}


def check_task(model: str, config: PreTrainedConfig, names: Collection[str]) -> None:
    """Raise UnsupportedModelError for a reward, classification or embedding model. `names`: of the model's files."""
    problem = _other_task(config)
    if problem is None and (markers := SENTENCE_TRANSFORMERS_FILES & {*names}):
        problem = f"an embedding model of sentence-transformers (it has {min(markers)})"
    if problem:
        raise UnsupportedModelError(f"{model} is {problem}, which does not generate text", TASK_HINT)


def _other_task(config: PreTrainedConfig) -> str | None:
    """What the checkpoint is instead of a text generator; None if a class in `architectures` may be one."""
    names = [name for name in getattr(config, "architectures", None) or () if isinstance(name, str)]
    generator = model_class(config, trust_remote_code=False)
    if not names or (generator is not None and generator.__name__ in names):
        return None
    headless = MODEL_MAPPING.get(type(config), None)
    headless_names = {
        getattr(item, "__name__", "") for item in (headless if isinstance(headless, tuple) else [headless])
    }
    if getattr(config.get_text_config(), "tie_word_embeddings", False):
        headless_names = set()  # the head is the embedding, so the checkpoint is a complete text generator
    without_head = "a model without a language model head, as for embeddings"
    kinds = [kind_of(name) or (without_head if name in headless_names else None) for name in names]
    return f"{kinds[0]} ({names[0]})" if all(kinds) else None


def kind_of(name: str) -> str | None:
    """What a class of this name is, if it does not generate text."""
    return next((kind for pattern, kind in KINDS.items() if re.search(pattern, name)), None)
