"""Makes the quantisation settings of a model whose weights are GGUF, and compares config.json with the file.

A user may put config.json beside the file, and it may belong to another model. Shapes of tensors do not depend on the
number of heads, the rotary frequency or epsilon, so these are compared with the metadata of the file. Quantisation
settings in config.json describe other weights, and are replaced by

    {"quant_method": "gguf", "architecture": "llama", "heads": {"q_proj": 32, "k_proj": 8}, "schemes": {...},
     "layout": DIGEST}

`schemes` has those of linear layers and stacked experts, by path in the model, for random weights. `layout` is a digest
of the types of all tensors, on which programs depend.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from tcdeploy.errors import ModelError, UnsupportedModelError
from tcdeploy.models.formats.gguf_rope import ROPE_TENSORS, rope_parameters, rope_problem
from tcdeploy.models.formats.gguf_weights import GATE_UP, SCHEMES_BY_TYPE
from tcdeploy.models.gguf.config import COMPARED
from tcdeploy.models.load_errors import DOWNLOAD_HINT
from tcdeploy.models.weights.gguf_file import read_gguf
from tcdeploy.models.weights.gguf_names import ARCHITECTURE_KEY, FAMILIES, Family, is_known, named_tensors
from tcdeploy.models.weights.reader import stored_tensors

METHOD = "gguf"
HINT = "put the config.json of the model that the file was converted from beside the file"
NAMES_HINT = "use safetensors files, or convert the model with another version of llama.cpp"
EXPERTS_MODULE = "mlp.experts"  # in a layer of each family's model
# The weights of this module, by the names of their stacks in the file
STACKS = {"gate_exps": "gate_up_proj", "up_exps": "gate_up_proj", GATE_UP: "gate_up_proj", "down_exps": "down_proj"}
log = logging.getLogger("tcdeploy.models")
TOLERANCE = 1e-4  # the file stores numbers in float32


def describe_gguf(model: str, config: PreTrainedConfig, paths: Sequence[Path]) -> None:
    """Replace a config's quantisation settings by those of these files. Raises as `gguf_settings`.

    A head in the files is used even if the config ties it to the embedding, as in llama.cpp, because both may be
    quantised differently.
    """
    config.quantization_config = gguf_settings(model, config, paths)
    has_head = any(name == "lm_head.weight" for _, name, _ in named_tensors(paths))
    for part in (config, config.get_text_config()):
        if has_head and getattr(part, "tie_word_embeddings", False):
            part.tie_word_embeddings = False
            log.info("%s has output.weight, so the head is not tied to the embedding", paths[0])


def gguf_settings(model: str, config: PreTrainedConfig, paths: Sequence[Path]) -> dict[str, Any]:
    """Settings for these files. Raises ModelError if they do not belong together or to the config, or are damaged."""
    for path in paths:
        if not path.is_file():
            raise ModelError(f"{model} lacks {path.name}, a part of its weights", DOWNLOAD_HINT)
    files = [read_gguf(path) for path in paths]
    metadata = files[0].metadata
    parts = metadata.get("split.count") or 1  # 0 in a file that llama.cpp has merged
    if parts != len(files):
        raise ModelError(f"{paths[0]} is one of {parts} files", "name them NAME-00001-of-0000N.gguf, in one folder")
    architecture, text_config = str(metadata.get(ARCHITECTURE_KEY)), config.get_text_config()
    family = FAMILIES.get(architecture)
    if family is None:
        message = f"{paths[0]} has the architecture {architecture}, which is not supported in GGUF"
        raise UnsupportedModelError(message, f"use safetensors files; supported in GGUF: {', '.join(FAMILIES)}")
    _check_type(paths[0], architecture, family, config)
    _compare(paths[0], architecture, metadata, text_config)
    types = {name: tensor.type.name for _, name, tensor in named_tensors(paths)}
    unknown = [name for name in types if not is_known(name) and name not in ROPE_TENSORS]
    if unknown:
        message = f"{paths[0]} has tensors whose names the architecture {architecture} lacks ({len(unknown)})"
        raise UnsupportedModelError(f"{message}: {', '.join(sorted(unknown)[:3])}", NAMES_HINT)
    if problem := rope_problem(text_config, stored_tensors(paths)):
        raise ModelError(f"{paths[0]} {problem}", HINT)
    return {
        "quant_method": METHOD, "architecture": architecture,
        "heads": {"q_proj": text_config.num_attention_heads, "k_proj": text_config.num_key_value_heads},
        "schemes": _schemes(types, family),
        "layout": hashlib.sha256(json.dumps(types, sort_keys=True).encode()).hexdigest()[:16],
    }  # fmt: skip


def _schemes(types: Mapping[str, str], family: Family) -> dict[str, str]:
    """By path in the model. Gate and up of stacked experts are one weight there, so their types must be equal."""
    kinds: dict[str, set[str]] = defaultdict(set)
    for name, kind in types.items():
        path, _, part = name.rpartition(".")
        if part in STACKS and not family.has_interleaved_experts:
            kinds[f"{path.removesuffix(family.experts)}{EXPERTS_MODULE}.{STACKS[part]}"].add(kind)
        elif name.endswith("_proj.weight") or name == "lm_head.weight":
            kinds[path].add(kind)
    return {
        path: SCHEMES_BY_TYPE[kind] for path, (kind, *others) in kinds.items() if kind in SCHEMES_BY_TYPE and not others
    }


def _check_type(path: Path, architecture: str, family: Family, config: PreTrainedConfig) -> None:
    if config.model_type in family.model_types:
        return
    message = f"{path} has the architecture {architecture}, but config.json has the model_type {config.model_type}"
    if config.get_text_config().model_type in family.model_types:
        raise ModelError(f"{message} of a multimodal model", "replace config.json by the text_config in it")
    raise ModelError(message, HINT)


def _compare(path: Path, architecture: str, metadata: Mapping[str, Any], config: PreTrainedConfig) -> None:
    """Raise ModelError for a number that the file and the config state differently."""
    pairs = {f"{architecture}.{key}": (name, getattr(config, name, None)) for key, name in COMPARED.items()}
    pairs[f"{architecture}.rope.freq_base"] = ("rope_theta", rope_parameters(config).get("rope_theta"))
    for key, (name, expected) in pairs.items():
        stated = metadata.get(key)
        are_numbers = all(isinstance(value, int | float) for value in (stated, expected))
        if are_numbers and not math.isclose(stated, expected, rel_tol=TOLERANCE):  # type: ignore[arg-type]
            raise ModelError(f"{path} has {key} = {stated:g}, but config.json has {name} = {expected:g}", HINT)
