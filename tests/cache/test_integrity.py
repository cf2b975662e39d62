"""Damaged files are found before torch loads any file, and are discarded only with --on-bad-cache rebuild."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.cache import contents, integrity
from tcdeploy.cache.manifest import read_manifest, write_manifest
from tcdeploy.errors import IntegrityError
from tests.conftest import RunCLI
from tests.model_families import save_config

BUCKETS = ("prefill:16", "decode:1")
KINDS: dict[str, Callable[[str], bool]] = {
    "library": lambda name: name.endswith(".so"),
    "generated code": lambda name: name.endswith(".py"),
    "fxgraph entry": lambda name: name.startswith("fxgraph/"),
    "aotautograd entry": lambda name: name.startswith("aotautograd/"),
    "compiler's output": lambda name: name.startswith("toolchain/"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_config("llama", tmp_path_factory.mktemp("model"), num_hidden_layers=2)


def warm(model: str, cache: Path, *more: str, prefill: str = "16") -> list[str]:
    buckets = ("--buckets", prefill, "--batch-sizes", "1")
    return ["warm", model, "--load-format", "dummy", *buckets, "--cache-dir", str(cache), "--json", *more]


@pytest.fixture(scope="module")
def warmed(model: str, tmp_path_factory: pytest.TempPathFactory, run_cli_in: RunCLI) -> Path:
    """A folder that a cold start filled."""
    home, cache = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("filled") / "cache"
    result = run_cli_in(home, *warm(model, cache))
    assert outcomes(result) == ["miss", "miss"]
    return cache


@pytest.fixture
def cache(warmed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(warmed, tmp_path / "cache"))


def outcomes(result: subprocess.CompletedProcess[str]) -> list[str]:
    assert result.returncode == 0, result.stderr
    records = json.loads(result.stdout)["buckets"]
    assert [record["bucket"] for record in records][-1] == BUCKETS[-1]
    assert all(record["parity"]["passed"] for record in records)
    return [record["outcome"] for record in records]


def manifest_of_cache(cache: Path) -> Path:
    [path] = (cache / "manifests").glob("*.json")
    return path


def listed_files(manifest: Path) -> list[str]:
    content = read_manifest(manifest)
    assert content is not None
    return [file.path for file in content.files]


def file_of_each_kind(cache: Path) -> dict[str, Path]:
    names = listed_files(manifest_of_cache(cache))
    return {kind: cache / next(filter(belongs, names)) for kind, belongs in KINDS.items()}


def flip(path: Path, seed: int = 0) -> None:
    """Flip a random bit."""
    content = bytearray(path.read_bytes())
    content[random.Random(seed).randrange(len(content))] ^= 1 << seed % 8
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace_by_link(path: Path) -> None:
    """A link to the same bytes, which may change later."""
    twin = path.rename(path.with_name("twin"))
    path.symlink_to(twin)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "one bit": (flip, "does not match its recorded sha256"),
    "cut": (cut, "bytes instead of"),
    "emptied": (lambda path: os.truncate(path, 0), "has 0 bytes instead of"),
    "gone": (Path.unlink, "is missing"),
    "a link": (replace_by_link, "is not a regular file"),
}


# Detection


@pytest.mark.parametrize("how", DAMAGES)
def test_every_listed_file_is_checked(cache: Path, how: str) -> None:
    """Damages and restores one file after the other. Without a start, by the function that every start calls."""
    manifest, (damage, reason) = manifest_of_cache(cache), DAMAGES[how]
    names = listed_files(manifest)
    assert all(any(map(belongs, names)) for belongs in KINDS.values())
    for number, name in enumerate(names):
        path = cache / name
        content = path.read_bytes()
        flip(path, number) if how == "one bit" else damage(path)
        with pytest.raises(IntegrityError) as caught:
            integrity.verify_and_clean(str(cache), manifest.stem, rebuild=False)
        assert str(path) in caught.value.message and reason in caught.value.message
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        (path.parent / "twin").unlink(missing_ok=True)
    assert integrity.verify_and_clean(str(cache), manifest.stem, rebuild=False) == read_manifest(manifest)


@pytest.mark.parametrize("kind", [*KINDS, "manifest"])
def test_a_start_refuses_a_single_flipped_bit_and_names_the_file(
    run_cli: Any, model: str, cache: Path, kind: str
) -> None:
    path = {**file_of_each_kind(cache), "manifest": manifest_of_cache(cache)}[kind]
    flip(path)
    damaged = {item: item.read_bytes() for item in cache.rglob("*") if item.is_file()}
    result = run_cli(*warm(model, cache))
    assert result.returncode == 5
    [error] = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert str(path) in error
    [hint] = [line for line in result.stderr.splitlines() if line.startswith("hint: ")]
    assert "nothing was loaded" in hint and "--on-bad-cache rebuild" in hint
    assert "compile ..." not in result.stderr.splitlines() and "Traceback" not in result.stderr
    after = {item: item.read_bytes() for item in cache.rglob("*") if item.is_file() and item.parent.name != "leases"}
    assert after == {item: content for item, content in damaged.items() if item.parent.name != "leases"}


def test_damaged_files_are_counted(run_cli: Any, model: str, cache: Path) -> None:
    """A truncated file, a missing one and a link in one start; the error names the first path."""
    paths = sorted(file_of_each_kind(cache).values())[:3]
    for path, how in zip(paths, ("cut", "gone", "a link"), strict=True):
        DAMAGES[how][0](path)
    result = run_cli(*warm(model, cache))
    assert result.returncode == 5
    assert f"error: the cache is damaged: {paths[0]} has" in result.stderr
    assert "and 2 more files are damaged" in result.stderr


# Discarding


def test_rebuild_discards_damaged_files_and_compiles_again(run_cli: Any, model: str, cache: Path) -> None:
    """A file of each kind, each damaged in another way; the start after the rebuild is warm."""
    paths = file_of_each_kind(cache)
    for path, (damage, _) in zip(paths.values(), DAMAGES.values(), strict=True):
        damage(path)
    before = {path: path.lstat().st_mtime_ns for path in cache.rglob("*.so")}
    rebuilt = run_cli(*warm(model, cache, "--on-bad-cache", "rebuild"))
    assert outcomes(rebuilt) == ["miss", "miss"]
    for path in listed_files(manifest_of_cache(cache)):
        assert not (cache / path).is_symlink() and path != "twin"
    unchanged = [path for path in before if path.exists() and path.lstat().st_mtime_ns == before[path]]
    assert before and unchanged == []
    assert outcomes(run_cli(*warm(model, cache, "--require-hit"))) == ["hit", "hit"]


def test_another_plan_in_the_folder_stays_warm_when_one_is_discarded(
    run_cli: Any, model: str, cache: Path, tmp_path: Path
) -> None:
    """They share the decode bucket's program, which the other plan still lists."""
    first = manifest_of_cache(cache)
    assert outcomes(run_cli(*warm(model, cache, prefill="32"))) == ["miss", "hit"]
    [other] = set((cache / "manifests").glob("*.json")) - {first}
    own = set(listed_files(first)) - set(listed_files(other))
    flip(cache / next(name for name in sorted(own) if name.endswith(".so")))
    flip(first)
    assert outcomes(run_cli(*warm(model, cache, "--require-hit", prefill="32"))) == ["hit", "hit"]
    rebuilt = run_cli(*warm(model, cache, "--on-bad-cache", "rebuild"))
    assert outcomes(rebuilt) == ["miss", "hit"]
    assert outcomes(run_cli(*warm(model, cache, "--require-hit", prefill="32"))) == ["hit", "hit"]


def test_discarding_keeps_only_undamaged_files_of_other_plans(cache: Path) -> None:
    """Without a start. Damaged files of the other plan and an unreadable manifest are removed too."""
    first = manifest_of_cache(cache)
    names = listed_files(first)
    manifest = read_manifest(first)
    assert manifest is not None
    valid, damaged = names[0], names[1]
    write_manifest(first.with_name("other.json"), of_plan("other", manifest_of(manifest, valid, damaged)))
    flip(cache / damaged)
    first.with_name("broken.json").write_text("{")
    (cache / "bundles" / "other").mkdir(parents=True)
    (cache / "bundles" / "other" / "index.json").write_text("{}")
    (cache / "ab").mkdir(exist_ok=True)
    (cache / "ab" / "unnamed.so").write_text("unlisted")
    integrity.discard_plan(str(cache), first.stem)
    assert contents.list_cache_files(cache) == [valid]
    assert sorted(path.name for path in (cache / "manifests").iterdir()) == ["other.json"]
    assert (cache / "bundles" / "other" / "index.json").exists()


def of_plan(key: str, manifest: Any) -> Any:
    return replace(manifest, plan={**manifest.plan, "key": key})


def manifest_of(manifest: Any, *names: str) -> Any:
    return replace(manifest, files=tuple(file for file in manifest.files if file.path in names))


def test_a_new_plan_is_refused_in_a_folder_with_damaged_files_of_other_plans(cache: Path) -> None:
    """Plans share programs, so the new plan might load the damaged file."""
    assert integrity.verify_and_clean(str(cache), "new", rebuild=False) is None
    path = file_of_each_kind(cache)["library"]
    flip(path)
    with pytest.raises(IntegrityError, match="does not match its recorded sha256"):
        integrity.verify_and_clean(str(cache), "new", rebuild=False)
    assert integrity.verify_and_clean(str(cache), "new", rebuild=True) is None
    assert not path.exists() and manifest_of_cache(cache).exists()


def test_a_folder_without_manifests_is_not_checked(tmp_path: Path) -> None:
    assert integrity.verify_and_clean(str(tmp_path), "any", rebuild=False) is None


def test_unlisted_files_that_torch_would_unpickle_are_removed(run_cli: Any, model: str, cache: Path) -> None:
    """torch unpickles every file of a key's folder until one matches, so an unlisted file could run code first."""
    manifest = read_manifest(manifest_of_cache(cache))
    assert manifest is not None
    entries = [cache / file.path for file in manifest.files if file.path.startswith(("fxgraph/", "aotautograd/"))]
    unlisted = [entry.with_name(name) for entry in entries for name in ("0", "zz")]
    poison = b"cos\nsystem\n(S'touch " + os.fsencode(cache / "poisoned") + b"'\ntR."
    unfinished = entries[0].with_name(".1.2.tmp")
    for path in (*unlisted, unfinished):
        path.write_bytes(poison)
    other_key = cache / "fxgraph" / "another" / "key"
    other_key.mkdir(parents=True)
    (other_key / "entry").write_bytes(b"of a start in progress")
    result = run_cli(*warm(model, cache, "--require-hit"))
    assert result.returncode == 0, result.stderr
    assert not (cache / "poisoned").exists()
    assert not any(path.exists() for path in unlisted) and all(entry.exists() for entry in entries)
    assert unfinished.exists(), "torch skips files that are being written"
    assert (other_key / "entry").exists(), "another key may belong to another start"


def test_an_entry_that_another_plan_lists_stays(cache: Path) -> None:
    manifest = manifest_of_cache(cache)
    known = read_manifest(manifest)
    assert known is not None
    mine, theirs = (file for file in known.files if file.path.startswith("fxgraph/"))
    shared = Path(mine.path).with_name("theirs").as_posix()
    (cache / shared).write_bytes((cache / theirs.path).read_bytes())
    others = of_plan("other", replace(known, files=(replace(theirs, path=shared),)))
    write_manifest(manifest.with_name("other.json"), others)
    assert integrity.verify_and_clean(str(cache), manifest.stem, rebuild=False) == known
    assert (cache / shared).exists()
    manifest.with_name("other.json").unlink()
    integrity.verify_and_clean(str(cache), manifest.stem, rebuild=False)
    assert not (cache / shared).exists()


def test_damage_in_a_private_copy_is_reported_with_the_original_folder(cache: Path) -> None:
    flip(file_of_each_kind(cache)["library"])
    with pytest.raises(IntegrityError, match="the cache is damaged: /baked/in/"):
        integrity.verify_and_clean(str(cache), manifest_of_cache(cache).stem, rebuild=False, display_path="/baked/in")
