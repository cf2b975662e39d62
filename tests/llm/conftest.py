"""An `AsyncLLM` with the deployment that tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tcdeploy import AsyncLLM
from tcdeploy.llm import async_llm as async_module
from tcdeploy.start import deployment as deployment_module
from tests.conftest import TINY


@pytest.fixture
def make_async_llm(tiny_deployment: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[], AsyncLLM]:
    """Closing it does not free the shared deployment."""
    monkeypatch.setattr(async_module, "prepare", lambda *_, **__: tiny_deployment)
    monkeypatch.setattr(deployment_module, "release_memory", lambda: None)
    return lambda: AsyncLLM(TINY)
