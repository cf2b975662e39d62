"""What is named if a start differs from the one that made its packages."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tcdeploy import start_factors as module
from tcdeploy.models.location import BUILTIN_MODELS
from tcdeploy.planning.recipe import Recipe
from tcdeploy.start_factors import StartDifferences, StartFactors, compare_factors, start_factors

HERE = StartFactors(
    recipe={"context": 64, "buckets": [32, 128], "device": None},
    versions={"Python": "3.11.9", "tcdeploy": "1.0", "tokenizers": "0.22", "torch": "2.13.0"},
    sources="a",
    files={"config.json": "1", "model.safetensors": "2"},
)


@pytest.mark.parametrize(
    ("changes", "environment", "request_texts"),
    [
        ({}, (), ()),
        ({"recipe": {"context": None, "buckets": [32], "device": None}}, (),
         ("--context unset (here 64)", "--buckets 32 (here 32,128)")),
        ({"versions": {**HERE.versions, "tokenizers": ""}}, ("tokenizers none (here 0.22)",), ()),
        ({"versions": {**HERE.versions, "tcdeploy": "0.9"}, "sources": "b"}, ("tcdeploy 0.9 (here 1.0)",), ()),
        ({"sources": "b"}, ("other source files of tcdeploy 1.0",), ()),
        ({"files": {"config.json": "3", "merges.txt": "4"}}, (),
         ("another config.json", "merges.txt (missing here)", "no model.safetensors (here there is one)")),
    ],
)  # fmt: skip
def test_versions_flags_and_files_that_differ_are_named(
    changes: dict[str, Any], environment: tuple[str, ...], request_texts: tuple[str, ...]
) -> None:
    differences = compare_factors(HERE, dataclasses.replace(HERE, **changes))
    assert differences == StartDifferences(environment, request_texts)
    assert len(differences) == len(environment) + len(request_texts)


def test_factors_of_a_file_equal_those_of_the_start_that_wrote_it() -> None:
    recipe = Recipe(model="builtin:tiny", programs="aot", buckets=(32,), batch_sizes=(1, 4))
    factors = start_factors(recipe, BUILTIN_MODELS["builtin:tiny"])
    assert factors is not None
    assert StartFactors(**json.loads(json.dumps(dataclasses.asdict(factors)))) == factors
    assert set(factors.versions) == {"Python", "tcdeploy", "tokenizers", "torch"} and all(factors.versions.values())


def test_each_factor_changes_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recipe, folder = Recipe(model="builtin:tiny", programs="aot"), BUILTIN_MODELS["builtin:tiny"]
    keys = [_key(recipe, folder), _key(dataclasses.replace(recipe, context=64), folder)]
    with monkeypatch.context() as patch:
        patch.setattr(module, "_version", lambda package: "9.0")
        keys.append(_key(recipe, folder))
    with monkeypatch.context() as patch:
        patch.setattr(module, "_own_sources", lambda: "other")
        keys.append(_key(recipe, folder))
    for path in folder.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    assert _key(recipe, tmp_path) == keys[0], "the folder's path is not a factor"
    (tmp_path / "generation_config.json").write_text("{}")
    keys.append(_key(recipe, tmp_path))
    assert len(set(keys)) == len(keys)
    assert _key(dataclasses.replace(recipe, cache_dir="/elsewhere"), folder) == keys[0]


def _key(recipe: Recipe, folder: Path) -> str:
    factors = start_factors(recipe, folder)
    assert factors is not None
    return factors.key
