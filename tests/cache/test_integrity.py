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

from tcdeploy.cache.files import records
from tcdeploy.cache.record.manifest import Manifest, read_manifest, write_manifest
from tcdeploy.cache.record.unlisted import discard_plan, unlisted_files
from tcdeploy.cache.staging import restore as restore_module
from tcdeploy.cache.staging.folder import _own_folders, create_staging_folder, own_staging_folder
from tcdeploy.cache.staging.journal import JOURNAL
from tcdeploy.errors import IntegrityError
from tests.conftest import RunCLI, remove_headers
from tests.model_families import save_config

BUCKETS = ("prefill:16", "decode:1")
KINDS: dict[str, Callable[[str], bool]] = {
    "library": lambda name: name.endswith(".so"),
    "generated code": lambda name: name.endswith(".py"),
    "fxgraph entry": lambda name: name.startswith("fxgraph/"),
    "aotautograd entry": lambda name: name.startswith("aotautograd/"),
    "C++ source": lambda name: name.endswith(".cpp"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_config("llama", tmp_path_factory.mktemp("model"), num_hidden_layers=2)


def warm(model: str, cache: Path, *more: str, prefill: str = "16") -> list[str]:
    buckets = ("--buckets", prefill, "--batch-sizes", "1", "--programs", "jit")
    return ["warm", model, "--load-format", "dummy", *buckets, "--cache-dir", str(cache), "--json", *more]


@pytest.fixture(scope="module")
def warmed(model: str, tmp_path_factory: pytest.TempPathFactory, run_cli_in: RunCLI) -> Path:
    """A folder that a cold start filled."""
    home, cache = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("filled") / "cache"
    result = run_cli_in(home, *warm(model, cache))
    assert outcomes(result) == ["miss", "miss"]
    remove_headers(cache)
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


def shared_files(path: Path) -> tuple[list[str], list[str]]:
    """(files that other plans may use, references of the plan) of a manifest."""
    names = listed_files(path)
    references = [name for name in names if name.startswith("references/")]
    return [name for name in names if name not in references], references


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


def restore(cache: Path, plan_key: str, rebuild: bool = False) -> Manifest | None:
    """What a start does with the cache folder before it compiles."""
    return restore_module.restore_plan(
        own_staging_folder(str(cache)) or create_staging_folder(str(cache)), plan_key, rebuild
    )


def leave_staging_folder(cache: Path, plan_key: str | None) -> Path:
    """Create the staging folder of a killed start, with one finished bucket of `plan_key`, or none."""
    staging = create_staging_folder(str(cache))
    library = Path(staging.path, "ab", "library.so")
    library.parent.mkdir()
    shutil.copy(file_of_each_kind(cache)["library"], library)
    if plan_key:
        staging.add_to_journal(plan_key, ["ab/library.so"])
    os.close(staging._lock)  # as the kernel does when a process ends
    _own_folders.pop(os.path.realpath(cache))
    return Path(staging.path)


def files_of(cache: Path) -> dict[Path, bytes]:
    """The content of all files except leases."""
    return {item: item.read_bytes() for item in cache.rglob("*") if item.is_file() and item.parent.name != "leases"}


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
            restore(cache, manifest.stem)
        assert str(path) in caught.value.message and reason in caught.value.message
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        (path.parent / "twin").unlink(missing_ok=True)
    assert restore(cache, manifest.stem) == read_manifest(manifest)
    staging = own_staging_folder(str(cache), clear=False)
    assert staging is not None
    assert records.hash_files(staging.path, names) == records.hash_files(cache, names)


@pytest.mark.parametrize("kind", [*KINDS, "manifest"])
def test_a_start_refuses_a_single_flipped_bit_and_names_the_file(
    run_cli: Any, model: str, cache: Path, kind: str
) -> None:
    path = {**file_of_each_kind(cache), "manifest": manifest_of_cache(cache)}[kind]
    flip(path)
    damaged = files_of(cache)
    result = run_cli(*warm(model, cache))
    assert result.returncode == 5
    [error] = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert str(path) in error
    [hint] = [line for line in result.stderr.splitlines() if line.startswith("hint: ")]
    assert "nothing was loaded" in hint and "--on-bad-cache rebuild" in hint
    assert "compile ..." not in result.stderr.splitlines() and "Traceback" not in result.stderr
    assert files_of(cache) == damaged


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


@pytest.mark.long  # three cold starts
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
    discard_plan(str(cache), first.stem)
    assert records.list_cache_files(cache) == [valid]
    assert sorted(path.name for path in (cache / "manifests").iterdir()) == ["other.json"]
    assert (cache / "bundles" / "other" / "index.json").exists()


def of_plan(key: str, manifest: Any) -> Any:
    return replace(manifest, plan={**manifest.plan, "key": key})


def manifest_of(manifest: Any, *names: str) -> Any:
    return replace(manifest, files=tuple(file for file in manifest.files if file.path in names))


def test_a_new_plan_reuses_the_undamaged_files_of_other_plans(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Plans share programs, but no reference. A damaged file is not copied, and stays for `cache verify`."""
    assert restore(cache, "new") is None and not caplog.records
    staging = own_staging_folder(str(cache), clear=False)
    assert staging is not None
    names, references = shared_files(manifest_of_cache(cache))
    assert all(Path(staging.path, name).exists() for name in names)
    assert len(references) == 1 and not Path(staging.path, references[0]).exists()
    path = file_of_each_kind(cache)["library"]
    flip(path)
    assert restore(cache, "new") is None
    left = [name for name in names if not Path(staging.path, name).exists()]
    assert left == [path.relative_to(cache).as_posix()] and path.exists()
    assert f"1 files of other plans are damaged and not reused, for example {path}" in caplog.text


@pytest.mark.parametrize("content", ["{", "{}", ""])
def test_a_damaged_manifest_of_another_plan_does_not_stop_a_start(
    cache: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    own = manifest_of_cache(cache)
    own.with_name("other.json").write_text(content)
    assert restore(cache, own.stem) == read_manifest(own) and not caplog.records
    assert restore(cache, "new") is None
    assert "no programs of plan other are reused: the manifest" in caplog.text


def test_a_plan_that_is_replaced_during_a_start_is_read_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process unpacks a newer bundle, and deletes old files, after this one has read the manifest."""
    path = manifest_of_cache(cache)
    manifest = read_manifest(path)
    assert manifest is not None
    library = next(file for file in manifest.files if file.path.endswith(".so"))
    newer = replace(manifest, files=tuple(file for file in manifest.files if file != library))
    read_manifest_once = restore_module.read_manifest

    def read_then_replace(name: Path) -> Manifest | None:
        read = read_manifest_once(name)
        if (cache / library.path).exists():
            write_manifest(path, newer)
            (cache / library.path).unlink()
        return read

    monkeypatch.setattr(restore_module, "read_manifest", read_then_replace)
    assert restore(cache, path.stem) == newer


def test_rebuild_keeps_a_plan_that_another_process_has_just_repaired(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, library = manifest_of_cache(cache), file_of_each_kind(cache)["library"]
    content = library.read_bytes()
    flip(library)
    discard_if_damaged = restore_module.discard_if_damaged

    def repair_first(*arguments: Any) -> bool:
        library.write_bytes(content)
        return discard_if_damaged(*arguments)

    monkeypatch.setattr(restore_module, "discard_if_damaged", repair_first)
    assert restore(cache, path.stem, rebuild=True) == read_manifest(path) is not None


def test_files_that_no_manifest_lists_are_not_used(run_cli: Any, model: str, cache: Path) -> None:
    """torch unpickles every file of a key's folder until one matches, so an unlisted file could run code first."""
    manifest = read_manifest(manifest_of_cache(cache))
    assert manifest is not None
    entries = [cache / file.path for file in manifest.files if file.path.startswith(("fxgraph/", "aotautograd/"))]
    unlisted = [entry.with_name(name) for entry in entries for name in ("0", "zz")]
    poison = b"cos\nsystem\n(S'touch " + os.fsencode(cache / "poisoned") + b"'\ntR."
    for path in unlisted:
        path.write_bytes(poison)
    result = run_cli(*warm(model, cache, "--require-hit"))
    assert result.returncode == 0, result.stderr
    assert not (cache / "poisoned").exists()
    assert unlisted_files(cache) == sorted(path.relative_to(cache).as_posix() for path in unlisted)


@pytest.mark.parametrize("change", [None, cut, Path.unlink], ids=["whole", "cut", "missing"])
def test_without_a_manifest_nothing_is_used(cache: Path, change: Callable[[Path], None] | None) -> None:
    """A library of any content: what a start that was killed, or an unpacking, left behind."""
    manifest, library = manifest_of_cache(cache), file_of_each_kind(cache)["library"]
    key = manifest.stem
    manifest.unlink()
    if change:
        change(library)
    for rebuild in (False, True):
        assert restore(cache, key, rebuild) is None
        staging = own_staging_folder(str(cache), clear=False)
        assert staging is not None and records.list_cache_files(staging.path) == []


@pytest.mark.parametrize(
    ("plan", "is_left"),
    [("none", False), ("this", False), ("complete", False), ("another", True), ("of a newer version", True)],
)
def test_a_start_that_hits_removes_what_no_later_start_can_use(cache: Path, plan: str, is_left: bool) -> None:
    """A process that is killed after it has written its manifest leaves a journal of a plan that is complete."""
    manifest = manifest_of_cache(cache)
    keys = {"none": None, "this": manifest.stem, "complete": "c" * 16, "another": "f" * 16, "of a newer version": None}
    killed = leave_staging_folder(cache, keys[plan])
    write_manifest(manifest.with_name("c" * 16 + ".json"), of_plan("c" * 16, read_manifest(manifest)))
    if plan == "of a newer version":
        (killed / JOURNAL).write_text(json.dumps({"plan": "f" * 16, "programs": []}) + "\n")
    assert restore(cache, manifest.stem) is not None
    assert killed.exists() == is_left


@pytest.mark.parametrize("finished", [0, 1])
def test_a_start_reports_an_earlier_one_that_did_not_finish(
    cache: Path, caplog: pytest.LogCaptureFixture, finished: int
) -> None:
    killed = leave_staging_folder(cache, "f" * 16 if finished else None)
    assert restore(cache, "f" * 16) is None
    report = (
        "buckets or packages reused from starts that did not finish: 1"
        if finished
        else ("the folders of 1 killed processes had no buckets or packages to reuse")
    )
    assert [record.message for record in caplog.records] == [report]
    assert not killed.exists()


def test_a_plan_whose_process_found_programs_in_memory_also_gets_the_files_of_other_plans(cache: Path) -> None:
    manifest = manifest_of_cache(cache)
    known = read_manifest(manifest)
    assert known is not None
    names, _ = shared_files(manifest)
    write_manifest(manifest.with_name("other.json"), of_plan("other", known))
    for is_first_start, expected in ((True, names[:1]), (False, names)):
        write_manifest(manifest, replace(known, files=known.files[:1], is_first_start=is_first_start))
        assert restore(cache, manifest.stem) is not None
        staging = own_staging_folder(str(cache), clear=False)
        assert staging is not None and records.list_cache_files(staging.path) == expected
