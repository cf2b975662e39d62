"""The GPU is initialised while a start does something else."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from tcdeploy.engine.warm import gpu_initialization
from tcdeploy.engine.warm.gpu_initialization import initializing_gpu


def test_the_operators_run_on_any_device() -> None:
    gpu_initialization._use_libraries(torch.device("cpu"))


def test_an_error_is_left_to_the_start(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError(f"{threading.current_thread().name}: no memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_initialization, "_use_libraries", fail)
    with caplog.at_level(logging.DEBUG), initializing_gpu():
        pass
    assert "gpu-initialization: no memory" in caplog.text
