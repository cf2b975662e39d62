"""Which of the tensors that a model does not use may be ignored: those that the text does not depend on.

transformers ignores every tensor that it does not know. A layer that the config leaves out, an adapter or another head
would change the text, so a tensor is ignored only if its name shows that it belongs to one of the kinds listed here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from transformers import PreTrainedConfig

# Beside the tensors that transformers' classes declare ignorable:
IGNORABLE = re.compile(
    r"\.masked_bias$|(^|\.)position_ids$|rotary_emb\.(cos|sin)_cached$"  # constants that older code stored
    r"|(^|\.)decoder\.version$|_extra_state$"  # format versions and states of other libraries
    r"|^(model\.)?(v|value)_head\."  # value heads of reinforcement learning
    r"|(^|\.)mtp\."  # multi-token prediction
    r"|(attn|attention)\.(\w+\.)?(q|k|v|kv|prob)_scale$"  # of an FP8 KV cache; the one here is not quantised
)
LAYER = re.compile(r"(?:^|.*\.)layers\.(\d+)\.")
# Tensors that a layer for multi-token prediction has, and a decoder layer does not (DeepSeek-V3, GLM-4.5).
PREDICTION_LAYER = re.compile(r"(?:^|.*\.)layers\.\d+\.(?=(?:eh_proj|enorm|hnorm|shared_head|embed_tokens)\.)")
# Generators of speech that read the text model's output, by the names that transformers gives them in Qwen2.5-Omni and
# Qwen3-Omni. Other parts that a class leaves out are refused: they may be heads, adapters, or a second text model.
GENERATORS = re.compile(r"^(model\.)?(talker|token2wav|code2wav)\.")


def text_depends_on(names: Iterable[str], config: PreTrainedConfig) -> list[str]:
    """The tensors among those that a model does not use which may not be ignored, sorted by name."""
    names = [name for name in names if not IGNORABLE.search(name) and not GENERATORS.match(name)]
    prediction_layers = _prediction_layers(names, config.get_text_config())
    return sorted(name for name in names if not name.startswith(prediction_layers))


def _prediction_layers(names: list[str], text_config: PreTrainedConfig) -> tuple[str, ...]:
    """Prefixes of the layers for multi-token prediction, which follow the decoder's layers: `model.layers.61.`."""
    layers = getattr(text_config, "num_hidden_layers", None) or 0
    prediction_layers = getattr(text_config, "num_nextn_predict_layers", None) or 0
    numbers = range(layers, layers + prediction_layers)
    prefixes = {match[0] for match in map(PREDICTION_LAYER.match, names) if match}
    return tuple(prefix for prefix in prefixes if (layer := LAYER.match(prefix)) and int(layer[1]) in numbers)
