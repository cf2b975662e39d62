"""The device that the kernels' tests run on: a GPU, or the CPU with Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attention.paged import CPU, CUDA, interpreted


@pytest.fixture(params=[CPU, CUDA])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "cuda":
        yield "cuda"
    else:
        with interpreted(monkeypatch):
            yield "cpu"
