"""Weight files are read into the page cache before they are needed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.models.weights import read_ahead
from tcdeploy.models.weights.read_ahead import CHUNK_BYTES, is_cached, start_read_ahead
from tcdeploy.planning.recipe import Recipe
from tcdeploy.start import model_code
from tcdeploy.start import prepare as start


@pytest.fixture
def evicted(tmp_path: Path) -> tuple[Path, int]:
    """A file of three chunks that is not in the page cache, and a descriptor of it."""
    path = tmp_path / "weights.safetensors"
    path.write_bytes(os.urandom(1 << 20) * 40)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    if is_cached(descriptor, CHUNK_BYTES):
        pytest.skip("this file system keeps its files in memory")
    return path, descriptor


def test_all_chunks_are_read(evicted: tuple[Path, int]) -> None:
    path, descriptor = evicted
    threads = start_read_ahead([path.with_name("missing"), path])
    for thread in threads:
        thread.join()
    assert [is_cached(descriptor, begin) for begin in range(0, 40 << 20, CHUNK_BYTES)] == [True] * 3


def test_files_that_would_evict_each_other_are_not_read(
    evicted: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "host_memory_bytes", lambda: 79 << 20)
    assert start_read_ahead([evicted[0]]) == []


@pytest.mark.parametrize(("load_format", "files"), [("auto", ["model.safetensors"]), ("dummy", [])])
def test_a_start_reads_the_weights_of_its_model(
    load_format: Any, files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(start, "start_read_ahead", lambda paths: read.extend(path.name for path in paths))
    monkeypatch.setattr(model_code, "start_from_code", lambda *arguments: None)
    start.prepare(Recipe(model="builtin:tiny", load_format=load_format))
    assert read == files
