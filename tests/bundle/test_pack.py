"""Packing: deterministic, atomic, and only for undamaged plans whose last start compiled nothing."""

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

from tcdeploy.bundle.pack import WarmStartRequiredError, add_signature, pack, single_plan_key
from tcdeploy.bundle.verify import verify_bundle
from tcdeploy.cache.record.manifest import Manifest, write_manifest
from tcdeploy.cache.trust.signing import generate_key
from tcdeploy.errors import IntegrityError, SpaceError, TcdeployError, UsageError
from tests.bundle.conftest import Keys, Packed
from tests.bundle.fake_caches import (
    KINDS,
    Forks,
    fill_disk_leaving,
    key_of,
    make_small,
    manifest_for,
    path_of,
)
from tests.conftest import mounted_tmpfs


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# The same bytes


def test_packing_a_folder_twice_gives_the_same_bytes(small: Packed, keys: Keys, tmp_path: Path) -> None:
    for name in ("first", "second"):
        pack(small.folder, small.key, tmp_path / name, keys.secret)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes() == small.bundle.read_bytes()
    assert names_in(tmp_path) == ["first", "second"], "no temporary file remains"


def test_folder_path_creation_order_and_mtime_do_not_change_the_bytes(small: Packed, tmp_path: Path) -> None:
    pack(small.folder, small.key, tmp_path / "there.tcb")
    other = tmp_path / "a" / "much longer" / "path"
    for number, file in enumerate(reversed(small.manifest.files)):
        target = other / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(small.folder / file.path, target)
        os.utime(target, (1_000_000 + number, 2_000_000))
        target.chmod(0o600)
    manifest = manifest_for(other, [file.path for file in reversed(small.manifest.files)])
    assert (key_of(manifest), manifest == small.manifest) == (small.key, False), (
        "the folder's manifest contains its path"
    )
    write_manifest(path_of(other, manifest), manifest)
    pack(other, small.key, tmp_path / "here.tcb")
    assert (tmp_path / "here.tcb").read_bytes() == (tmp_path / "there.tcb").read_bytes()
    assert str(other).encode() not in (tmp_path / "here.tcb").read_bytes()


def test_the_result_describes_the_bundle(packed: Packed, tmp_path: Path) -> None:
    result = pack(packed.folder, packed.key, tmp_path / "x.tcb")
    sizes = [file.bytes for file in packed.manifest.files]
    assert (result.plan_key, result.files, result.unpacked_bytes) == (packed.key, len(sizes), sum(sizes))
    assert result.packed_bytes == (tmp_path / "x.tcb").stat().st_size < sum(sizes)
    assert 0 < result.header_bytes < result.packed_bytes


def test_files_outside_the_manifest_are_not_packed(small: Packed, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(small.folder, folder)
    (folder / "fxgraph" / "loser").write_bytes(b"of another variant")
    pack(folder, small.key, tmp_path / "x.tcb")
    pack(small.folder, small.key, tmp_path / "y.tcb")
    assert (tmp_path / "x.tcb").read_bytes() == (tmp_path / "y.tcb").read_bytes()


# What is refused


def spoil(file: str, how: str, folder: Path) -> None:
    path = folder / file
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "changed":
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    else:
        os.rename(path, folder / "elsewhere")
        path.symlink_to(folder / "elsewhere")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("missing", "is missing"), ("empty", "has 0 bytes"), ("changed", "does not match its recorded sha256"),
        ("a link", "is not a regular file"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named_and_no_bundle_is_written(small: Packed, how: str, reason: str, tmp_path: Path) -> None:
    folder, out = tmp_path / "cache", tmp_path / "out"
    shutil.copytree(small.folder, folder)
    out.mkdir()
    spoil(KINDS[3], how, folder)
    with pytest.raises(IntegrityError) as caught:
        pack(folder, small.key, out / "x.tcb")
    assert f"{folder / KINDS[3]} {reason}" in caught.value.message
    assert names_in(out) == []


def test_a_file_that_was_empty_when_it_was_recorded_is_not_packed(tmp_path: Path) -> None:
    folder, out = tmp_path / "cache", tmp_path / "out"
    make_small(folder)
    out.mkdir()
    (folder / "ab").mkdir()
    (folder / "ab/nothing").write_bytes(b"")
    manifest = manifest_for(folder, [*KINDS, "ab/nothing"])
    write_manifest(path_of(folder, manifest), manifest)
    with pytest.raises(IntegrityError, match="ab/nothing is empty"):
        pack(folder, key_of(manifest), out / "x.tcb")
    assert names_in(out) == []


def test_a_file_that_changes_during_packing_is_an_integrity_error(small: Packed, tmp_path: Path) -> None:
    """The record has another digest, as if the file had changed after the check: `write_bundle` checks again."""
    from tcdeploy.bundle.container import write_bundle

    first, *others = small.manifest.files
    with pytest.raises(IntegrityError, match="does not match its recorded sha256"):
        write_bundle(tmp_path / "x.tcb", small.folder, (replace(first, sha256="0" * 64), *others), lambda _: b"header")
    assert names_in(tmp_path) == []


def test_a_plan_that_has_not_finished_warming_is_not_packed(small: Packed, tmp_path: Path) -> None:
    folder, out = tmp_path / "cache", tmp_path / "out"
    shutil.copytree(small.folder, folder)
    out.mkdir()
    path_of(folder, small.manifest).unlink()
    with pytest.raises(UsageError, match=f"plan {small.key} has not finished warming in {folder}"):
        pack(folder, small.key, out / "x.tcb")
    with pytest.raises(UsageError, match="holds no plan that finished warming"):
        single_plan_key(folder)
    assert names_in(out) == []


@pytest.mark.parametrize("changes", [{"outcome": "miss"}, {"is_first_start": False}], ids=["compiled", "second"])
def test_a_plan_without_a_proven_list_of_files_is_not_packed(changes: dict[str, Any], tmp_path: Path) -> None:
    """The last start compiled, or was not the first in its process, which may have had the programs in memory."""
    folder, out = tmp_path / "cache", tmp_path / "out"
    manifest = make_small(folder, **changes)
    out.mkdir()
    with pytest.raises(WarmStartRequiredError, match="the last start of plan [0-9a-f]{16} compiled programs"):
        pack(folder, key_of(manifest), out / "x.tcb")
    assert names_in(out) == []


def test_a_folder_with_several_plans_requires_a_plan_key(tmp_path: Path) -> None:
    keys = sorted(key_of(make_small(tmp_path, bucket=bucket)) for bucket in (32, 64))
    with pytest.raises(UsageError) as caught:
        single_plan_key(tmp_path)
    assert f"--plan {keys[0]} or {keys[1]}" in caught.value.hint
    path_of(tmp_path, make_small(tmp_path, bucket=32)).unlink()
    assert single_plan_key(tmp_path) in keys


@pytest.mark.parametrize("content", [b"", b"no key", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"])
def test_with_an_invalid_key_no_bundle_is_written(small: Packed, content: bytes, tmp_path: Path) -> None:
    """An unsigned bundle in place of a signed one would be mistaken for it."""
    (tmp_path / "bad.key").write_bytes(content)
    for key in (tmp_path / "bad.key", tmp_path / "missing.key"):
        with pytest.raises(UsageError, match=f"{key.name} is not a private key"):
            pack(small.folder, small.key, tmp_path / "x.tcb", key)
    assert names_in(tmp_path) == ["bad.key"]


def test_a_missing_target_folder_is_a_clear_error(small: Packed, tmp_path: Path) -> None:
    target = tmp_path / "nowhere" / "x.tcb"
    with pytest.raises(TcdeployError, match=f"the bundle {target} cannot be written: No such file") as caught:
        pack(small.folder, small.key, target)
    assert caught.value.exit_code == 1 and caught.value.hint


# The target is a complete bundle, or unchanged


def test_an_existing_bundle_is_replaced_atomically(small: Packed, packed: Packed, keys: Keys, tmp_path: Path) -> None:
    target = tmp_path / "x.tcb"
    pack(packed.folder, packed.key, target, keys.secret)
    pack(small.folder, small.key, target, keys.secret)
    assert target.read_bytes() == small.bundle.read_bytes()
    with pytest.raises(IntegrityError):
        pack_damaged(small, tmp_path / "damaged", target)
    assert target.read_bytes() == small.bundle.read_bytes(), "a failure leaves the old one"


def pack_damaged(small: Packed, folder: Path, target: Path) -> None:
    shutil.copytree(small.folder, folder)
    (folder / KINDS[0]).unlink()
    pack(folder, small.key, target)


PACKER = """
folder, key, target, secret = arguments
while True:
    pack(Path(folder), key, Path(target), Path(secret))
"""


def assert_complete_bundle(target: Path, packed: Packed) -> None:
    """At any moment, the target is a complete bundle or does not exist."""
    if target.exists():
        assert target.read_bytes() == packed.bundle.read_bytes()


@pytest.mark.parametrize("target_exists", [False, True])
def test_a_killed_pack_leaves_no_bundle_or_a_complete_signed_one(
    packed: Packed, keys: Keys, target_exists: bool, tmp_path: Path
) -> None:
    """SIGKILL ten processes that pack in a loop, to a new and to an existing target."""
    source, absent, interrupted = random.Random(8), 0, 0
    with Forks(PACKER) as forks:
        for number in range(10):
            target = tmp_path / f"{number}.tcb"
            if target_exists:
                shutil.copyfile(packed.bundle, target)
            check = lambda target=target: assert_complete_bundle(target, packed)  # noqa: E731
            moment = source.uniform(0, 0.15)
            forks.run_and_kill_after(moment, packed.folder, packed.key, target, keys.secret, check=check)
            absent += not target.exists()
            interrupted += any(path.name.startswith(f".{target.name}-") for path in tmp_path.iterdir())
            if target.exists():
                assert verify_bundle(target, keys.trusted)[0].signer is not None
                assert target.read_bytes() == packed.bundle.read_bytes()
    assert absent == 0 if target_exists else absent < 10
    pack(packed.folder, packed.key, tmp_path / "next.tcb")
    assert not [name for name in names_in(tmp_path) if name.endswith(".tmp")], "the next pack removes what they left"
    assert interrupted, "no process was killed while packing"


def test_a_full_disk_exits_with_7_and_leaves_no_file(
    run_cli: Callable[..., Any], packed: Packed, keys: Keys, tmp_path: Path
) -> None:
    with mounted_tmpfs(tmp_path / "small", "-o", "size=2m") as folder:
        result = run_cli("cache", "pack", str(packed.folder), "-o", str(folder / "x.tcb"), "--sign", str(keys.secret))
        assert names_in(folder) == []
    assert result.returncode == 7, result.stderr
    needed = 2 * sum(file.bytes for file in packed.manifest.files)
    assert f"error: packing may need {needed} bytes in {folder}" in result.stderr
    assert "hint:" in result.stderr and "Traceback" not in result.stderr


@pytest.fixture(scope="module")
def incompressible(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    """Incompressible files: with their tar headers they need more space than the check before packing requires."""
    folder = tmp_path_factory.mktemp("incompressible")
    source = random.Random(3)
    names = [f"fxgraph/{number:03}" for number in range(400)]
    (folder / "fxgraph").mkdir()
    for name in names:
        (folder / name).write_bytes(source.randbytes(3000))
    manifest = manifest_for(folder, names)
    write_manifest(path_of(folder, manifest), manifest)
    return folder, manifest


@pytest.mark.parametrize("target_exists", [False, True])
def test_a_disk_that_fills_up_during_packing_is_a_space_error_and_keeps_the_old_bundle(
    incompressible: tuple[Path, Manifest], small: Packed, keys: Keys, target_exists: bool, tmp_path: Path
) -> None:
    folder, manifest = incompressible
    with mounted_tmpfs(tmp_path / "full", "-o", "size=8m") as out:
        target = out / "x.tcb"
        if target_exists:
            shutil.copyfile(small.bundle, target)
        fill_disk_leaving(out, 2 * sum(file.bytes for file in manifest.files) + 4096)
        with pytest.raises(SpaceError, match="the disk is full, the bundle .* was not written") as caught:
            pack(folder, key_of(manifest), target, keys.secret)
        assert caught.value.exit_code == 7
        assert names_in(out) == ["filler", "x.tcb"][: 1 + target_exists]
        if target_exists:
            assert target.read_bytes() == small.bundle.read_bytes()
        (out / "filler").unlink()
        assert pack(folder, key_of(manifest), target, keys.secret).files == 400


# The command


def test_the_command_packs_a_folder_and_reports_the_bundle(
    run_cli: Callable[..., Any], small: Packed, keys: Keys, tmp_path: Path
) -> None:
    out = tmp_path / "x.tcb"
    arguments = ("cache", "pack", str(small.folder), "-o", str(out), "--sign", str(keys.secret))
    result = run_cli(*arguments, "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert out.read_bytes() == small.bundle.read_bytes()
    assert (document["plan_key"], document["packed_bytes"]) == (small.key, out.stat().st_size)
    assert sum(kind["files"] for kind in document["kinds"].values()) == document["files"] == len(KINDS)
    plain = run_cli(*arguments)
    assert plain.returncode == 0 and f"{len(KINDS)} files, " in plain.stdout


def test_a_remote_folder_is_filled_listed_and_pulled_with_documents(
    run_cli: Callable[..., Any], small: Packed, tmp_path: Path
) -> None:
    store, target = tmp_path / "store", str(tmp_path / "pulled.tcb")
    pushed = json.loads(run_cli("cache", "push", str(small.bundle), str(store), "--json").stdout)
    listed = json.loads(run_cli("cache", "find", str(store), "--plan", small.key, "--json").stdout)
    assert (listed["plan_key"], listed["bundles"]) == (small.key, [{"url": pushed["url"]}])
    pulled = json.loads(run_cli("cache", "pull", pushed["url"], "-o", target, "--json").stdout)
    assert (pulled["path"], pulled["url"], pulled["bytes"]) == (target, pushed["url"], pushed["bytes"])


def test_the_command_exits_with_5_for_a_damaged_cache(
    run_cli: Callable[..., Any], small: Packed, tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(small.folder, folder)
    (folder / KINDS[0]).unlink()
    result = run_cli("cache", "pack", str(folder), "-o", str(tmp_path / "x.tcb"))
    assert result.returncode == 5
    assert f"error: {folder / KINDS[0]} is missing" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "x.tcb").exists()


def test_signing_later_gives_the_same_bytes_as_signing_while_packing(small: Packed, keys: Keys, tmp_path: Path) -> None:
    pack(small.folder, small.key, tmp_path / "x.tcb")
    add_signature(tmp_path / "x.tcb", keys.secret)
    assert (tmp_path / "x.tcb").read_bytes() == small.bundle.read_bytes()
    generate_key(tmp_path / "other")
    add_signature(tmp_path / "x.tcb", tmp_path / "other.key")
    assert verify_bundle(tmp_path / "x.tcb", keys.trusted)[0].files == len(KINDS)


def test_a_read_only_cache_can_be_packed(small: Packed, tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "read-only") as folder:
        shutil.copytree(small.folder, folder, dirs_exist_ok=True)
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        pack(folder, small.key, tmp_path / "out.tcb")
        pack(small.folder, small.key, tmp_path / "same.tcb")
    assert (tmp_path / "out.tcb").read_bytes() == (tmp_path / "same.tcb").read_bytes()
