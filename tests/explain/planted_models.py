"""Small models with custom code in which one defect is planted, as in a repository that needs --trust-remote-code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from tests.model_families import SUPPORTED

MODELLING = """
import ctypes

from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

C_LIBRARY = ctypes.CDLL(None)


class PlantedConfig(LlamaConfig):
    model_type = "planted"


class PlantedMLP(LlamaMLP):
    def forward(self, x):
        {mlp}
        return super().forward(x)


class PlantedLayer(LlamaDecoderLayer):
    def forward(self, hidden_states, *args, **kwargs):
        {layer}
        return super().forward(hidden_states, *args, **kwargs)


class PlantedForCausalLM(LlamaForCausalLM):
    config_class = PlantedConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.__class__ = PlantedLayer
            layer.mlp.__class__ = PlantedMLP
"""


class Defect(NamedTuple):
    """A planted statement. `code`: its first line, the one to report."""

    kind: str
    cause: str
    code: str
    rest: str = ""
    is_in_layer: bool = False
    is_blocking: bool = True
    cure: str = ""


BODY = "\n            x = x * 2"
DEFECTS = {
    "branch": Defect("graph break", "data-dependent-branch", "if x.sum() > 0:", BODY, cure="torch.where"),
    "print": Defect("graph break", "print", 'print("tokens", x.shape[1])', cure="remove the line"),
    "c-function": Defect("graph break", "untraceable-call", "C_LIBRARY.getpid()", cure="torch.library.custom_op"),
    "view": Defect(
        "input mutation", "input-mutation", "hidden_states[..., :1].mul_(0.5)", is_in_layer=True, is_blocking=False,
        cure="x.clone()",
    ),
    "length": Defect(
        "recompilation", "shape-guard", "if x.shape[1] % 2:", BODY, is_blocking=False, cure="right for every length"
    ),
}  # fmt: skip


def save_planted(folder: Path, defect: Defect | None) -> str:
    """Save a model with the defect, or a healthy one, without weights: use it with load_format dummy."""
    statement = "pass" if defect is None else defect.code + defect.rest
    is_in_layer = defect is not None and defect.is_in_layer
    config = {
        **SUPPORTED["llama"],
        "num_hidden_layers": 2,
        "model_type": "planted",
        "architectures": ["PlantedForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_planted.PlantedConfig",
            "AutoModelForCausalLM": "modeling_planted.PlantedForCausalLM",
        },
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mlp, layer = ("pass", statement) if is_in_layer else (statement, "pass")
    (folder / "modeling_planted.py").write_text(MODELLING.format(mlp=mlp, layer=layer))
    return str(folder)


def line_of(folder: str, code: str) -> int:
    lines = Path(folder, "modeling_planted.py").read_text().splitlines()
    return 1 + next(number for number, line in enumerate(lines) if line.strip() == code)
