"""The folder of --trace keeps the newest files, and each file has a limited size."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tcdeploy.cli.explain import MAX_TRACES, TRACE_PREFIX, new_trace_path
from tcdeploy.errors import OutputError


def test_the_oldest_traces_are_removed_and_other_files_kept(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "traces"
    folder.mkdir(parents=True)
    (folder / "notes.log").touch()
    for number in range(MAX_TRACES + 2):
        file = folder / f"{TRACE_PREFIX}{number}.log"
        file.touch()
        os.utime(file, (number, number))
    path = new_trace_path(folder)
    assert path.is_file()
    kept = {f"{TRACE_PREFIX}{number}.log" for number in range(3, MAX_TRACES + 2)}
    assert {file.name for file in folder.iterdir()} == {*kept, path.name, "notes.log"}


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="the trace cannot be written"):
        new_trace_path(tmp_path / "file" / "traces")
