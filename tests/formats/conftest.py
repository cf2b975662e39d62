"""Dense models that are written in the formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.formats.checkpoint import save_source


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("dense") / "llama")
