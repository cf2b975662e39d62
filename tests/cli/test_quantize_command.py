"""`tcdeploy quantize` checks its words before torch is imported, and reports what it has written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_cli_usage import refused, run

TINY = "builtin:tiny"


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (("--to", "int9"), "--to is 'int9'; it must be fp8, int8, int4 or int4:GROUP", "--to fp8"),
        (("--to", "int8:64"), "--to is int8:64, but int8 has one scale for each row", "--to int8"),
        (("--to", "int4:12"), "--to is int4:12; a group must be a multiple of 8", "--to int4:128"),
        ((), "missing option '--to'", ""),
    ],
)
def test_wrong_numbers_are_refused(words: tuple[str, ...], error: str, hint: str, tmp_path: Path) -> None:
    found = refused("quantize", TINY, str(tmp_path / "out"), *words)
    assert found[0].lower() == error.lower() and hint in found[1]
    assert list(tmp_path.iterdir()) == []


def test_the_report_has_layers_bytes_and_seconds(tmp_path: Path) -> None:
    """Nothing but the document is on stdout; the stages are on stderr."""
    out = tmp_path / "out"
    completed = run("quantize", TINY, str(out), "--to", "int4", "--skip", "layers.0", "--json")
    assert completed.returncode == 0, completed.stderr
    document = json.loads(completed.stdout)
    assert document["command"] == "quantize"
    saved = document["saved"]
    assert saved.pop("seconds") > 0 and [line["value"] for line in saved.pop("dense")] == ["7", "30"]
    written = saved.pop("written_bytes")
    assert saved == {"path": str(out), "format": "int4:128", "quantised": 5, "read_bytes": 5510016}
    assert 0 < (out / "model.safetensors").stat().st_size - written < 16_384
    assert [line.split()[0] for line in completed.stderr.splitlines()] == ["import", "decide", "quantise"]
    again = tmp_path / "again"
    layers, weights, following = run("quantize", TINY, str(again), "--to", "int4").stdout.splitlines()
    assert layers.removeprefix(f"{again}: ") == (
        "6 linear layers in int4:128; 36 stay dense: groups of 128 do not divide their 192 columns"
    )
    assert weights.startswith("weights: 0.01 GB read and 0.00 GB written in ")
    assert following == f"next: tcdeploy serve {again}"


def test_a_folder_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    completed = run("quantize", TINY, str(tmp_path), "--to", "fp8")
    assert (completed.returncode, completed.stdout) == (2, "")
    assert completed.stderr.splitlines()[-2:] == [
        f"error: {tmp_path} exists already", "hint: name a new or an empty folder"
    ]  # fmt: skip
