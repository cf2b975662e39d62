from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def packages(filled_packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the ahead-of-time packages of the embedded model."""
    return Path(shutil.copytree(filled_packages, tmp_path_factory.mktemp("packages") / "cache"))
