"""Recognises checkpoints of reward, classification and embedding models, which do not generate text.

Such a checkpoint has the same `model_type` as a text generator, and transformers would load it as one: without its own
head, and with a random or a tied language model head. `architectures` in config.json names the class that it was saved
from, and the files of sentence-transformers mark an embedding model.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from transformers import MODEL_MAPPING, PreTrainedConfig

from tcdeploy.errors import UnsupportedModelError
from tcdeploy.models.auto_classes import model_class

SENTENCE_TRANSFORMERS_FILES = {"modules.json", "config_sentence_transformers.json"}
# Parts of class names, and what such a class is.
KINDS = {
    r"For\w*Classification|Classifier|ForMultipleChoice|ForQuestionAnswering|Reward|Rerank":
        "a reward or classification model",
    "ForMaskedLM": "a fill-mask model",
    "Embedding|ForRetrieval|Bidirectional|BiEncoder": "an embedding model",
}  # fmt: skip
HINT = "pass the text generator of the same family, such as its instruct model"


def check_task(model: str, config: PreTrainedConfig, names: Collection[str]) -> None:
    """Raise UnsupportedModelError for a reward, classification or embedding model. `names`: of the model's files."""
    architectures = [name for name in getattr(config, "architectures", None) or () if isinstance(name, str)]
    problem = _problem(config, architectures)
    if problem is None and SENTENCE_TRANSFORMERS_FILES & {*names}:
        marker = min(SENTENCE_TRANSFORMERS_FILES & {*names})
        problem = f"an embedding model of sentence-transformers (it has {marker})"
    if problem:
        raise UnsupportedModelError(f"{model} is {problem}, which does not generate text", HINT)


def _problem(config: PreTrainedConfig, architectures: list[str]) -> str | None:
    """What the checkpoint is instead of a text generator; None if a class in `architectures` may be one."""
    if not architectures:
        return None
    generator, headless = model_class(config, trust_remote_code=False), MODEL_MAPPING.get(type(config), None)
    if generator is not None and generator.__name__ in architectures:
        return None
    kinds = [kind_of(name) or _headless_kind(name, headless, config) for name in architectures]
    return f"{kinds[0]} ({architectures[0]})" if all(kinds) else None


def kind_of(name: str) -> str | None:
    """What a class of this name is, if it does not generate text."""
    return next((kind for pattern, kind in KINDS.items() if re.search(pattern, name)), None)


def _headless_kind(name: str, headless: object, config: PreTrainedConfig) -> str | None:
    """With tied embeddings the head is the embedding, so the checkpoint is a complete text generator."""
    is_tied = getattr(config.get_text_config(), "tie_word_embeddings", False)
    classes = headless if isinstance(headless, tuple) else (headless,)
    if is_tied or all(name != getattr(item, "__name__", None) for item in classes):
        return None
    return "a model without a language model head, as for embeddings"
