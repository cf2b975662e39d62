"""A model that breaks: the error names the region, and --explain-breaks shows the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.model_families import SUPPORTED

MODELLING = """
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP


class BreakingConfig(LlamaConfig):
    model_type = "breaking"


class BreakingMLP(LlamaMLP):
    def forward(self, x):
        open("/dev/null").close()
        return super().forward(x)


class BreakingForCausalLM(LlamaForCausalLM):
    config_class = BreakingConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.__class__ = BreakingMLP
"""


@pytest.fixture
def breaking_model(tmp_path: Path) -> str:
    config = {
        **SUPPORTED["llama"],
        "model_type": "breaking",
        "architectures": ["BreakingForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_breaking.BreakingConfig",
            "AutoModelForCausalLM": "modeling_breaking.BreakingForCausalLM",
        },
    }
    folder = tmp_path / "breaking"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_breaking.py").write_text(MODELLING)
    return str(folder)


def arguments(model: str, cache: Path, *more: str) -> list[str]:
    return [model, "--load-format", "dummy", "--buckets", "16", "--batch-sizes", "1", "--cache-dir", str(cache), *more]


def test_modelling_code_of_a_model_runs_only_if_trusted(run_cli: Any, breaking_model: str, tmp_path: Path) -> None:
    result = run_cli("compile", *arguments(breaking_model, tmp_path / "cache"))
    assert result.returncode == 1
    assert "requires modelling code from its repository" in result.stderr and "--trust-remote-code" in result.stderr


def test_a_graph_break_is_an_error_that_explain_breaks_locates(
    run_cli: Any, breaking_model: str, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    failed = run_cli("compile", *arguments(breaking_model, cache, "--trust-remote-code"))
    assert failed.returncode == 1
    assert "has a graph break with --region layer" in failed.stderr
    assert "--explain-breaks" in failed.stderr
    explained = run_cli(
        "compile", *arguments(breaking_model, cache, "--trust-remote-code", "--explain-breaks", "--json")
    )
    assert explained.returncode == 0, explained.stderr
    breaks = json.loads(explained.stdout)["breaks"]
    assert breaks and breaks[0]["region"] == "LlamaDecoderLayer"
    assert breaks[0]["file"].endswith("modeling_breaking.py")
    assert 'open("/dev/null")' in breaks[0]["source"]


def test_a_model_without_graph_breaks_has_nothing_to_explain(run_cli: Any, tmp_path: Path) -> None:
    from tests.model_families import save_config

    folder = save_config("llama", tmp_path / "llama")
    result = run_cli("compile", *arguments(folder, tmp_path / "cache", "--explain-breaks"))
    assert result.returncode == 0, result.stderr
    assert "no graph breaks" in result.stdout
