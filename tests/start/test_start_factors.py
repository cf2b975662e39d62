"""What is named if a start differs from the one that made its packages."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.models.location import BUILTIN_MODELS
from tcdeploy.planning.recipe import Recipe
from tcdeploy.start.record.factors import (
    IGNORED_FIELDS,
    NoStartRecordError,
    StartDifferences,
    StartFactors,
    compare_factors,
    require_start_factors,
    start_factors,
)

HERE = StartFactors(
    recipe={"context": 64, "buckets": [32, 128], "device": None},
    versions={"Python": "3.11.9", "tcdeploy": "1.0", "tokenizers": "0.22", "torch": "2.13.0"},
    sources="a",
    files={"config.json": "1", "model.safetensors": "2"},
)


@pytest.mark.parametrize(
    ("changes", "environment", "flags_and_files"),
    [
        ({}, (), ()),
        ({"recipe": {"context": None, "buckets": [32], "device": None}}, (),
         ("no --context (here 64)", "--buckets 32 (here 32,128)")),
        ({"recipe": {"context": 64, "device": "cpu", "removed": 1}}, (), ("--device cpu (here no --device)",)),
        ({"versions": {**HERE.versions, "tokenizers": ""}}, ("no tokenizers (here 0.22)",), ()),
        ({"versions": {**HERE.versions, "tcdeploy": "0.9"}, "sources": "b"}, ("tcdeploy 0.9 (here 1.0)",), ()),
        ({"sources": "b"}, ("other source files of tcdeploy 1.0",), ()),
        ({"files": {"config.json": "3", "merges.txt": "4"}}, (),
         ("another config.json", "merges.txt (missing here)", "other weights")),
        ({"files": {**HERE.files, "model.safetensors": "3", "model.safetensors.index.json": "4"}}, (),
         ("other weights",)),
        ({"files": {"model.safetensors": "2"}}, (), ("no config.json (here there is one)",)),
    ],
)  # fmt: skip
def test_versions_flags_and_files_that_differ_are_named(
    changes: dict[str, Any], environment: tuple[str, ...], flags_and_files: tuple[str, ...]
) -> None:
    differences = compare_factors(HERE, dataclasses.replace(HERE, **changes))
    assert differences == StartDifferences(environment, flags_and_files)
    assert differences.texts() == (*environment, *flags_and_files)


def test_factors_of_a_file_equal_those_of_the_start_that_wrote_it() -> None:
    recipe = Recipe(model="builtin:tiny", programs="aot", buckets=(32,), batch_sizes=(1, 4))
    factors = start_factors(recipe, BUILTIN_MODELS["builtin:tiny"])
    assert factors is not None
    assert StartFactors(**json.loads(json.dumps(dataclasses.asdict(factors)))) == factors
    assert set(factors.versions) == {"Python", "tcdeploy", "tokenizers", "torch"} and all(factors.versions.values())


@pytest.mark.parametrize(
    "changes",
    [
        {"recipe": {**HERE.recipe, "context": 128}}, {"sources": "b"}, {"files": {**HERE.files, "config.json": "3"}},
        *({"versions": {**HERE.versions, name: "9.0"}} for name in HERE.versions),
    ],
    ids=str,
)  # fmt: skip
def test_each_factor_changes_the_key(changes: dict[str, Any]) -> None:
    assert dataclasses.replace(HERE, **changes).key != HERE.key


def test_the_files_of_the_model_are_factors_and_its_path_and_name_are_not(tmp_path: Path) -> None:
    folder = BUILTIN_MODELS["builtin:tiny"]
    recipe = Recipe(model="builtin:tiny", programs="aot")
    for path in folder.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    copied = Recipe(model=str(tmp_path), programs="aot")
    assert start_factors(copied, tmp_path) == start_factors(recipe, folder)
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    here, there = start_factors(recipe, folder), start_factors(copied, tmp_path)
    assert here is not None and there is not None
    assert compare_factors(here, there).texts() == ("other weights",)


@pytest.mark.parametrize(
    "ignored",
    [{"revision": "1"}, {"cache_dir": "/elsewhere"}, {"on_bad_cache": "rebuild"}, {"trust_cache_dir": True},
     {"require_signed": True}, {"compile": False}],
    ids=str,
)  # fmt: skip
def test_fields_of_the_recipe_that_change_no_program_are_no_factors(ignored: dict[str, Any]) -> None:
    recipe, folder = Recipe(model="builtin:tiny", programs="aot"), BUILTIN_MODELS["builtin:tiny"]
    assert start_factors(dataclasses.replace(recipe, **ignored), folder) == start_factors(recipe, folder)
    assert {"model", *ignored} <= IGNORED_FIELDS


@pytest.mark.parametrize(
    ("changes", "has_folder", "reason"),
    [
        ({"programs": "jit"}, True, "starts without --programs aot have no start record"),
        ({"load_format": "dummy"}, True, "starts with random weights or --trust-remote-code have no start record"),
        ({"trust_remote_code": True}, True, "starts with random weights or --trust-remote-code have no start record"),
        ({}, False, "the files of org/model are not on this machine"),
        ({}, True, "{folder} has no weights as safetensors"),
    ],
)
def test_the_reason_is_given_if_starts_have_no_record(
    changes: dict[str, Any], has_folder: bool, reason: str, tmp_path: Path
) -> None:
    recipe = dataclasses.replace(Recipe(model="org/model", programs="aot"), **changes)
    folder = tmp_path if has_folder else None
    with pytest.raises(NoStartRecordError, match=re.escape(reason.format(folder=tmp_path))):
        require_start_factors(recipe, folder)
    assert start_factors(recipe, folder) is None


def test_damaged_weights_are_a_reason_too(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(NoStartRecordError, match=r"the model's files cannot be read: .*model\.safetensors"):
        require_start_factors(Recipe(model=str(tmp_path), programs="aot"), tmp_path)
