"""Unpacking: a bundle is verified and staged before the cache changes.

Covers truncated, hostile and unsigned bundles, killed processes, full disks and concurrent unpacking.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tcdeploy.bundle import unpack as unpack_module
from tcdeploy.bundle.pack import pack
from tcdeploy.bundle.unpack import open_bundle, unpack
from tcdeploy.bundle.verify import verify_bundle, verify_folder
from tcdeploy.bundle.why import version_differences
from tcdeploy.cache.files.records import FileRecord, find_damage
from tcdeploy.cache.folder.layout import manifest_path
from tcdeploy.cache.record.manifest import (
    REQUIRED_PLAN_FIELDS,
    SCHEMA_VERSION,
    Manifest,
    read_manifests,
    write_manifest,
)
from tcdeploy.cache.staging.folder import create_staging_folder
from tcdeploy.cache.staging.restore import restore_plan
from tcdeploy.cache.trust import signing
from tcdeploy.cache.trust.signing import Signature, generate_key, read_signed_header, signed_header_bytes
from tcdeploy.errors import IntegrityError, MismatchError, SpaceError, TcdeployError, TrustError, UsageError
from tcdeploy.planning.environment import installed_versions
from tcdeploy.remote.transfer import push
from tests.bundle.conftest import Keys, Packed
from tests.bundle.fake_caches import (
    KINDS,
    Child,
    Forks,
    Listing,
    as_installed,
    contents,
    fill,
    fill_disk_leaving,
    key_of,
    listing,
    make_small,
    manifest_for,
    path_of,
    staging_files_in,
)
from tests.bundle.forging import compressed, forge, forge_header, member, members_of, record, tar, with_document
from tests.conftest import RunCLI, cli_environment, mounted_tmpfs

OLD_BUCKET = 64


@pytest.fixture(scope="module")
def old_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old") / "folder"
    make_small(folder, seed=9, bucket=OLD_BUCKET)
    for name in KINDS[::2]:  # leaves these paths to the bundle
        (folder / name).unlink()
    manifest = manifest_for(folder, list(KINDS[1::2]), bucket=OLD_BUCKET)
    path_of(folder, manifest).unlink()
    renamed = [f"old/{number}" for number, _ in enumerate(manifest.files)]
    (folder / "old").mkdir()
    for name, file in zip(renamed, manifest.files, strict=True):
        os.rename(folder / file.path, folder / name)
    manifest = manifest_for(folder, renamed, bucket=OLD_BUCKET)
    write_manifest(path_of(folder, manifest), manifest)
    return folder


@pytest.fixture
def old(old_template: Path, tmp_path: Path) -> tuple[Path, Listing]:
    """A folder with another plan, which no test may change."""
    shutil.copytree(old_template, tmp_path / "folder")
    return tmp_path / "folder", listing(tmp_path / "folder")


def refused(bundle: Path, old: tuple[Path, Listing], keys: Keys, error: type[TcdeployError] = IntegrityError) -> str:
    """Assert that unpacking raises `error` and changes nothing on disk; returns the message."""
    folder, before = old
    names_before = sorted(path.name for path in folder.parent.iterdir())
    with pytest.raises(error) as caught:
        unpack(bundle, folder, keys.trusted)
    assert type(caught.value) is error
    assert listing(folder) == before
    assert sorted(path.name for path in folder.parent.iterdir()) == names_before, "nothing was written beside it"
    with pytest.raises(error):
        verify_bundle(bundle, keys.trusted)
    return caught.value.message


def test_an_unpacked_bundle_verifies(packed: Packed, keys: Keys, tmp_path: Path) -> None:
    result = unpack(packed.bundle, tmp_path / "a" / "b", keys.trusted)
    assert (result.plan_key, result.files, result.already_present) == (packed.key, len(packed.manifest.files), False)
    assert result.signer is not None and result.signer.name == "ci"
    unpacked, source = contents(tmp_path / "a" / "b"), contents(packed.folder)
    paths = {file.path for file in packed.manifest.files}
    assert {path: unpacked[path] for path in paths} == {path: source[path] for path in paths}
    assert set(unpacked) - paths == {f"manifests/{packed.key}.json", f"bundles/{packed.key}.head"}
    assert staging_files_in(tmp_path / "a" / "b") == []
    [verified] = verify_folder(tmp_path / "a" / "b", keys.trusted)
    assert verified.signer is not None and verified.is_from_bundle


def test_packing_an_unpacked_cache_gives_the_same_bytes(small: Packed, keys: Keys, tmp_path: Path) -> None:
    unpack(small.bundle, tmp_path / "folder", keys.trusted)
    pack(tmp_path / "folder", small.key, tmp_path / "again.tcb", keys.secret)
    assert (tmp_path / "again.tcb").read_bytes() == small.bundle.read_bytes()


def test_a_plan_that_is_present_is_not_written_again(small: Packed, keys: Keys, tmp_path: Path) -> None:
    unpack(small.bundle, tmp_path / "folder", keys.trusted)
    before = listing(tmp_path / "folder")
    result = unpack(small.bundle, tmp_path / "folder", keys.trusted)
    assert result.already_present and listing(tmp_path / "folder") == before


@pytest.mark.parametrize("damage", ["missing", "changed", "no manifest", "damaged manifest", "no stored header"])
def test_unpacking_again_repairs_damage(small: Packed, keys: Keys, damage: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    unpack(small.bundle, folder, keys.trusted)
    before = contents(folder)
    manifest = path_of(folder, small.manifest)
    if damage == "missing":
        (folder / KINDS[3]).unlink()
    elif damage == "changed":
        (folder / KINDS[3]).write_bytes(b"changed")
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "damaged manifest":
        manifest.write_bytes(manifest.read_bytes()[:-5])
    else:
        (folder / "bundles" / f"{small.key}.head").unlink()
    assert unpack(small.bundle, folder, keys.trusted).already_present == (damage == "no stored header")
    assert contents(folder) == before


def test_another_plan_in_the_folder_is_unchanged(small: Packed, keys: Keys, old: tuple[Path, Listing]) -> None:
    folder, before = old
    unpack(small.bundle, folder, keys.trusted)
    after = contents(folder)
    assert {name: after[name] for name in before if name in after} == {
        name: content for name, (_, content) in before.items() if name in after
    }
    assert len(verify_folder(folder, keys.trusted)) == 2


def test_a_conflicting_file_of_another_plan_is_kept_and_used_by_both(small: Packed, keys: Keys, tmp_path: Path) -> None:
    """The same program, compiled in another folder: its name is a hash of its inputs."""
    folder = tmp_path / "folder"
    other = make_small(folder, seed=9, bucket=OLD_BUCKET)
    before = {file.path: (folder / file.path).read_bytes() for file in other.files}
    assert {file.sha256 for file in other.files} != {file.sha256 for file in small.manifest.files}
    assert not unpack(small.bundle, folder, keys.trusted).already_present
    assert {name: (folder / name).read_bytes() for name in before} == before
    plans = verify_folder(folder, keys.trusted)
    assert {plan.plan_key for plan in plans} == {key_of(other), small.key}
    assert unpack(small.bundle, folder, keys.trusted).already_present
    local = read_manifests(folder)[small.key]
    assert local.files == small.manifest.files, "the manifest lists what was signed"
    assert not find_damage(folder, local.files), "the bundle's files lie beside those of the other plan"
    pack(folder, small.key, tmp_path / "again.tcb", keys.secret)
    assert (tmp_path / "again.tcb").read_bytes() == small.bundle.read_bytes()


def test_a_plan_with_other_bytes_is_replaced_by_the_bundle(small: Packed, keys: Keys, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    earlier = make_small(folder, seed=5)
    assert key_of(earlier) == small.key
    assert not unpack(small.bundle, folder, keys.trusted).already_present
    [verified] = verify_folder(folder, keys.trusted, require_signed=True)
    assert verified.files == len(KINDS)


def test_unpacked_files_and_folders_are_private(small: Packed, keys: Keys, tmp_path: Path) -> None:
    unpack(small.bundle, tmp_path / "a" / "b", keys.trusted)
    modes = {(path.is_dir(), path.stat().st_mode & 0o777) for path in (tmp_path / "a").rglob("*")}
    assert modes == {(True, 0o700), (False, 0o600)}


@pytest.mark.parametrize("name", ["triton", "manifests", "bundles", "conflicts", ".lock", "fxgraph", "fxgraph/ab"])
def test_nothing_is_written_through_a_symbolic_link(small: Packed, keys: Keys, name: str, tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    outside.mkdir()
    (folder / name).parent.mkdir(parents=True)
    (folder / name).symlink_to(outside / "lock" if name == ".lock" else outside)
    for is_trusted in (False, True):
        with pytest.raises(TrustError, match=f"{folder / name} is a symbolic link"):
            unpack(small.bundle, folder, keys.trusted, is_trusted_folder=is_trusted)
    assert list(outside.iterdir()) == []


def test_a_folder_that_others_can_change_needs_trust_cache_dir(
    run_cli: Callable[..., Any], small: Packed, keys: Keys, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(0o777)
    arguments = ("cache", "unpack", str(small.bundle), str(folder), "--trusted-keys", str(keys.trusted))
    result = run_cli(*arguments)
    assert result.returncode == 4, result.stderr
    assert f"the cache folder {folder} can be changed by every user" in result.stderr
    assert list(folder.iterdir()) == []
    assert run_cli(*arguments, "--trust-cache-dir").returncode == 0
    assert run_cli("cache", "gc", str(folder)).returncode == 4
    assert run_cli("cache", "gc", str(folder), "--trust-cache-dir").returncode == 0


# Rollback


@pytest.fixture
def dated(small: Packed, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, Path]:
    """Bundles of one plan by date."""
    bundles = {date: tmp_path / f"{date}.tcb" for date in (1000, 2000)}
    for date, path in bundles.items():
        monkeypatch.setenv("SOURCE_DATE_EPOCH", str(date))
        pack(small.folder, small.key, path, keys.secret)
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    return bundles


def test_an_older_bundle_does_not_replace_a_newer_one(
    small: Packed, dated: dict[int, Path], keys: Keys, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    unpack(dated[1000], folder, keys.trusted)
    unpack(dated[2000], folder, keys.trusted)
    before = contents(folder)
    for older in (dated[1000], small.bundle):  # the second has no date
        with pytest.raises(TrustError, match="is older than the unpacked bundle of plan") as caught:
            unpack(older, folder, keys.trusted)
        assert caught.value.exit_code == 4 and "--allow-rollback" in caught.value.hint
        assert contents(folder) == before
        unpack(older, folder, keys.trusted, allow_rollback=True)
        assert contents(folder) != before
        unpack(dated[2000], folder, keys.trusted)
    assert "1970-01-01 00:16:40 UTC" in rollback_message(dated[1000], folder, keys)


def rollback_message(bundle: Path, folder: Path, keys: Keys) -> str:
    with pytest.raises(TrustError) as caught:
        unpack(bundle, folder, keys.trusted)
    return caught.value.message


def test_a_newer_header_without_a_trusted_signature_does_not_hold_off_a_signed_bundle(
    small: Packed, dated: dict[int, Path], keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "9999")
    pack(small.folder, small.key, tmp_path / "unsigned.tcb")
    unpack(tmp_path / "unsigned.tcb", tmp_path / "folder", keys.trusted, allow_unsigned=True)
    unpack(dated[1000], tmp_path / "folder", keys.trusted)
    [verified] = verify_folder(tmp_path / "folder", keys.trusted)
    assert verified.signer is not None


def test_an_unsigned_bundle_of_the_same_files_leaves_the_signature(
    small: Packed, dated: dict[int, Path], keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also its manifest, which an unsigned bundle may contradict."""
    folder, other, bundle = tmp_path / "folder", tmp_path / "other", tmp_path / "unsigned.tcb"
    shutil.copytree(small.folder, other)
    manifest = read_manifests(other)[small.key]
    write_manifest(manifest_path(other, small.key), replace(manifest, plan={**manifest.plan, "model": "another"}))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "9999")
    pack(other, small.key, bundle)
    unpack(dated[1000], folder, keys.trusted)
    for is_damaged in (False, True):
        if is_damaged:
            (folder / KINDS[0]).write_bytes(b"damaged")
        done = unpack(bundle, folder, keys.trusted, allow_unsigned=True)
        assert (done.signer, done.already_present) == (None, not is_damaged)
        assert (done.signed_plans, done.unsigned_plans) == ((small.key,), ())
        [verified] = verify_folder(folder, keys.trusted, require_signed=True)
        assert verified.signer is not None and verified.files_not_from_bundle == 0
        assert read_manifests(folder)[small.key].plan["model"] == manifest.plan["model"]


def test_the_command_says_that_an_unsigned_bundle_of_other_files_replaces_a_signed_one(
    small: Packed, keys: Keys, tmp_path: Path, run_cli: RunCLI
) -> None:
    other = make_small(tmp_path / "other", seed=1)
    pack(tmp_path / "other", key_of(other), tmp_path / "unsigned.tcb")
    trusted = ("--trusted-keys", str(keys.trusted))
    signed = ("cache", "unpack", str(small.bundle), str(tmp_path / "folder"), *trusted)
    unsigned = ("cache", "unpack", str(tmp_path / "unsigned.tcb"), str(tmp_path / "folder"), *trusted)
    replaced = f"a bundle with a trusted signature is replaced by one without (plan {small.key})"
    assert replaced not in run_cli(*signed).stdout
    assert replaced in run_cli(*unsigned, "--allow-unsigned").stdout
    assert replaced not in run_cli(*signed).stdout, "it is signed again"
    document = json.loads(run_cli(*unsigned, "--allow-unsigned", "--json").stdout)
    assert (document["signed_plans"], document["unsigned_plans"]) == ([], [small.key])
    assert "keeps" not in run_cli(*unsigned, "--allow-unsigned").stdout, "no signature was there"


def test_a_repacked_plan_keeps_its_date(dated: dict[int, Path], small: Packed, keys: Keys, tmp_path: Path) -> None:
    unpack(dated[1000], tmp_path / "folder", keys.trusted)
    pack(tmp_path / "folder", small.key, tmp_path / "again.tcb", keys.secret)
    assert (tmp_path / "again.tcb").read_bytes() == dated[1000].read_bytes()


def test_a_bundle_without_a_date_is_unpacked(small: Packed, keys: Keys, tmp_path: Path) -> None:
    payload = compressed(tar(*members_of(small.folder, small.manifest.files)))
    header = with_document(small.manifest, payload, lambda document: document["manifest"].update(compiled_at=None))
    bundle = forge_header(tmp_path / "undated.tcb", header, payload, keys.secret)
    assert not unpack(bundle, tmp_path / "folder", keys.trusted).already_present
    assert unpack(bundle, tmp_path / "folder", keys.trusted).already_present
    [verified] = verify_folder(tmp_path / "folder", keys.trusted, require_signed=True)
    assert verified.files == len(KINDS)


def test_a_pull_does_not_replace_a_newer_bundle_by_an_older_one(
    run_cli: Callable[..., Any], small: Packed, dated: dict[int, Path], tmp_path: Path
) -> None:
    urls = {date: push(path, str(tmp_path / "store"), small.key).url for date, path in dated.items()}
    target = tmp_path / "pulled.tcb"
    shutil.copy(dated[2000], target)
    refused = run_cli("cache", "pull", urls[1000], "-o", str(target))
    assert refused.returncode == 4 and f"the bundle is older than {target}" in refused.stderr
    assert target.read_bytes() == dated[2000].read_bytes()
    assert run_cli("cache", "pull", urls[1000], "-o", str(target), "--allow-rollback").returncode == 0
    assert target.read_bytes() == dated[1000].read_bytes()


def test_a_damaged_file_of_another_plan_is_replaced(small: Packed, keys: Keys, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    other = make_small(folder, seed=9, bucket=OLD_BUCKET)
    shared = other.files[0].path
    (folder / shared).write_bytes(b"damaged")
    unpack(small.bundle, folder, keys.trusted)
    assert (folder / shared).read_bytes() == (small.folder / shared).read_bytes()


def test_an_identical_file_of_another_plan_is_shared(small: Packed, keys: Keys, tmp_path: Path) -> None:
    make_small(tmp_path / "folder", bucket=OLD_BUCKET)
    unpack(small.bundle, tmp_path / "folder", keys.trusted)
    assert len(verify_folder(tmp_path / "folder", keys.trusted)) == 2


def test_a_target_that_is_a_file_is_a_clear_error(small: Packed, keys: Keys, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for target in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(TcdeployError, match=f"{target} cannot be written") as caught:
            unpack(small.bundle, target, keys.trusted)
        assert caught.value.exit_code == 1 and "another folder" in caught.value.hint
    assert (tmp_path / "file").read_text() == "not a folder"


def test_a_folder_that_cannot_be_written_is_a_clear_error(
    run_cli: Callable[..., Any], small: Packed, keys: Keys, tmp_path: Path
) -> None:
    with mounted_tmpfs(tmp_path / "read-only") as folder:
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        result = run_cli("cache", "unpack", str(small.bundle), str(folder), TCDEPLOY_TRUSTED_KEYS=str(keys.trusted))
    assert result.returncode == 1
    assert f"error: the cache folder {folder} is on a read-only file system" in result.stderr
    assert "hint:" in result.stderr and "Traceback" not in result.stderr


# Truncated or corrupted bundles


def test_a_truncated_bundle_changes_nothing(small: Packed, keys: Keys, old: tuple[Path, Listing]) -> None:
    content, target = small.bundle.read_bytes(), old[0].parent / "truncated.tcb"
    source = random.Random(4)
    lengths = {0, 1, 8, len(content) - 1, *(source.randrange(len(content)) for _ in range(196))}
    target.write_bytes(content)
    for length in sorted(lengths, reverse=True):
        os.truncate(target, length)
        refused(target, old, keys)


def test_a_tar_truncated_at_member_boundaries_is_refused_despite_a_valid_digest(
    small: Packed, keys: Keys, old: tuple[Path, Listing]
) -> None:
    members = members_of(small.folder, small.manifest.files)
    target = old[0].parent / "truncated.tcb"
    assert b"".join(members) + bytes(1024) == tar(*members)
    boundaries = [0]
    for tar_member in members:
        boundaries.append(boundaries[-1] + len(tar_member))
    complete = tar(*members)
    for length in {length for boundary in boundaries for length in (boundary, boundary + 1, boundary + 512)}:
        forge(target, compressed(complete[:length]), small.manifest, small.manifest.files, keys.secret)
        refused(target, old, keys)
    forge(target, compressed(complete), small.manifest, small.manifest.files, keys.secret)
    assert unpack(target, old[0], keys.trusted).files == len(members), "complete, the forged bundle is valid"


def test_a_truncated_zstd_frame_is_refused_despite_a_valid_digest(
    small: Packed, keys: Keys, old: tuple[Path, Listing]
) -> None:
    with open(small.bundle, "rb") as file:
        file.seek(read_signed_header(file, "x").payload_offset)
        payload = file.read()
    target, source = old[0].parent / "truncated.tcb", random.Random(5)
    for length in {0, 1, 3, len(payload) - 1, *(source.randrange(len(payload)) for _ in range(60))}:
        forge(target, payload[:length], small.manifest, small.manifest.files, keys.secret)
        refused(target, old, keys)


def test_a_corrupted_zstd_frame_is_refused_despite_a_valid_digest(
    small: Packed, keys: Keys, old: tuple[Path, Listing]
) -> None:
    """A flipped bit makes the frame invalid or changes the bytes after it."""
    payload = compressed(tar(*members_of(small.folder, small.manifest.files)))
    target, source = old[0].parent / "bad.tcb", random.Random(6)
    for _ in range(60):
        changed = bytearray(payload)
        changed[source.randrange(len(changed))] ^= 1 << source.randrange(8)
        forge(target, bytes(changed), small.manifest, small.manifest.files, keys.secret)
        try:
            refused(target, old, keys)
        except pytest.fail.Exception:  # a bit without effect, such as one of the window size
            unpacked = unpack(target, old[0].parent / "harmless", keys.trusted)
            assert unpacked.already_present or verify_folder(old[0].parent / "harmless", keys.trusted)


def test_a_zstd_frame_corrupted_inside_a_large_file_is_an_integrity_error(
    small: Packed, keys: Keys, old: tuple[Path, Listing]
) -> None:
    """The walk over block headers passes; decompression fails halfway through the file."""
    content = random.Random(7).randbytes(3 << 20)
    tar_bytes = tar(member("6n/large.so", content))
    pieces = [tar_bytes[start : start + BLOCK] for start in range(0, len(tar_bytes), BLOCK)]
    blocks = [raw_block(piece, is_last=number == len(pieces) - 1) for number, piece in enumerate(pieces)]
    files = (record("6n/large.so", content),)
    target = old[0].parent / "broken.tcb"
    for block_type, number in ((0, 0), (3, len(blocks) // 2), (2, len(blocks) // 2)):
        first = blocks[number][0] & 0b1111_1001 | block_type << 1
        broken = [*blocks[:number], bytes([first]) + blocks[number][1:], *blocks[number + 1 :]]
        forge(target, FRAME + b"".join(broken), small.manifest, files, keys.secret)
        if block_type:
            assert "cannot be decompressed" in refused(target, old, keys)
        else:
            assert verify_bundle(target, keys.trusted)[0].files == 1, "the uncorrupted bundle is valid"


FRAME = zstandard.FRAME_HEADER + bytes([0b0000_0000, 0x58])  # no checksum, a window of 2 MiB
BLOCK = 128 << 10


def raw_block(content: bytes, is_last: bool) -> bytes:
    return struct.pack("<I", len(content) << 3 | is_last)[:3] + content


# Hostile bundles, signed by a trusted key

NAME, CONTENT = "fxgraph/evil", b"evil content, a little of it"
AT = 3  # index of the replaced member


def with_member(small: Packed, *replacement: bytes) -> list[bytes]:
    members = members_of(small.folder, small.manifest.files)
    return [*members[:AT], *replacement, *members[AT + 1 :]]


@pytest.fixture(scope="module")
def hostile_payloads(small: Packed) -> dict[str, bytes]:
    """Tars that differ from the (valid) header."""
    files = small.manifest.files
    members = members_of(small.folder, files)
    path, good = files[AT].path, (small.folder / files[AT].path).read_bytes()
    plain = tarfile.TarInfo(path)
    plain.size, plain.pax_headers = len(good), {"comment": "x"}
    pax = plain.tobuf(tarfile.PAX_FORMAT)
    special = {
        "a symlink": member(path, b"", tarfile.SYMTYPE, "/etc/passwd"),
        "a hard link": member(path, b"", tarfile.LNKTYPE, files[0].path),
        "a character device": member(path, b"", tarfile.CHRTYPE, devmajor=1, devminor=3),
        "a block device": member(path, b"", tarfile.BLKTYPE, devmajor=8),
        "a FIFO": member(path, b"", tarfile.FIFOTYPE),
        "a directory": member(path, b"", tarfile.DIRTYPE),
        "the way up": member("../x", good),
        "an absolute path": member("/tmp/tcdeploy-was-here", good),
        "another name": member("fxgraph/other", good),
        "an old kind of file": member(path, good, tarfile.AREGTYPE),
        "a sparse file": member(path, good, tarfile.GNUTYPE_SPARSE),
        "a contiguous file": member(path, good, tarfile.CONTTYPE),
        "longer than it says": member(path, good + b"x" * 600, size=len(good)),
        "shorter than it says": member(path, good[:-1], size=len(good)),
        "another size": member(path, good, size=len(good) + 1),
        "a negative size": member(path, good, size=-1),
        "100 GB": member(path, good, size=100 << 30),
        "another mode": member(path, good, mode=0o4777),
        "an owner": member(path, good, uid=1000, uname="somebody"),
        "a time": member(path, good, mtime=1),
        "a pax header": pax + good + bytes(-len(good) % 512),
        "a pax header before it": member("PaxHeader", b"20 path=../../evil\n\n", tarfile.XHDTYPE) + members[AT],
        "a global pax header": member("PaxHeader", b"20 path=../../evil\n\n", tarfile.XGLTYPE) + members[AT],
        "a long name before it": member("././@LongLink", b"../../evil\0", tarfile.GNUTYPE_LONGNAME) + members[AT],
        "a checksum that is wrong": members[AT][:150] + b"7" + members[AT][151:],
        "other bytes": member(path, bytes(len(good))),
        "something in the padding": member(path, good)[:-1] + b"x",
        "nothing": b"",
    }
    replaced = {name: tar(*with_member(small, content)) for name, content in special.items()}
    return replaced | {
        "a member twice": tar(*with_member(small, members[AT], members[AT])),
        "one member more": tar(*members, member(NAME, CONTENT)),
        "one member more behind the end": tar(*members) + member(NAME, CONTENT),
        "one member less": tar(*members[:-1]),
        "another order": tar(*reversed(members)),
        "zeros behind the end": tar(*members) + bytes(512),
        "one byte behind the end": tar(*members) + b"x",
        "half an end": b"".join(members) + bytes(512),
        "no tar": b"no tar at all",
        "empty": b"",
    }


HOSTILE_PAYLOADS = (
    "a symlink", "a hard link", "a character device", "a block device", "a FIFO", "a directory", "the way up",
    "an absolute path", "another name", "an old kind of file", "a sparse file", "a contiguous file",
    "longer than it says", "shorter than it says", "another size", "a negative size", "100 GB", "another mode",
    "an owner", "a time", "a pax header", "a pax header before it", "a global pax header", "a long name before it",
    "a checksum that is wrong", "other bytes", "something in the padding", "nothing", "a member twice",
    "one member more", "one member more behind the end", "one member less", "another order", "zeros behind the end",
    "one byte behind the end", "half an end", "no tar", "empty",
)  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE_PAYLOADS)
def test_a_signed_bundle_whose_tar_differs_from_its_header_is_refused(
    small: Packed, keys: Keys, old: tuple[Path, Listing], hostile_payloads: dict[str, bytes], what: str
) -> None:
    assert set(hostile_payloads) == set(HOSTILE_PAYLOADS)
    payload = compressed(hostile_payloads[what])
    refused(forge(old[0].parent / "evil.tcb", payload, small.manifest, small.manifest.files, keys.secret), old, keys)
    assert not Path("/tmp/tcdeploy-was-here").exists()


@pytest.mark.parametrize(
    "extra", ["a frame", "an empty frame", "a skippable frame", "junk", "a skippable frame before"]
)
def test_data_before_or_after_the_payload_frame_is_refused(
    small: Packed, keys: Keys, old: tuple[Path, Listing], extra: str
) -> None:
    frame = compressed(tar(*members_of(small.folder, small.manifest.files)))
    skippable = struct.pack("<II", 0x184D2A52, 4) + b"evil"
    payload = {
        "a frame": frame + compressed(member(NAME, CONTENT)), "an empty frame": frame + compressed(),
        "a skippable frame": frame + skippable, "junk": frame + b"\0", "a skippable frame before": skippable + frame,
    }[extra]  # fmt: skip
    refused(forge(old[0].parent / "evil.tcb", payload, small.manifest, small.manifest.files, keys.secret), old, keys)


def test_a_payload_of_two_frames_is_refused(small: Packed, keys: Keys, old: tuple[Path, Listing]) -> None:
    tar_bytes = tar(*members_of(small.folder, small.manifest.files))
    payload = compressed(tar_bytes[:5000]) + compressed(tar_bytes[5000:])
    refused(forge(old[0].parent / "evil.tcb", payload, small.manifest, small.manifest.files, keys.secret), old, keys)


def test_a_zstd_window_above_the_limit_is_refused(small: Packed, keys: Keys, old: tuple[Path, Listing]) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=30)
    tar_bytes = tar(*members_of(small.folder, small.manifest.files))
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    payload = stream.compress(tar_bytes) + stream.flush()
    assert zstandard.get_frame_parameters(payload).window_size == 1 << 30
    bundle = forge(old[0].parent / "evil.tcb", payload, small.manifest, small.manifest.files, keys.secret)
    assert "cannot be decompressed" in refused(bundle, old, keys)


HOSTILE_FILES = {
    "the way up": "../x", "an absolute path": "/tmp/tcdeploy-was-here", "an empty part": "a//b", "a dot": "a/./b",
    "a backslash": "a\\..\\b/c", "NUL": "a/b\0c", "a surrogate": "a/\ud800", "no folder": "plain", "nothing": "",
    "a line": "a/b\nc", "a manifest": "manifests/0123456789abcdef.json", "a lease": "leases/x",
    "a stored header": "bundles/0123456789abcdef.head", "a staging folder": ".unpack-x/y", "hidden": "a/.b",
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE_FILES)
def test_a_signed_header_with_a_hostile_path_is_refused(
    small: Packed, keys: Keys, old: tuple[Path, Listing], what: str
) -> None:
    """The payload matches the header, as far as tar can represent the path."""
    files = (*small.manifest.files, record(HOSTILE_FILES[what], CONTENT))
    payload = compressed(tar(*members_of(small.folder, small.manifest.files), member(HOSTILE_FILES[what], CONTENT)))
    message = refused(forge(old[0].parent / "evil.tcb", payload, small.manifest, files, keys.secret), old, keys)
    assert "lists an invalid or duplicate file" in message
    assert not Path("/tmp/tcdeploy-was-here").exists()


@pytest.mark.parametrize("size", [0, -1, -(1 << 70), True, 1.5, "7", None, 100 << 30, 1 << 70, float("inf")])
def test_a_signed_header_with_an_invalid_size_is_refused(
    small: Packed, keys: Keys, old: tuple[Path, Listing], size: Any
) -> None:
    files = (*small.manifest.files, FileRecord(NAME, size, "0" * 64))
    payload = compressed(tar(*members_of(small.folder, small.manifest.files), member(NAME, CONTENT)))
    refused(forge(old[0].parent / "evil.tcb", payload, small.manifest, files, keys.secret), old, keys)


def test_a_signed_header_with_duplicate_or_nested_paths_is_refused(
    small: Packed, keys: Keys, old: tuple[Path, Listing]
) -> None:
    members = members_of(small.folder, small.manifest.files)
    for more in (small.manifest.files[0], record("fxgraph/evil/a", CONTENT)):
        files = (*small.manifest.files, record(NAME, CONTENT), more)
        payload = compressed(tar(*members, member(NAME, CONTENT), member(more.path, CONTENT)))
        refused(forge(old[0].parent / "evil.tcb", payload, small.manifest, files, keys.secret), old, keys)


def test_a_path_that_collides_with_the_staged_manifest_is_refused(small: Packed, keys: Keys, tmp_path: Path) -> None:
    files = (record("manifest/x", CONTENT),)
    bundle = forge(
        tmp_path / "x.tcb", compressed(tar(member("manifest/x", CONTENT))), small.manifest, files, keys.secret
    )
    with pytest.raises(IntegrityError, match="it lists an invalid or duplicate file: 'manifest/x'"):
        unpack(bundle, tmp_path / "folder", keys.trusted)
    assert not (tmp_path / "folder").exists()


ODD = (None, True, 0, -1, 1.5, 1 << 70, float("inf"), float("nan"), "", "x", "\ud800", [], [[]], {}, {"a": 1})


def json_paths(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all keys and of the first index of each list in a JSON document."""
    children = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document[:1])
        if isinstance(document, list)
        else ()
    )
    paths = [path] if path else []
    for key, value in children:
        paths += json_paths(value, (*path, key))
    return paths


def test_a_signed_header_with_arbitrary_values_is_accepted_or_refused_without_a_crash(
    small: Packed, keys: Keys, tmp_path: Path
) -> None:
    """Values of the header's JSON are replaced by odd ones or removed: all key fields, and a sample of the rest."""
    manifest = replace(small.manifest, files=small.manifest.files[:2])
    payload = compressed(tar(*members_of(small.folder, manifest.files)))
    documents: list[Any] = []
    with_document(manifest, payload, lambda document: documents.append(json.loads(json.dumps(document))))
    source, outcomes, installed = random.Random(11), {True: 0, False: 0}, installed_versions()
    changes = [(path, odd) for path in json_paths(documents[0]) for odd in (*ODD, "left out")]
    key_changes = [
        (path, odd)
        for path, odd in changes
        if odd == "left out" or "environment" in path or path[-1] in REQUIRED_PLAN_FIELDS
    ]
    for path, odd in [*key_changes, *source.sample(changes, 150)]:

        def spoil(document: Any, path: tuple[Any, ...] = path, odd: Any = odd) -> None:
            for key in path[:-1]:
                document = document[key]
            if odd == "left out":
                del document[path[-1]]
            else:
                document[path[-1]] = odd

        header = with_document(manifest, payload, spoil)
        bundle = forge_header(tmp_path / "odd.tcb", header, payload, keys.secret)
        try:
            opened = open_bundle(bundle, keys.trusted)
            version_differences(opened.header.manifest, installed)
            verify_bundle(bundle, keys.trusted)
            outcomes[True] += 1
        except (IntegrityError, MismatchError) as error:
            assert isinstance(error, IntegrityError) or path[-1] in ("schema", "epoch"), f"{odd!r} at {path}"
            outcomes[False] += 1
        except Exception as error:
            raise AssertionError(f"{odd!r} at {path}") from error
    assert all(outcomes.values()), outcomes


@pytest.mark.parametrize("header", [b"", b"null", b"[]", b"{}", b"\xff", b"[" * 99_999, b'{"payload": 1}', b"9" * 9999])
def test_a_signed_header_that_is_not_a_json_document_is_refused(
    keys: Keys, old: tuple[Path, Listing], header: bytes
) -> None:
    refused(forge_header(old[0].parent / "evil.tcb", header, b"", keys.secret), old, keys)


@pytest.mark.parametrize("depth", [100, 300, 900, 2000, 50_000])
def test_a_deeply_nested_manifest_is_refused(small: Packed, keys: Keys, old: tuple[Path, Listing], depth: int) -> None:
    payload = compressed(tar(*members_of(small.folder, small.manifest.files)))
    nested = "[" * depth + "]" * depth
    text = json.dumps({"schema": SCHEMA_VERSION, "sha256": "0" * 64, "plan": "here"}).replace('"here"', nested)
    header = json.dumps({"payload": {"bytes": len(payload), "sha256": "0" * 64}, "manifest": text}).encode()
    refused(forge_header(old[0].parent / "evil.tcb", header, payload, keys.secret), old, keys)

    def nest(document: Any) -> None:
        for _ in range(depth):
            document["manifest"]["plan"]["decisions"] = [document["manifest"]["plan"]["decisions"]]

    if depth <= 900:  # deeper documents exceed the json module's own limit
        header = with_document(small.manifest, payload, nest)
        bundle = forge_header(old[0].parent / "evil.tcb", header, payload, keys.secret)
        with pytest.raises(IntegrityError):
            verify_bundle(bundle, keys.trusted)
            raise IntegrityError("accepted: this depth is within limits")


# Memory

MEASURED = """
import re, sys
from pathlib import Path
from tcdeploy.bundle.unpack import unpack
import cryptography.hazmat.primitives.serialization, zstandard
bundle, folder, trusted = map(Path, sys.argv[1:])
try:
    unpack(bundle, folder, trusted)
    name = "nothing"
except Exception as error:
    name = type(error).__name__
print(name, re.search("VmHWM: *(.*) kB", Path("/proc/self/status").read_text().replace("\\t", ""))[1])
"""
MEBIBYTE = 1 << 20


def peak_of(bundle: Path, keys: Keys, tmp_path: Path) -> tuple[str, int]:
    """Error name and peak memory (MiB) of a subprocess that unpacks. VmHWM, because ru_maxrss is inherited."""
    with Child(MEASURED, bundle, tmp_path / "never", keys.trusted) as child:
        name, kilobytes = child.line().split()
    return name, int(kilobytes) // 1024


def test_peak_memory_is_measured(packed: Packed, keys: Keys, tmp_path: Path) -> None:
    name, peak = peak_of(packed.bundle, keys, tmp_path)
    assert name == "nothing" and 20 < peak < 150


def zeros(gigabytes: int) -> bytes:
    """A zstd frame of `gigabytes` GB of zeros, as RLE blocks of 128 KiB."""
    return FRAME + zero_block(BLOCK) * (gigabytes << 13) + raw_block(b"", is_last=True)


def zero_block(length: int) -> bytes:
    return struct.pack("<I", length << 3 | 1 << 1)[:3] + b"\0"


def test_the_decompression_bomb_of_these_tests_is_valid() -> None:
    bomb = zeros(1)
    count = sum(len(chunk) for chunk in zstandard.ZstdDecompressor().read_to_iter(bomb))
    assert count == 1 << 30 and len(bomb) < 40_000


@pytest.mark.parametrize("position", ["instead of the files", "as one file", "behind the files"])
def test_a_decompression_bomb_takes_no_memory_and_no_disk(
    small: Packed, keys: Keys, position: str, tmp_path: Path
) -> None:
    files, payload = small.manifest.files, zeros(10)
    if position == "as one file":
        files = (FileRecord(NAME, 10 << 30, "0" * 64),)
    elif position == "behind the files":
        tar_bytes = tar(*members_of(small.folder, files))
        payload = FRAME + raw_block(tar_bytes, is_last=False) + payload[len(FRAME) :]
    bundle = forge(tmp_path / "bomb.tcb", payload, small.manifest, files, keys.secret)
    assert bundle.stat().st_size < 500_000
    started = time.monotonic()
    name, peak = peak_of(bundle, keys, tmp_path)
    assert name == "IntegrityError" and peak < 250
    assert time.monotonic() - started < 20, "it was decompressed completely"
    assert not (tmp_path / "never").exists() or contents(tmp_path / "never") == {}


def test_a_large_file_is_streamed(small: Packed, keys: Keys, tmp_path: Path) -> None:
    """200 MB of zeros with a wrong digest: read to the end in chunks."""
    file = FileRecord(NAME, 1600 * BLOCK, "0" * 64)
    tar_header = member(NAME, b"", size=file.bytes)
    payload = FRAME + raw_block(tar_header, False) + zero_block(BLOCK) * 1600 + raw_block(bytes(1024), True)
    bundle = forge(tmp_path / "large.tcb", payload, small.manifest, (file,), keys.secret)
    name, peak = peak_of(bundle, keys, tmp_path)
    assert name == "IntegrityError" and peak < 150
    with pytest.raises(IntegrityError, match=f"{NAME} does not match its sha256"):
        verify_bundle(bundle, keys.trusted)


def test_a_header_with_too_many_files_is_refused_in_bounded_memory(small: Packed, keys: Keys, tmp_path: Path) -> None:
    """A header below the size limit is parsed, and its 250,000 files are counted. One above the limit is not read."""
    files = ",".join(f'{{"path": "a/{count}", "bytes": 1, "sha256": ""}}' for count in range(250_000))
    short = json.dumps(
        {"payload": {"bytes": 0, "sha256": ""}, "manifest": f'{{"schema": {SCHEMA_VERSION}, "files": [{files}]}}'}
    )
    for header, secret, max_mebibytes in ((short.encode(), keys.secret, 200), (bytes(96 << 20), None, 100)):
        bundle = forge_header(tmp_path / "many.tcb", header, b"", secret)
        name, peak = peak_of(bundle, keys, tmp_path)
        assert (name, peak < max_mebibytes, (tmp_path / "never").exists()) == ("IntegrityError", True, False), peak


# Signatures


def with_header(bundle: Path, target: Path, edit: Callable[[bytes], bytes], *signatures: Signature) -> Path:
    """Write the bundle with a changed header and the given (or its own) signatures, under a valid checksum."""
    with open(bundle, "rb") as file:
        signed_header = read_signed_header(file, "x")
        payload = file.read()
    target.write_bytes(
        signed_header_bytes(edit(signed_header.header), signatures or signed_header.signatures) + payload
    )
    return target


def unchanged(header: bytes) -> bytes:
    return header


def header_alone(bundle: Path) -> bytes:
    with open(bundle, "rb") as file:
        return bundle.read_bytes()[: read_signed_header(file, "x").payload_offset]


def unsigned(small: Packed, target: Path) -> Path:
    pack(small.folder, small.key, target)
    return target


def test_an_unsigned_bundle_is_not_unpacked(small: Packed, keys: Keys, old: tuple[Path, Listing]) -> None:
    bundle = unsigned(small, old[0].parent / "unsigned.tcb")
    assert "is not signed" in refused(bundle, old, keys, TrustError)
    done = unpack(bundle, old[0], keys.trusted, allow_unsigned=True)
    assert done.signer is None and not done.already_present


def test_a_signature_of_an_unknown_key_is_not_trusted(small: Packed, keys: Keys, old: tuple[Path, Listing]) -> None:
    folder = old[0].parent
    unknown = generate_key(folder / "unknown")
    pack(small.folder, small.key, folder / "x.tcb", folder / "unknown.key")
    assert f"it is signed by {unknown}" in refused(folder / "x.tcb", old, keys, TrustError)


def test_a_changed_payload_is_an_integrity_error(small: Packed, keys: Keys, old: tuple[Path, Listing]) -> None:
    content = bytearray(small.bundle.read_bytes())
    content[-100] ^= 1
    (old[0].parent / "x.tcb").write_bytes(content)
    assert "its payload does not match the sha256 in the header" in refused(old[0].parent / "x.tcb", old, keys)


def test_a_changed_header_is_an_integrity_error_and_with_a_valid_checksum_a_trust_error(
    small: Packed, keys: Keys, old: tuple[Path, Listing]
) -> None:
    target = old[0].parent / "x.tcb"
    content = small.bundle.read_bytes()
    target.write_bytes(content.replace(b"someone/model", b"someone/other", 1))
    refused(target, old, keys, IntegrityError)
    with_header(small.bundle, target, lambda header: header.replace(b"someone/model", b"someone/other", 1))
    assert "the signature of ci does not match" in refused(target, old, keys, TrustError)
    with pytest.raises(TrustError):
        unpack(target, old[0], keys.trusted, allow_unsigned=True)


def test_a_signature_over_something_else_is_invalid(
    small: Packed, packed: Packed, keys: Keys, old: tuple[Path, Listing]
) -> None:
    """Over the bare header, another purpose or another bundle; empty; and with the key id of another key."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    folder = old[0].parent
    key = load_pem_private_key(keys.secret.read_bytes(), None)
    with open(small.bundle, "rb") as file, open(packed.bundle, "rb") as other_file:
        signed_header, other_header = read_signed_header(file, "x"), read_signed_header(other_file, "x")
    [own] = signed_header.signatures
    generate_key(folder / "unknown")
    unknown = signing.sign(signed_header.header, folder / "unknown.key")
    for wrong in (
        key.sign(signed_header.header).hex(),  # type: ignore[union-attr,call-arg]
        key.sign(b"tcdeploy bundle payload\n" + signed_header.header).hex(),  # type: ignore[union-attr,call-arg]
        other_header.signatures[0].signature,
        "00" * 64,
        "",
        "00",
        unknown.signature,
    ):
        bundle = with_header(small.bundle, folder / "x.tcb", unchanged, replace(own, signature=wrong))
        assert "the signature of ci does not match" in refused(bundle, old, keys, TrustError)
    bundle = with_header(small.bundle, folder / "x.tcb", unchanged, replace(unknown, signature=own.signature))
    assert "no trusted key" in refused(bundle, old, keys, TrustError)
    with_header(small.bundle, folder / "x.tcb", unchanged, own)
    assert verify_bundle(folder / "x.tcb", keys.trusted)[0].signer is not None, "the unchanged signature is accepted"


@pytest.mark.parametrize("signer", ["none", "unknown key", "forged"])
def test_nothing_after_an_invalid_signature_is_read(small: Packed, keys: Keys, signer: str, tmp_path: Path) -> None:
    """The header is not JSON, which would be an integrity error. A pipe that stays open shows that reading stops."""
    generate_key(tmp_path / "unknown")
    [forged] = (signing.sign(b"another header", keys.secret),)
    signatures = {
        "none": (), "unknown key": (signing.sign(b"{no header", tmp_path / "unknown.key"),), "forged": (forged,)
    }[signer]  # fmt: skip
    content = signed_header_bytes(b"{no header", signatures)
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb", buffering=0) as pipe, os.fdopen(reader, "rb") as file:
        pipe.write(content)
        signed_header = read_signed_header(file, "pipe")
        with pytest.raises(TrustError):
            signing.verify_signature(signed_header, "pipe", keys.trusted)
    (tmp_path / "file").write_bytes(content)
    with Child(MEASURED, tmp_path / "file", tmp_path / "never", keys.trusted) as child:
        assert child.line().split()[0] == "TrustError"
    assert not (tmp_path / "never").exists()


def test_trust_errors_precede_integrity_errors_of_the_payload(
    small: Packed, keys: Keys, old: tuple[Path, Listing]
) -> None:
    target = old[0].parent / "x.tcb"
    signed_header = header_alone(unsigned(small, target))
    for payload in (b"", b"junk" * 100):
        target.write_bytes(signed_header + payload)
        refused(target, old, keys, TrustError)
    target.write_bytes(header_alone(small.bundle))
    assert "its payload has 0 bytes; the header says" in refused(target, old, keys, IntegrityError)


# Malicious pickles


class Poison:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def test_a_malicious_pickle_in_an_unsigned_bundle_is_not_loaded(
    run_cli: Callable[..., Any], keys: Keys, tmp_path: Path
) -> None:
    """In the folder of torch's pickled graphs. --allow-unsigned unpacks it, without loading it."""
    cache, trace, name = tmp_path / "cache", tmp_path / "trace", KINDS[1]
    fill(cache, {name: 1})
    (cache / name).write_bytes(pickle.dumps(Poison(trace)))
    manifest = manifest_for(cache, [name])
    write_manifest(path_of(cache, manifest), manifest)
    pack(cache, key_of(manifest), tmp_path / "x.tcb")
    arguments = ("cache", "unpack", str(tmp_path / "x.tcb"), str(tmp_path / "folder"))
    result = run_cli(*arguments, TCDEPLOY_TRUSTED_KEYS=str(keys.trusted))
    assert result.returncode == 4, result.stderr
    assert "is not signed" in result.stderr and not (tmp_path / "folder").exists() and not trace.exists()
    result = run_cli(*arguments, "--allow-unsigned")
    assert result.returncode == 0, result.stderr
    assert "no trusted signature" in result.stdout
    assert (tmp_path / "folder" / name).exists() and not trace.exists()
    pickle.loads((tmp_path / "folder" / name).read_bytes())
    assert trace.exists(), "the pickle is malicious"


# Another environment


def test_a_bundle_for_another_torch_version_exits_with_3_and_a_table(
    run_cli: Callable[..., Any], small: Packed, keys: Keys, tmp_path: Path
) -> None:
    there = as_installed(torch="1.13.1", python="3.8.2").__dict__
    bundle = forge(
        tmp_path / "x.tcb", compressed(tar(*members_of(small.folder, small.manifest.files))),
        replace(small.manifest, environment=there), small.manifest.files, keys.secret,
    )  # fmt: skip
    arguments = ("cache", "unpack", str(bundle), str(tmp_path / "folder"), "--trusted-keys", str(keys.trusted))
    result = run_cli(*arguments)
    assert result.returncode == 3, result.stderr
    assert "was packed in another environment: python, torch" in result.stderr and "1.13.1" in result.stderr
    assert not (tmp_path / "folder").exists()
    assert run_cli(*arguments, "--any-environment").returncode == 0


# Killed processes


def complete_plans(folder: Path) -> dict[str, Manifest]:
    """The manifests whose files are all there. Files of no manifest, which a kill leaves, are used by no start."""
    manifests = read_manifests(folder)
    return {key: manifest for key, manifest in manifests.items() if not find_damage(folder, manifest.files)}


UNPACKER = """
bundle, folder, trusted = map(Path, arguments)
started = time.perf_counter()
unpack(bundle, folder, trusted)
print(time.perf_counter() - started, flush=True)
"""


def test_a_killed_unpack_leaves_the_old_cache_intact_and_the_next_succeeds(
    packed: Packed, keys: Keys, tmp_path: Path
) -> None:
    folder, source, interrupted = tmp_path / "folder", random.Random(12), 0
    make_small(tmp_path / "made", seed=9, bucket=OLD_BUCKET)
    names = fill(folder, {f"old/{number}": 700 for number in range(8)})
    other = manifest_for(folder, names, bucket=OLD_BUCKET)
    write_manifest(path_of(folder, other), other)
    before = contents(folder)
    with Forks(UNPACKER) as forks:
        forks.start(packed.bundle, tmp_path / "measured", keys.trusted)
        seconds = float(forks.line())
        assert forks.exit_code() == 0
        for number in range(100):
            if number >= 20 and interrupted >= 5:  # on a loaded machine, many processes end before they are killed
                break
            moment = seconds * (number % 20 + source.random()) / 20
            forks.run_and_kill_after(moment, packed.bundle, folder, keys.trusted)
            content = contents(folder)
            assert {name: content[name] for name in before} == before
            interrupted += bool(staging_files_in(folder))
            plans = complete_plans(folder)
            assert key_of(other) in plans and len(plans[key_of(other)].files) == len(names)
            if number % 4 == 3:
                result = unpack(packed.bundle, folder, keys.trusted)
                assert result.already_present == (packed.key in plans)
                assert [
                    name for name in staging_files_in(folder) if name.startswith(".unpack")
                ] == [] or result.already_present
                assert len(verify_folder(folder, keys.trusted)) == 2
                for name in set(contents(folder)) - set(before):
                    (folder / name).unlink()
    assert interrupted >= 5, "too few processes were killed while unpacking"


DYING = """
bundle, folder, trusted = map(Path, arguments[:3])
left = int(arguments[3])
def count(event, _):
    global left
    if event == "os.rename":
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
sys.addaudithook(count)
unpack(bundle, folder, trusted)
print("done")
"""


def test_a_kill_between_renames_leaves_a_complete_plan_or_none(small: Packed, keys: Keys, tmp_path: Path) -> None:
    """The files are renamed first, then the manifest, then the stored header."""
    states = []
    with Forks(DYING) as forks:
        for renames in (0, 1, len(KINDS) // 2, len(KINDS) - 1, len(KINDS), len(KINDS) + 1):
            folder = tmp_path / f"killed after {renames}"
            other = manifest_for(folder, fill(folder, {"old/x": 700}), bucket=OLD_BUCKET)
            write_manifest(path_of(folder, other), other)
            forks.start(small.bundle, folder, keys.trusted, renames)
            assert forks.exit_code() == -signal.SIGKILL
            plans = complete_plans(folder)
            states.append((sum((folder / name).exists() for name in KINDS), small.key in plans))
            assert key_of(other) in plans and staging_files_in(folder)
            assert unpack(small.bundle, folder, keys.trusted).already_present == states[-1][1]
            signers = {plan.plan_key: plan.signer for plan in verify_folder(folder, keys.trusted)}
            assert signers[small.key] is not None and signers[key_of(other)] is None
    half = len(KINDS) // 2
    assert states == [(0, False), (1, False), (half, False), (16, False), (17, False), (17, True)]


@pytest.mark.parametrize("renames", [0, 5, len(KINDS), len(KINDS) + 1])
def test_a_kill_while_a_plan_is_replaced_leaves_the_old_plan_or_the_new_one(
    small: Packed, keys: Keys, renames: int, tmp_path: Path
) -> None:
    """The folder has the plan with other bytes, and another plan that has the same paths."""
    folder = tmp_path / "folder"
    other = make_small(folder, seed=5, bucket=OLD_BUCKET)
    earlier = make_small(folder, seed=5)
    assert key_of(earlier) == small.key and set(earlier.files) == set(other.files)
    with Forks(DYING) as forks:
        forks.start(small.bundle, folder, keys.trusted, renames)
        assert forks.exit_code() == -signal.SIGKILL
    plans = complete_plans(folder)
    assert plans.keys() == {small.key, key_of(other)}
    assert set(plans[small.key].files) == set((small.manifest if renames > len(KINDS) else earlier).files)
    assert unpack(small.bundle, folder, keys.trusted).already_present == (renames > len(KINDS))
    assert {plan.plan_key for plan in verify_folder(folder, keys.trusted)} == plans.keys()
    assert set(complete_plans(folder)[small.key].files) == set(small.manifest.files)


def test_a_kill_over_a_damaged_plan_loads_nothing_damaged(small: Packed, keys: Keys, tmp_path: Path) -> None:
    """At the first rename. The next start refuses the plan, and the next unpack repairs it."""
    folder = tmp_path / "folder"
    other = manifest_for(folder, fill(folder, {"old/x": 700}), bucket=OLD_BUCKET)
    write_manifest(path_of(folder, other), other)
    unpack(small.bundle, folder, keys.trusted)
    damaged = folder / KINDS[9]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    with Forks(DYING) as forks:
        forks.start(small.bundle, folder, keys.trusted, 0)
        assert forks.exit_code() == -signal.SIGKILL
    staging = create_staging_folder(str(folder))
    with pytest.raises(IntegrityError, match=f"the cache is damaged: {damaged}"):
        restore_plan(staging, small.key, rebuild=False)
    assert not Path(staging.path, KINDS[9]).exists()
    staging.remove()
    assert complete_plans(folder).keys() == {key_of(other)}
    assert not unpack(small.bundle, folder, keys.trusted).already_present
    assert len(verify_folder(folder, keys.trusted)) == 2


def test_the_next_unpack_deletes_stale_staging_folders(small: Packed, keys: Keys, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / ".unpack-dead" / "fxgraph").mkdir(parents=True)
    (folder / ".unpack-dead" / "fxgraph" / "half").write_bytes(b"half a file")
    unpack(small.bundle, folder, keys.trusted)
    assert staging_files_in(folder) == []


# Full disks


def test_without_free_space_the_required_bytes_are_reported_and_nothing_is_written(
    run_cli: Callable[..., Any], packed: Packed, keys: Keys, tmp_path: Path
) -> None:
    with mounted_tmpfs(tmp_path / "small", "-o", "size=8m") as disk:
        make_small(disk / "cache", seed=9, bucket=OLD_BUCKET)
        before = listing(disk / "cache")
        arguments = ("cache", "unpack", str(packed.bundle), str(disk / "cache"), "--trusted-keys", str(keys.trusted))
        result = run_cli(*arguments)
        assert listing(disk / "cache") == before
    assert result.returncode == 7, result.stderr
    needed = sum(file.bytes for file in packed.manifest.files) + (16 << 20)
    assert f"error: unpacking needs {needed} bytes in {disk / 'cache'}" in result.stderr
    assert "hint:" in result.stderr and "Traceback" not in result.stderr


def test_a_disk_that_fills_up_during_unpacking_leaves_the_cache_unchanged(
    keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand small files take a page each, more than the free-space check requires."""
    monkeypatch.setattr(unpack_module, "SPARE_BYTES", 2 << 20)
    cache = tmp_path / "cache"
    manifest = manifest_for(cache, fill(cache, {f"fxgraph/{number:04}": 40 for number in range(1000)}))
    write_manifest(path_of(cache, manifest), manifest)
    pack(cache, key_of(manifest), tmp_path / "x.tcb", keys.secret)
    with mounted_tmpfs(tmp_path / "full", "-o", "size=20m") as disk:
        make_small(disk / "folder", seed=9, bucket=OLD_BUCKET)
        before = listing(disk / "folder")
        fill_disk_leaving(disk, (2 << 20) + 500_000)
        with pytest.raises(SpaceError, match=f"is full; unpacking needs {1000 * 40} bytes") as caught:
            unpack(tmp_path / "x.tcb", disk / "folder", keys.trusted)
        assert caught.value.exit_code == 7
        assert listing(disk / "folder") == before
        (disk / "filler").unlink()
        assert unpack(tmp_path / "x.tcb", disk / "folder", keys.trusted).files == 1000


# Concurrent processes


EIGHT_FORKS = """
import contextlib, io, json, os, sys
import cryptography.hazmat.primitives.serialization, zstandard
import tcdeploy.bundle.unpack  # before the forks, so that none of them imports it
from tcdeploy.cli import app as cli
waiting, start = os.pipe()
children = []
for _ in range(8):
    if child := os.fork():
        children.append(child)
        continue
    os.close(start)
    os.read(waiting, 1)  # until the parent has forked all
    code, output = 1, io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            cli.main()
    except SystemExit as exit_:
        code = exit_.code
    finally:
        os.write(1, (json.dumps(json.loads(output.getvalue())) + "\\n").encode())
        os._exit(code)
os.close(start)
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
"""


def test_eight_concurrent_processes_succeed_and_one_unpacks(packed: Packed, keys: Keys, tmp_path: Path) -> None:
    arguments = ("cache", "unpack", str(packed.bundle), str(tmp_path / "folder"), "--json")
    environ = cli_environment(tmp_path, TCDEPLOY_TRUSTED_KEYS=str(keys.trusted))
    with subprocess.Popen(
        [sys.executable, "-c", EIGHT_FORKS, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ,
    ) as runs:  # fmt: skip
        stdout, stderr = runs.communicate(timeout=120)
    assert runs.returncode == 0, stderr
    documents = [json.loads(line) for line in stdout.splitlines()]
    assert sorted(document["already_present"] for document in documents) == [False] + [True] * 7
    assert {document["plan_key"] for document in documents} == {packed.key}
    assert len(verify_folder(tmp_path / "folder", keys.trusted)) == 1 and staging_files_in(tmp_path / "folder") == []


def test_a_bundle_that_cannot_be_read_is_a_clear_error(keys: Keys, tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "nowhere.tcb", "No such file"), (tmp_path, "it is not a regular file")):
        with pytest.raises(UsageError, match=f"the bundle {path} cannot be read: {reason}"):
            open_bundle(path, keys.trusted)


def test_a_hundred_megabytes_are_restored(keys: Keys, tmp_path: Path, record_property: Any) -> None:
    """Half of it is compressible. Records the seconds in the test report."""
    cache = tmp_path / "cache"
    manifest = manifest_for(cache, fill(cache, {f"6n/{number:03}.so": 1 << 20 for number in range(100)}))
    write_manifest(path_of(cache, manifest), manifest)
    steps: dict[str, Callable[[], int]] = {
        "pack": lambda: pack(cache, key_of(manifest), tmp_path / "x.tcb", keys.secret).files,
        "verify": lambda: sum(plan.files for plan in verify_bundle(tmp_path / "x.tcb", keys.trusted)),
        "unpack": lambda: unpack(tmp_path / "x.tcb", tmp_path / "folder", keys.trusted).files,
    }
    for name, step in steps.items():
        started = time.perf_counter()
        assert step() == 100
        record_property(f"{name} seconds", round(time.perf_counter() - started, 2))
        print(f"{name}: {time.perf_counter() - started:.2f} s")
    print(f"{(tmp_path / 'x.tcb').stat().st_size / 1e6:.1f} MB")
    assert [plan.files for plan in verify_folder(tmp_path / "folder", keys.trusted)] == [100]
    shutil.rmtree(tmp_path / "folder")
    shutil.rmtree(cache)
