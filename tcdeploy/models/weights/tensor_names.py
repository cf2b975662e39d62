"""What the names of a checkpoint's tensors show: experts that lack one, and tensors that the text depends on.

transformers stacks experts that are stored one by one while it loads them. If a tensor is missing, it raises an error
only after it has read the whole checkpoint, and without the name. Experts with other shapes are not an error by
themselves: Ernie 4.5 VL stores experts for text and for images in one list. They are named only if transformers cannot
stack them.

transformers ignores every tensor that it does not know. A layer that the config leaves out, an adapter or another head
would change the text, so a tensor is ignored only if its name shows that it belongs to one of the kinds listed here.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable

from transformers import PreTrainedConfig

from tcdeploy.errors import ModelError
from tcdeploy.models.load_errors import DOWNLOAD_HINT
from tcdeploy.models.weights.files import TensorHeader

EXPERT = re.compile(r"(.*experts)\.(\d+)\.(.+)")
# Beside the tensors that transformers' classes declare ignorable:
IGNORABLE = re.compile(
    r"\.masked_bias$|(^|\.)position_ids$|rotary_emb\.(cos|sin)_cached$"  # constants that older code stored
    r"|(^|\.)decoder\.version$|_extra_state$"  # format versions and states of other libraries
    r"|^(model\.)?(v|value)_head\."  # value heads of reinforcement learning
    r"|^rope_(freqs|factors_long|factors_short)\.weight$"  # of GGUF, compared in formats/gguf_rope.py
    r"|(^|\.)mtp\."  # multi-token prediction
    r"|(attn|attention)\.(\w+\.)?(q|k|v|kv|prob)_scale$"  # of an FP8 KV cache; see convert/kv_scales.py
)
# Tensors that a layer for multi-token prediction has, and a decoder layer does not (DeepSeek-V3, GLM-4.5).
PREDICTION_LAYER = re.compile(r"(?:^|.*\.)layers\.(\d+)\.(?=(?:eh_proj|enorm|hnorm|shared_head|embed_tokens)\.)")
# Generators of speech that read the text model's output, by the names that transformers gives them in Qwen2.5-Omni and
# Qwen3-Omni. Other parts that a class leaves out are refused: they may be heads, adapters, or a second text model.
GENERATORS = re.compile(r"^(model\.)?(talker|token2wav|code2wav)\.")


def check_experts(model: str, tensors: dict[str, TensorHeader]) -> None:
    """Raise ModelError if some experts of a layer lack tensors that others have."""
    missing, surplus = list[str](), list[str]()
    for path, experts in _experts(tensors).items():
        counts = Counter(frozenset(names) for names in experts.values())
        usual = max(counts, key=lambda names: (counts[names], len(names)))
        for number, names in experts.items():
            missing += [f"{path}.{number}.{name}" for name in usual - names.keys()]
            surplus += [f"{path}.{number}.{name}" for name in names.keys() - usual]
    if missing or surplus:
        problem = "lacks tensors that other experts have" if missing else "has tensors that other experts do not have"
        wrong = missing or surplus
        message = f"the checkpoint of {model} {problem} ({len(wrong)}): {first_names(wrong)}"
        raise ModelError(message, DOWNLOAD_HINT)


def conversion_error(
    model: str, tensors: dict[str, TensorHeader], known_shapes: dict[str, tuple[int, ...]]
) -> ModelError:
    """The error if transformers cannot convert a checkpoint. `known_shapes`: of the model's tensors, by name."""
    unusual: list[str] = []
    for path, experts in _experts(tensors).items():
        for name in next(iter(experts.values())):
            shapes = {number: names[name].shape for number, names in experts.items() if name in names}
            [(usual, _)] = Counter(shapes.values()).most_common(1)
            unusual += [
                f"{path}.{number}.{name} ({list(shape)}, other experts: {list(usual)})"
                for number, shape in shapes.items()
                if shape != usual
            ]
    unusual = unusual or [name for name, tensor in tensors.items() if known_shapes.get(name) != tensor.shape]
    message = f"transformers cannot convert the tensors of {model} to those that config.json describes"
    hint = "use the config.json that belongs to these weights, or download the model again"
    return ModelError(f"{message}: {first_names(unusual)}", hint)


def _experts(tensors: dict[str, TensorHeader]) -> dict[str, dict[str, dict[str, TensorHeader]]]:
    """The tensors of experts by path of the list, by number of the expert, and by name."""
    lists: dict[str, dict[str, dict[str, TensorHeader]]] = defaultdict(lambda: defaultdict(dict))
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            lists[match[1]][match[2]][match[3]] = tensor
    return lists


def first_names(names: list[str]) -> str:
    return ", ".join(sorted(names)[:3])


def text_depends_on(names: Iterable[str], config: PreTrainedConfig) -> list[str]:
    """The tensors among those that a model does not use which may not be ignored, sorted by name."""
    names = [name for name in names if not IGNORABLE.search(name) and not GENERATORS.match(name)]
    text_config = config.get_text_config()
    layers = getattr(text_config, "num_hidden_layers", None) or 0
    # the layers for multi-token prediction follow the decoder's layers
    prediction_layers = range(layers, layers + (getattr(text_config, "num_nextn_predict_layers", None) or 0))
    matches = [match for match in map(PREDICTION_LAYER.match, names) if match and int(match[1]) in prediction_layers]
    return sorted(name for name in names if not name.startswith(tuple(match[0] for match in matches)))
