"""Dense models that are written in the formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.formats.checkpoint import save_source


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By family. All have inputs in multiples of 128."""
    folder = tmp_path_factory.mktemp("dense")
    return {name: save_source(folder / name, name) for name in ("llama", "qwen3_moe", "gpt_oss", "deepseek_v3")}


@pytest.fixture(scope="session")
def llama(sources: dict[str, Path]) -> Path:
    return sources["llama"]
