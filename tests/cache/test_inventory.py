"""Inventory and garbage collection of a cache folder; plans that are in use or came from a bundle stay."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tcdeploy.bundle.unpack import unpack
from tcdeploy.bundle.verify import verify_folder
from tcdeploy.cache.folder.layout import manifest_path
from tcdeploy.cache.folder.leases import acquire_lease, folder_lock, is_leased
from tcdeploy.cache.inventory import LEFTOVER_AGE_SECONDS, collect_garbage, kind_of, list_plans, usage_by_kind
from tcdeploy.cache.record.manifest import Manifest, write_manifest
from tcdeploy.cache.record.unlisted import discard_plan
from tcdeploy.cache.staging.activate import _ensure_writable
from tcdeploy.cache.staging.folder import create_staging_folder
from tcdeploy.cli import cache_inspect
from tcdeploy.errors import IntegrityError, TrustError
from tcdeploy.host.temporary_files import HOST
from tests.bundle.conftest import Keys, Packed
from tests.bundle.fake_caches import Child, contents, fill, key_of, listing, make_small, manifest_for, path_of
from tests.conftest import mounted_tmpfs
from tests.fork_server import ForkServer
from tests.server.conftest import serving

DAY = 86400.0
SHARED = {"fxgraph/shared": 1000}
HOLD_LEASE = """
import sys
from tcdeploy.cache.folder.leases import acquire_lease
acquire_lease(sys.argv[1], sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
"""


TRY_LOCK = """
import fcntl, sys
with open(sys.argv[1] + "/.lock", "rb") as file:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        print("locked", flush=True)
    else:
        print("free", flush=True)
"""


def add_plan(folder: Path, bucket: int, days: float, size: int = 500) -> Manifest:
    """A plan with one unique file and one that all plans share, last started `days` ago."""
    names = fill(folder, {f"6n/own-{bucket}.so": size}, seed=bucket) + fill(folder, SHARED)
    manifest = manifest_for(folder, names, bucket)
    write_manifest(path_of(folder, manifest), manifest)
    age(path_of(folder, manifest), days)
    return manifest


def age(path: Path, days: float) -> None:
    moment = time.time() - days * DAY
    os.utime(path, (moment, moment))


@pytest.fixture
def three(tmp_path: Path) -> tuple[Path, list[str]]:
    """Plans of 500, 2000 and 500 bytes and what they share, last started 1, 5 and 30 days ago."""
    folder = tmp_path / "cache"
    sizes = {32: (1, 500), 64: (5, 2000), 128: (30, 500)}
    return folder, [key_of(add_plan(folder, bucket, days, size)) for bucket, (days, size) in sizes.items()]


def keys_in(folder: Path) -> list[str]:
    return [entry.plan_key for entry in list_plans(folder)]


# ls and du


def test_plans_are_listed_by_their_last_start(three: tuple[Path, list[str]]) -> None:
    folder, keys = three
    entries = list_plans(folder)
    assert [entry.plan_key for entry in entries] == keys
    assert [round(entry.age_seconds / DAY) for entry in entries] == [1, 5, 30]
    assert [(entry.files, entry.bytes, entry.unique_bytes) for entry in entries] == [
        (2, 1500, 500), (2, 3000, 2000), (2, 1500, 500),
    ]  # fmt: skip
    first = entries[0]
    assert (first.model, first.buckets, first.cold_seconds) == ("someone/model", ("prefill:32", "decode:1"), 25.0)
    assert (first.is_leased, first.is_from_bundle, first.was_warm) == (False, False, True)


def test_a_plan_from_a_bundle_and_a_plan_without_a_warm_start_are_marked(
    small: Packed, keys: Keys, tmp_path: Path
) -> None:
    unpack(small.bundle, tmp_path, keys.trusted)
    other = manifest_for(tmp_path, fill(tmp_path, {"6n/x.so": 9}), bucket=64, outcome="miss")
    write_manifest(path_of(tmp_path, other), other)
    flags = {entry.plan_key: (entry.is_from_bundle, entry.was_warm) for entry in list_plans(tmp_path)}
    assert flags == {small.key: (True, True), key_of(other): (False, False)}


def test_an_empty_folder_has_no_plans_and_no_usage(tmp_path: Path) -> None:
    assert (list_plans(tmp_path), usage_by_kind(tmp_path)) == ([], {})


def test_a_damaged_manifest_is_an_error(three: tuple[Path, list[str]]) -> None:
    folder, keys = three
    path = manifest_path(folder, keys[1])
    path.write_bytes(path.read_bytes()[:-3])
    for look in (list_plans, usage_by_kind, lambda folder: collect_garbage(folder, 0.0, None)):
        with pytest.raises(IntegrityError, match=keys[1]):
            look(folder)  # type: ignore[operator]
    assert len(contents(folder)) == 7, "nothing was removed"


def test_usage_is_listed_by_kind_with_the_largest_first(three: tuple[Path, list[str]]) -> None:
    folder, _ = three
    fill(folder, {"fxgraph/loser": 50, "triton/AB/loser.cubin": 70})
    assert usage_by_kind(folder) == {
        "compiled C++": (3, 3000), "Inductor's graphs": (1, 1000), "listed by no plan": (2, 120),
    }  # fmt: skip
    assert list(usage_by_kind(folder)) == ["compiled C++", "Inductor's graphs", "listed by no plan"]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("fxgraph/ab/x/y", "Inductor's graphs"), ("aotautograd/x/y", "AOTAutograd's graphs"),
        ("triton/x/k.so", "Triton's kernels"), ("6n/x.so", "compiled C++"),
        ("6n/x.main.cpp", "C++ sources"), ("6n/x.py", "generated Python"), ("6n/x.best_config", "autotune winners"),
        ("6n/x", "other"),
    ],
)  # fmt: skip
def test_a_file_s_kind_follows_from_its_folder_and_suffix(path: str, kind: str) -> None:
    assert kind_of(path) == kind


def test_the_inventory_of_a_read_only_folder_writes_nothing(
    run_cli: Callable[..., Any], three: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, keys = three
    (folder / "leases").mkdir()
    before = listing(folder)
    assert keys_in(folder) == keys and usage_by_kind(folder) and not is_leased(folder, keys[0])
    assert listing(folder) == before
    with mounted_tmpfs(tmp_path / "image") as image:
        subprocess.run(["cp", "-a", f"{folder}/.", str(image)], check=True)
        subprocess.run(["mount", "-o", "remount,ro", str(image)], check=True)
        for command in ("ls", "du"):
            result = run_cli("cache", command, str(image))
            assert result.returncode == 0, result.stderr
        result = run_cli("cache", "gc", str(image), "--older-than", "0s")
        assert result.returncode == 1
        assert f"error: the cache folder {image} is on a read-only file system" in result.stderr


# gc


def test_without_limits_no_plan_is_removed(three: tuple[Path, list[str]]) -> None:
    folder, keys = three
    before = contents(folder)
    removed = collect_garbage(folder, None, None)
    assert (removed.plan_keys, removed.files, removed.bytes, removed.retained) == ((), 0, 0, ())
    assert contents(folder) == before and keys_in(folder) == keys


def test_old_plans_are_removed_and_shared_files_stay(three: tuple[Path, list[str]]) -> None:
    folder, keys = three
    removed = collect_garbage(folder, 3 * DAY, None)
    assert (set(removed.plan_keys), removed.files, removed.bytes) == (set(keys[1:]), 2, 2500)
    assert keys_in(folder) == keys[:1]
    assert set(contents(folder)) == {"6n/own-32.so", "fxgraph/shared", f"manifests/{keys[0]}.json"}
    assert len(verify_folder(folder, folder)) == 1, "the remaining plan is whole"


def test_shared_files_are_removed_with_the_last_plan(three: tuple[Path, list[str]]) -> None:
    folder, keys = three
    removed = collect_garbage(folder, 0.0, None)
    assert (len(removed.plan_keys), removed.files, removed.bytes) == (3, 4, 4000)
    assert contents(folder) == {} and not (folder / "6n").exists(), "no empty folders are left"


@pytest.mark.parametrize(
    ("max_bytes", "remaining"), [(10_000, 3), (4000, 3), (3999, 2), (3500, 2), (3499, 1), (1500, 1), (1499, 0), (0, 0)]
)
def test_the_least_recently_used_plans_are_removed_until_the_rest_fits(
    three: tuple[Path, list[str]], max_bytes: int, remaining: int
) -> None:
    """A plan counts with all its files; a file that several plans share counts once."""
    folder, keys = three
    removed = collect_garbage(folder, None, max_bytes)
    assert keys_in(folder) == keys[:remaining] and set(removed.plan_keys) == set(keys[remaining:])


def test_a_dry_run_reports_the_same_and_removes_nothing(three: tuple[Path, list[str]]) -> None:
    folder, _ = three
    before = listing(folder)
    reported = collect_garbage(folder, 3 * DAY, None, is_dry_run=True)
    assert listing(folder) == before
    assert collect_garbage(folder, 3 * DAY, None) == reported and reported.files == 2


def test_a_plan_in_use_by_another_process_stays_until_that_ends(
    three: tuple[Path, list[str]],
) -> None:
    folder, keys = three
    with Child(HOLD_LEASE, folder, keys[2]) as child:
        assert child.line() == "ready"
        assert [entry.is_leased for entry in list_plans(folder)] == [False, False, True]
        removed = collect_garbage(folder, 0.0, 0)
        assert removed.retained == ((keys[2], "it is in use by a running process"),)
        assert keys_in(folder) == [keys[2]]
        assert {"6n/own-128.so", "fxgraph/shared"} <= set(contents(folder))
        assert len(verify_folder(folder, folder)) == 1
    assert not is_leased(folder, keys[2]), "a killed process has no lease"
    assert collect_garbage(folder, 0.0, 0).plan_keys == (keys[2],)


def test_the_lease_file_of_a_removed_plan_stays(three: tuple[Path, list[str]]) -> None:
    """If it were deleted, a process that had opened it would hold a lock that no other process sees."""
    folder, keys = three
    with Child(HOLD_LEASE, folder, keys[2]) as child:
        child.line()
    lease = folder / "leases" / keys[2]
    before = lease.stat().st_ino
    assert keys[2] in collect_garbage(folder, 0.0, None).plan_keys
    assert lease.stat().st_ino == before


def test_a_start_waits_for_a_collection_in_progress(three: tuple[Path, list[str]]) -> None:
    """No lease can be taken between the check for leases and the removal."""
    folder, keys = three
    lease = folder / "leases" / keys[0]
    with Child(HOLD_LEASE, folder, keys[0]) as child:
        child.line()
    lease.unlink()
    with folder_lock(folder):
        imported = "import tcdeploy.cache.folder.leases\nprint('before the lease', flush=True)\n"
        with Child(imported + HOLD_LEASE, folder, keys[0]) as child:
            assert child.line() == "before the lease"
            time.sleep(0.5)
            assert not lease.exists(), "it waits for the lock"
    with Child(HOLD_LEASE, folder, keys[0]) as child:
        assert child.line() == "ready" and is_leased(folder, keys[0])


def test_a_plan_in_use_by_this_process_stays(three: tuple[Path, list[str]]) -> None:
    folder, keys = three
    acquire_lease(str(folder), keys[0])
    assert collect_garbage(folder, 0.0, None).retained == ((keys[0], "it is in use by a running process"),)


def test_plans_that_must_stay_are_counted_first(three: tuple[Path, list[str]]) -> None:
    """Of 3,999 bytes the oldest plan, in use, takes 1,500 and the newest 500 more; the third does not fit."""
    folder, keys = three
    with Child(HOLD_LEASE, folder, keys[2]) as child:
        child.line()
        assert collect_garbage(folder, None, 3999).plan_keys == (keys[1],)
    assert keys_in(folder) == [keys[0], keys[2]]


def test_a_plan_from_a_bundle_stays_at_any_age(small: Packed, keys: Keys, tmp_path: Path) -> None:
    unpack(small.bundle, tmp_path, keys.trusted)
    age(manifest_path(tmp_path, small.key), 1000)
    other = key_of(add_plan(tmp_path, 64, days=1))
    removed = collect_garbage(tmp_path, 0.0, 0)
    assert removed.plan_keys == (other,) and removed.retained == ((small.key, "it was imported from a bundle"),)
    assert len(verify_folder(tmp_path, keys.trusted)) == 1


@pytest.mark.parametrize("hours", [0, 23, 25])
def test_old_leftovers_are_removed(three: tuple[Path, list[str]], hours: float) -> None:
    folder, keys = three
    fill(folder, {"fxgraph/leftover": 40, "triton/XY/leftover.cubin": 60})
    for name in ("fxgraph/leftover", "triton/XY/leftover.cubin"):
        age(folder / name, hours / 24)
    removed = collect_garbage(folder, None, None)
    assert (removed.files, removed.bytes) == ((2, 100) if hours * 3600 > LEFTOVER_AGE_SECONDS else (0, 0))
    assert (folder / "fxgraph/leftover").exists() == (hours < 24) and keys_in(folder) == keys


def test_old_leftovers_are_removed_during_a_start(three: tuple[Path, list[str]]) -> None:
    """The start works in its staging folder, which stays, with copies of what it uses."""
    folder, keys = three
    fill(folder, {"fxgraph/leftover": 40})
    age(folder / "fxgraph/leftover", 2)
    staging = create_staging_folder(str(folder))
    staged = fill(Path(staging.path), {"fxgraph/in-use": 10})
    removed = collect_garbage(folder, 3 * DAY, None)
    assert set(removed.plan_keys) == set(keys[1:])
    assert not (folder / "6n/own-64.so").exists() and not (folder / "fxgraph/leftover").exists()
    assert Path(staging.path, *staged).exists()


def test_headers_and_staging_folders_of_killed_starts_are_removed(three: tuple[Path, list[str]]) -> None:
    folder, keys = three
    killed = f".start-{HOST}-killed"
    fill(folder, {"precompiled_headers/x.h": 5, "precompiled_headers/x.h.gch": 1000, f"{killed}/fxgraph/y": 50})
    usage = usage_by_kind(folder)
    assert usage["precompiled headers"] == (2, 1005) and usage["staging folders of starts"] == (1, 50)
    removed = collect_garbage(folder, None, None)
    assert (removed.plan_keys, removed.files, removed.bytes) == ((), 3, 1055)
    assert not (folder / killed).exists() and not list(folder.glob("precompiled_headers/*"))
    assert keys_in(folder) == keys


LEFTOVERS = {
    ".unpack-killed/fxgraph/ab/file": 3000,  # of an unpack
    ".unpack-killed/.manifest": 500,
    "6n/.0123456789abcdef.tmp": 40,  # of the publication of a start
    "fxgraph/ab/c/.0123456789abcdef.tmp": 30,
    "conflicts/.0123456789abcdef.tmp": 20,
    "manifests/.0123456789abcdef-4711-140213.tmp": 9,
    ".writable-a1b2c3d4": 1,
}


def test_leftovers_of_killed_unpacks_and_publications_are_counted_and_removed(three: tuple[Path, list[str]]) -> None:
    folder, keys = three
    before = contents(folder)
    fill(folder, LEFTOVERS)
    (folder / ".unpack-killed" / "empty" / "folder").mkdir(parents=True)
    usage = usage_by_kind(folder)
    assert usage["staging folders of unpacks"] == (2, 3500) and usage["temporary files"] == (5, 100)
    assert "listed by no plan" not in usage and usage["compiled C++"] == (3, 3000)
    reported = collect_garbage(folder, None, None, is_dry_run=True)
    assert contents(folder).keys() == before.keys() | LEFTOVERS.keys()
    assert collect_garbage(folder, None, None) == reported
    assert (reported.plan_keys, reported.files, reported.bytes) == ((), 7, 3600)
    assert contents(folder) == before and keys_in(folder) == keys
    assert not (folder / ".unpack-killed").exists() and not (folder / "fxgraph/ab/c").exists()
    assert collect_garbage(folder, None, None).files == 0


def test_a_folder_without_plans_stays_a_cache_folder(tmp_path: Path) -> None:
    """A start was killed while it wrote its first manifest."""
    fill(tmp_path, {"manifests/.0123456789abcdef-4711-140213.tmp": 9})
    assert collect_garbage(tmp_path, None, None).files == 1
    assert (tmp_path / "manifests").is_dir()


def test_the_staging_folder_of_a_running_unpack_stays(three: tuple[Path, list[str]]) -> None:
    """Garbage collection waits for the lock, which the unpack holds until it has removed the folder."""
    folder, _ = three
    with ThreadPoolExecutor(1) as pool, folder_lock(folder):
        fill(folder, LEFTOVERS)
        collecting = pool.submit(collect_garbage, folder, None, None)
        with pytest.raises(TimeoutError):
            collecting.result(0.3)
        assert contents(folder).keys() >= LEFTOVERS.keys()
        shutil.rmtree(folder / ".unpack-killed")
        for name in LEFTOVERS:
            (folder / name).unlink(missing_ok=True)
    assert collecting.result().files == 0


def test_a_start_tests_under_the_lock_whether_the_folder_is_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise garbage collection could remove its test file, on a disk without files that have no name."""
    lock_states = []
    create = tempfile.TemporaryFile

    def create_if_locked(*arguments: Any, **options: Any) -> Any:
        with Child(TRY_LOCK, tmp_path) as child:
            lock_states.append(child.line())
        return create(*arguments, **options)

    monkeypatch.setattr(tempfile, "TemporaryFile", create_if_locked)
    _ensure_writable(str(tmp_path))
    assert lock_states == ["locked"]


@pytest.mark.parametrize("name", [".unpack-x", f".start-{HOST}-x"])
def test_links_to_other_folders_are_removed_and_not_followed(
    three: tuple[Path, list[str]], tmp_path: Path, name: str
) -> None:
    folder, _ = three
    fill(tmp_path / "outside", {"thesis.txt": 10, "folder/thesis.txt": 10})
    (folder / name).symlink_to(tmp_path / "outside")
    fill(folder, {f"{name}-2/file": 7})
    (folder / f"{name}-2" / "link").symlink_to(tmp_path / "outside")
    assert sum(size for kind, (_, size) in usage_by_kind(folder).items() if kind.startswith("staging")) == 7
    assert collect_garbage(folder, None, None).files == 3
    assert set(contents(tmp_path / "outside")) == {"thesis.txt", "folder/thesis.txt"}
    assert not list(folder.glob(f"{name}*"))


def test_files_that_no_plan_lists_can_be_removed_at_any_age(
    run_cli: Callable[..., Any], three: tuple[Path, list[str]]
) -> None:
    folder, keys = three
    fill(folder, {"fxgraph/leftover": 40, "conflicts/" + "a" * 64: 60, "docs/thesis.txt": 10})
    tomorrow = time.time() + DAY
    os.utime(folder / "fxgraph/leftover", (tomorrow, tomorrow))
    assert collect_garbage(folder, None, None).files == 0
    result = run_cli("cache", "gc", str(folder), "--unlisted", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["plan_keys"], document["files"], document["bytes"]) == ([], 2, 100)
    assert keys_in(folder) == keys and (folder / "docs/thesis.txt").exists()


def test_the_command_that_verify_recommends_after_a_killed_publication_works_at_once(
    run_cli: Callable[..., Any], three: tuple[Path, list[str]]
) -> None:
    """The killed start had copied its files, and not yet written its manifest."""
    folder, keys = three
    fill(folder, {"fxgraph/published": 40, "6n/published.so": 60})
    result = run_cli("cache", "verify", str(folder))
    assert result.returncode == 5, result.stderr
    [command] = [part for part in result.stderr.split(": ") if part.startswith("tcdeploy cache gc")]
    assert run_cli(*command.split()[1:]).returncode == 0
    result = run_cli("cache", "verify", str(folder))
    assert result.returncode == 0, result.stderr
    assert keys_in(folder) == keys


def test_a_folder_that_disappears_after_gc_has_found_it_is_refused(
    three: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In /tmp, another user could create it again after the check."""
    folder, _ = three

    def find_and_remove(path: Path) -> Path:
        shutil.rmtree(path)
        return path

    monkeypatch.setattr(cache_inspect, "find_cache_folder", find_and_remove)
    with pytest.raises(TrustError, match=f"the cache folder {folder} was removed by another process"):
        cache_inspect.collect_garbage(folder)


def test_bookkeeping_is_never_a_leftover(three: tuple[Path, list[str]]) -> None:
    folder, keys = three
    fill(folder, {"locks/x": 5, "bundles/y": 5, "fxgraph/.hidden": 5, "fxgraph/x.lock": 5})
    for name in ("locks/x", "bundles/y", "fxgraph/.hidden", "fxgraph/x.lock"):
        age(folder / name, 10)
    assert collect_garbage(folder, None, None).files == 0


# The commands


def test_the_commands_ls_du_and_gc(run_cli: Callable[..., Any], three: tuple[Path, list[str]]) -> None:
    folder, keys = three
    listed = run_cli("cache", "ls", str(folder))
    assert listed.returncode == 0 and all(key in listed.stdout for key in keys), listed.stderr
    assert [
        plan["plan_key"] for plan in json.loads(run_cli("cache", "ls", str(folder), "--json").stdout)["plans"]
    ] == keys
    (plan, *_) = json.loads(run_cli("cache", "ls", "--cache-dir", str(folder), "--json").stdout)["plans"]
    assert plan["plan_key"] == keys[0] and plan["compute_dtype"]
    assert keys[0] in run_cli("cache", "ls", TCDEPLOY_CACHE_DIR=str(folder)).stdout
    assert keys[0] in run_cli("cache", "ls", TORCHINDUCTOR_CACHE_DIR=str(folder)).stdout
    unfilled = run_cli("cache", "ls")
    assert unfilled.returncode == 2 and "/.cache/tcdeploy is not a cache folder" in unfilled.stderr
    assert json.loads(run_cli("cache", "du", str(folder), "--json").stdout)["kinds"]["compiled C++"]["bytes"] == 3000
    dry = run_cli("cache", "gc", str(folder), "--older-than", "3d", "--dry-run")
    assert "would remove 2 plans, 2 files" in dry.stdout and keys_in(folder) == keys
    assert "removed 2 plans, 2 files" in run_cli("cache", "gc", str(folder), "--older-than", "72h").stdout
    assert keys_in(folder) == keys[:1]
    assert "removed 1 plans" in run_cli("cache", "gc", str(folder), "--max-size", "1k").stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("--older-than", "3"), ("--older-than", "3y"), ("--older-than", "-1d"), ("--max-size", "5t"),
        ("--max-size", ""),
    ],
)  # fmt: skip
def test_an_invalid_quantity_removes_nothing(
    run_cli: Callable[..., Any], three: tuple[Path, list[str]], arguments: tuple[str, str]
) -> None:
    folder, keys = three
    result = run_cli("cache", "gc", str(folder), *arguments)
    assert result.returncode == 2, result.stdout
    assert keys_in(folder) == keys


def test_a_folder_that_is_no_cache_folder_is_a_usage_error(run_cli: Callable[..., Any], tmp_path: Path) -> None:
    mine = tmp_path / "mine" / "docs"
    mine.mkdir(parents=True)
    (mine / "thesis.txt").write_text("years of work")
    os.utime(mine / "thesis.txt", (0, 0))
    for command in ("ls", "du", "gc"):
        for folder in (tmp_path / "nowhere", tmp_path / "mine"):
            result = run_cli("cache", command, str(folder))
            assert result.returncode == 2 and "is not a cache folder" in result.stderr
    assert (mine / "thesis.txt").exists()


def test_files_of_other_programs_are_never_removed(tmp_path: Path) -> None:
    """Neither by garbage collection nor by a rebuild, at any age."""
    manifest = make_small(tmp_path / "cache")
    others = [
        "docs/thesis.txt", ".git/config", "fxgraph/.hidden/x", "src/a/main.c", "ab/sub/file", "notes",
        ".git/.0123456789abcdef.tmp", "docs/.0123456789abcdef.tmp", ".0123456789abcdef.tmp", "manifests/notes.tmp",
        "fxgraph/.notes.tmp", "docs/.writable-a1b2c3d4", "docs/.unpack-x/file",
    ]  # fmt: skip
    for name in others:
        path = tmp_path / "cache" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
        os.utime(path, (0, 0))
    removed = collect_garbage(tmp_path / "cache", 0.0, 0)
    assert removed.files == len(manifest.files)
    assert all((tmp_path / "cache" / name).exists() for name in others)
    make_small(tmp_path / "cache")
    discard_plan(str(tmp_path / "cache"), key_of(manifest))
    assert all((tmp_path / "cache" / name).exists() for name in others)
    assert not (tmp_path / "cache" / manifest.files[0].path).exists()


def test_the_plan_of_a_running_server_stays(
    run_cli: Callable[..., Any], tmp_path: Path, fork_server: ForkServer
) -> None:
    """With the real server: it still answers after everything removable was removed."""
    cache = tmp_path / "cache"
    with serving(tmp_path, cache, "--buckets", "32", "--batch-sizes", "1", fork_server=fork_server) as served:
        [entry] = list_plans(cache)
        other = key_of(make_small(cache, bucket=32))

        result = run_cli("cache", "gc", str(cache), "--older-than", "0s", "--max-size", "0", "--json")
        assert result.returncode == 0, result.stderr
        document = json.loads(result.stdout)
        assert document["plan_keys"] == [other]
        assert document["retained"] == [[entry.plan_key, "it is in use by a running process"]]
        assert len(verify_folder(cache, cache)) == 1
        body = {"model": "builtin:tiny", "prompt": "one two", "max_tokens": 4}
        assert httpx.post(f"{served.address}/v1/completions", json=body, timeout=60).status_code == 200
    result = run_cli("cache", "gc", str(cache), "--older-than", "0s", "--json")
    assert json.loads(result.stdout)["plan_keys"] == [entry.plan_key]
