"""Rotary embeddings of transformers are frozen; those of modelling code from a repository are not changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tcdeploy.errors import UnsupportedModelError
from tcdeploy.models.load import resolve_model_path
from tcdeploy.models.load_model import load_model
from tcdeploy.planning.recipe import Recipe
from tcdeploy.start.decide import decide
from tests.conftest import TINY

CODE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import dynamic_rope_update
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

class MyConfig(LlamaConfig):
    model_type = "mymodel_{name}"

class MyRotaryEmbedding(LlamaRotaryEmbedding):
    {decorator}
    def forward(self, x, position_ids):
        scale = 0.5 if self.rope_type == "dynamic" else 1.0
        angles = (self.inv_freq[None, None] * position_ids[..., None].float() * scale).repeat(1, 1, 2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

class MyForCausalLM(LlamaForCausalLM):
    config_class = MyConfig
    def __init__(self, config):
        super().__init__(config)
        self.model.rotary_emb = MyRotaryEmbedding(config)
"""


def save_remote_model(folder: Path, name: str, decorator: str) -> Recipe:
    shutil.copytree(resolve_model_path(TINY), folder)
    config = json.loads((folder / "config.json").read_text()) | {
        "model_type": f"mymodel_{name}",
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        "auto_map": {"AutoConfig": "modeling_my.MyConfig", "AutoModelForCausalLM": "modeling_my.MyForCausalLM"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_my.py").write_text(CODE.format(name=name, decorator=decorator))
    return Recipe(model=str(folder), trust_remote_code=True, dtype="float32")


def test_modelling_code_may_read_rope_type_itself(tmp_path: Path) -> None:
    recipe = save_remote_model(tmp_path / "model", "own", "")
    planned = decide(recipe)
    ids = torch.arange(5, 25)[None]
    expected = AutoModelForCausalLM.from_pretrained(recipe.model, trust_remote_code=True, dtype=torch.float32)(ids)
    torch.testing.assert_close(load_model(planned.plan, planned.config, "sdpa", ())(ids).logits, expected.logits)


def test_modelling_code_that_switches_frequencies_by_position_is_refused(tmp_path: Path) -> None:
    """transformers' decorator compares the longest position on the host."""
    recipe = save_remote_model(tmp_path / "model", "decorated", "@dynamic_rope_update")
    with pytest.raises(UnsupportedModelError, match="its forward pass reads values of tensors on the host"):
        decide(recipe)
