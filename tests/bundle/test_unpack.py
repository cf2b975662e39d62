"""A bundle is judged, checked and staged before a byte of a cache changes: hostile, cut, killed, full, all at once."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import struct
import subprocess
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tcdeploy.bundle import signing
from tcdeploy.bundle.container import Signature, read_signed_header, signed_header_bytes
from tcdeploy.bundle.header import REQUIRED_PLAN_FIELDS
from tcdeploy.bundle.pack import pack
from tcdeploy.bundle.signing import generate_key
from tcdeploy.bundle.unpack import open_bundle, unpack
from tcdeploy.bundle.verify import verify_bundle, verify_folder
from tcdeploy.bundle.why import version_differences
from tcdeploy.cache.contents import FileRecord
from tcdeploy.cache.manifest import SCHEMA_VERSION, write_manifest
from tcdeploy.errors import IntegrityError, SpaceError, TcdeployError, TrustError
from tcdeploy.planning.environment import installed_versions
from tests.bundle.conftest import Keys, Packed
from tests.bundle.fake_caches import (
    KINDS,
    Child,
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
from tests.conftest import cli_command, cli_environment, mounted_tmpfs

OLD_BUCKET = 64


@pytest.fixture
def old(tmp_path: Path) -> tuple[Path, Listing]:
    """A folder with another plan in it, which nothing here may change."""
    make_small(tmp_path / "folder", seed=9, bucket=OLD_BUCKET)
    for name in KINDS[::2]:  # the bundle's own, where the plans do not share them
        (tmp_path / "folder" / name).unlink()
    manifest = manifest_for(tmp_path / "folder", list(KINDS[1::2]), bucket=OLD_BUCKET)
    path_of(tmp_path / "folder", manifest).unlink()
    renamed = [f"old/{number}" for number, _ in enumerate(manifest.files)]
    (tmp_path / "folder" / "old").mkdir()
    for name, file in zip(renamed, manifest.files, strict=True):
        os.rename(tmp_path / "folder" / file.path, tmp_path / "folder" / name)
    manifest = manifest_for(tmp_path / "folder", renamed, bucket=OLD_BUCKET)
    write_manifest(path_of(tmp_path / "folder", manifest), manifest)
    return tmp_path / "folder", listing(tmp_path / "folder")


def refused(bundle: Path, old: tuple[Path, Listing], keys: Keys, error: type[TcdeployError] = IntegrityError) -> str:
    """Unpacking raises, changes nothing in the folder that is there, and leaves nothing in a new one."""
    folder, before = old
    beside = sorted(path.name for path in folder.parent.iterdir())
    with pytest.raises(error) as caught:
        unpack(bundle, folder, keys.trusted)
    assert type(caught.value) is error
    assert listing(folder) == before
    assert sorted(path.name for path in folder.parent.iterdir()) == beside, "nothing was written beside it"
    with pytest.raises(error):
        verify_bundle(bundle, keys.trusted)
    return caught.value.message


def test_a_bundle_becomes_a_cache_that_verifies(packed: Packed, keys: Keys, tmp_path: Path) -> None:
    done = unpack(packed.bundle, tmp_path / "a" / "b", keys.trusted)
    assert (done.plan_key, done.files, done.already_present) == (packed.key, len(packed.manifest.files), False)
    assert done.signer is not None and done.signer.name == "ci"
    found, there = contents(tmp_path / "a" / "b"), contents(packed.folder)
    names = {file.path for file in packed.manifest.files}
    assert {name: found[name] for name in names} == {name: there[name] for name in names}
    assert set(found) - names == {f"manifests/{packed.key}.json", f"bundles/{packed.key}.head"}
    assert staging_files_in(tmp_path / "a" / "b") == []
    [verified] = verify_folder(tmp_path / "a" / "b", keys.trusted)
    assert verified.signer is not None and verified.is_from_bundle


def test_an_unpacked_cache_packs_to_the_same_bytes_again(small: Packed, keys: Keys, tmp_path: Path) -> None:
    unpack(small.bundle, tmp_path / "folder", keys.trusted)
    pack(tmp_path / "folder", small.key, tmp_path / "again.tcb", keys.secret)
    assert (tmp_path / "again.tcb").read_bytes() == small.bundle.read_bytes()


def test_what_is_there_already_is_not_written_again(small: Packed, keys: Keys, tmp_path: Path) -> None:
    unpack(small.bundle, tmp_path / "folder", keys.trusted)
    before = listing(tmp_path / "folder")
    done = unpack(small.bundle, tmp_path / "folder", keys.trusted)
    assert done.already_present and listing(tmp_path / "folder") == before


@pytest.mark.parametrize("how", ["missing", "changed", "no manifest", "a damaged manifest", "no record"])
def test_what_was_damaged_since_is_put_right(small: Packed, keys: Keys, how: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    unpack(small.bundle, folder, keys.trusted)
    before = contents(folder)
    manifest = path_of(folder, small.manifest)
    if how == "missing":
        (folder / KINDS[3]).unlink()
    elif how == "changed":
        (folder / KINDS[3]).write_bytes(b"changed")
    elif how == "no manifest":
        manifest.unlink()
    elif how == "a damaged manifest":
        manifest.write_bytes(manifest.read_bytes()[:-5])
    else:
        (folder / "bundles" / f"{small.key}.head").unlink()
    assert unpack(small.bundle, folder, keys.trusted).already_present == (how == "no record")
    assert contents(folder) == before


def test_beside_another_plan_the_other_one_stays_as_it_was(
    small: Packed, keys: Keys, old: tuple[Path, Listing]
) -> None:
    folder, before = old
    unpack(small.bundle, folder, keys.trusted)
    after = contents(folder)
    assert {name: after[name] for name in before if name in after} == {
        name: content for name, (_, content) in before.items() if name in after
    }
    assert len(verify_folder(folder, keys.trusted)) == 2


def test_a_file_that_another_plan_has_with_other_bytes_stays_and_serves_both(
    small: Packed, keys: Keys, tmp_path: Path
) -> None:
    """A program that was built under another path: its name says that it is the same."""
    folder = tmp_path / "folder"
    theirs = make_small(folder, seed=9, bucket=OLD_BUCKET)
    before = {file.path: (folder / file.path).read_bytes() for file in theirs.files}
    assert {file.sha256 for file in theirs.files} != {file.sha256 for file in small.manifest.files}
    assert not unpack(small.bundle, folder, keys.trusted).already_present
    assert {name: (folder / name).read_bytes() for name in before} == before
    found = verify_folder(folder, keys.trusted)
    assert {one.plan_key for one in found} == {key_of(theirs), small.key}
    assert unpack(small.bundle, folder, keys.trusted).already_present


def test_a_damaged_file_of_another_plan_is_replaced(small: Packed, keys: Keys, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    theirs = make_small(folder, seed=9, bucket=OLD_BUCKET)
    shared = theirs.files[0].path
    (folder / shared).write_bytes(b"damaged")
    unpack(small.bundle, folder, keys.trusted)
    assert (folder / shared).read_bytes() == (small.folder / shared).read_bytes()


def test_a_file_that_another_plan_has_with_the_same_bytes_is_shared(small: Packed, keys: Keys, tmp_path: Path) -> None:
    make_small(tmp_path / "folder", bucket=OLD_BUCKET)
    unpack(small.bundle, tmp_path / "folder", keys.trusted)
    assert len(verify_folder(tmp_path / "folder", keys.trusted)) == 2


def test_a_place_that_is_a_file_is_a_clear_error(small: Packed, keys: Keys, tmp_path: Path) -> None:
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


# Fault 2: cut


def test_a_file_cut_anywhere_changes_nothing(small: Packed, keys: Keys, old: tuple[Path, Listing]) -> None:
    content, target = small.bundle.read_bytes(), old[0].parent / "cut.tcb"
    source = random.Random(4)
    lengths = {0, 1, 8, len(content) - 1, *(source.randrange(len(content)) for _ in range(196))}
    target.write_bytes(content)
    for length in sorted(lengths, reverse=True):
        os.truncate(target, length)
        refused(target, old, keys)


def test_a_tar_cut_at_every_border_of_its_members_is_noticed_behind_a_digest_that_fits(
    small: Packed, keys: Keys, old: tuple[Path, Listing]
) -> None:
    members = members_of(small.folder, small.manifest.files)
    target = old[0].parent / "cut.tcb"
    assert b"".join(members) + bytes(1024) == tar(*members)
    borders = [0]
    for one in members:
        borders.append(borders[-1] + len(one))
    whole = tar(*members)
    for place in {place for border in borders for place in (border, border + 1, border + 512)}:
        forge(target, compressed(whole[:place]), small.manifest, small.manifest.files, keys.secret)
        refused(target, old, keys)
    forge(target, compressed(whole), small.manifest, small.manifest.files, keys.secret)
    assert unpack(target, old[0], keys.trusted).files == len(members), "whole, the forgery is taken"


def test_a_zstd_frame_cut_anywhere_is_noticed_behind_a_digest_that_fits(
    small: Packed, keys: Keys, old: tuple[Path, Listing]
) -> None:
    with open(small.bundle, "rb") as file:
        file.seek(read_signed_header(file, "x").payload_offset)
        payload = file.read()
    target, source = old[0].parent / "cut.tcb", random.Random(5)
    for length in {0, 1, 3, len(payload) - 1, *(source.randrange(len(payload)) for _ in range(60))}:
        forge(target, payload[:length], small.manifest, small.manifest.files, keys.secret)
        refused(target, old, keys)


def test_a_zstd_frame_with_other_bytes_inside_is_an_integrity_error_too(
    small: Packed, keys: Keys, old: tuple[Path, Listing]
) -> None:
    """A digest that fits, over a frame that cannot be decompressed, or gives other bytes, from somewhere on."""
    payload = compressed(tar(*members_of(small.folder, small.manifest.files)))
    target, source = old[0].parent / "bad.tcb", random.Random(6)
    for _ in range(60):
        changed = bytearray(payload)
        changed[source.randrange(len(changed))] ^= 1 << source.randrange(8)
        forge(target, bytes(changed), small.manifest, small.manifest.files, keys.secret)
        try:
            refused(target, old, keys)
        except pytest.fail.Exception:  # a bit that says nothing, such as one of the window's size
            unpacked = unpack(target, old[0].parent / "harmless", keys.trusted)
            assert unpacked.already_present or verify_folder(old[0].parent / "harmless", keys.trusted)


def test_a_zstd_frame_that_breaks_inside_a_large_file_is_an_integrity_error(
    small: Packed, keys: Keys, old: tuple[Path, Listing]
) -> None:
    """Its blocks are counted before; the fault shows when half of the file was taken."""
    content = random.Random(7).randbytes(3 << 20)
    whole = tar(member("6n/large.so", content))
    pieces = [whole[start : start + BLOCK] for start in range(0, len(whole), BLOCK)]
    blocks = [raw_block(piece, is_last=number == len(pieces) - 1) for number, piece in enumerate(pieces)]
    files = (record("6n/large.so", content),)
    target = old[0].parent / "broken.tcb"
    for kind, number in ((0, 0), (3, len(blocks) // 2), (2, len(blocks) // 2)):
        first = blocks[number][0] & 0b1111_1001 | kind << 1
        broken = [*blocks[:number], bytes([first]) + blocks[number][1:], *blocks[number + 1 :]]
        forge(target, FRAME + b"".join(broken), small.manifest, files, keys.secret)
        if kind:
            assert "cannot be decompressed" in refused(target, old, keys)
        else:
            assert verify_bundle(target, keys.trusted).files == 1, "unbroken, it is taken"


FRAME = zstandard.FRAME_HEADER + bytes([0b0000_0000, 0x58])  # no checksum, a window of 2 MiB
BLOCK = 128 << 10


def raw_block(content: bytes, is_last: bool) -> bytes:
    return struct.pack("<I", len(content) << 3 | is_last)[:3] + content


# Fault 4: hostile, and signed by a key that we trust

NAME, CONTENT = "fxgraph/evil", b"evil content, a little of it"
AT = 3  # the member that is replaced


def with_member(small: Packed, *instead: bytes) -> list[bytes]:
    members = members_of(small.folder, small.manifest.files)
    return [*members[:AT], *instead, *members[AT + 1 :]]


def hostile_payloads(small: Packed) -> dict[str, bytes]:
    """Tars that are not what the (good) header says."""
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
    found = {name: tar(*with_member(small, one)) for name, one in special.items()}
    return found | {
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
def test_a_signed_bundle_with_another_tar_than_its_header_says_is_refused(
    small: Packed, keys: Keys, old: tuple[Path, Listing], what: str
) -> None:
    payloads = hostile_payloads(small)
    assert set(payloads) == set(HOSTILE_PAYLOADS)
    payload = compressed(payloads[what])
    refused(forge(old[0].parent / "evil.tcb", payload, small.manifest, small.manifest.files, keys.secret), old, keys)
    assert not Path("/tmp/tcdeploy-was-here").exists()


@pytest.mark.parametrize("how", ["a frame", "an empty frame", "a skippable frame", "junk", "a skippable frame before"])
def test_something_beside_the_frame_of_the_payload_is_refused(
    small: Packed, keys: Keys, old: tuple[Path, Listing], how: str
) -> None:
    whole = compressed(tar(*members_of(small.folder, small.manifest.files)))
    skippable = struct.pack("<II", 0x184D2A52, 4) + b"evil"
    payload = {
        "a frame": whole + compressed(member(NAME, CONTENT)), "an empty frame": whole + compressed(),
        "a skippable frame": whole + skippable, "junk": whole + b"\0", "a skippable frame before": skippable + whole,
    }[how]  # fmt: skip
    refused(forge(old[0].parent / "evil.tcb", payload, small.manifest, small.manifest.files, keys.secret), old, keys)


def test_a_payload_of_two_frames_that_make_one_tar_is_refused(
    small: Packed, keys: Keys, old: tuple[Path, Listing]
) -> None:
    whole = tar(*members_of(small.folder, small.manifest.files))
    payload = compressed(whole[:5000]) + compressed(whole[5000:])
    refused(forge(old[0].parent / "evil.tcb", payload, small.manifest, small.manifest.files, keys.secret), old, keys)


def test_a_window_larger_than_we_hold_is_refused(small: Packed, keys: Keys, old: tuple[Path, Listing]) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=30)
    whole = tar(*members_of(small.folder, small.manifest.files))
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    payload = stream.compress(whole) + stream.flush()
    assert zstandard.get_frame_parameters(payload).window_size == 1 << 30
    bundle = forge(old[0].parent / "evil.tcb", payload, small.manifest, small.manifest.files, keys.secret)
    assert "cannot be decompressed" in refused(bundle, old, keys)


HOSTILE_FILES = {
    "the way up": "../x", "an absolute path": "/tmp/tcdeploy-was-here", "an empty part": "a//b", "a dot": "a/./b",
    "a backslash": "a\\..\\b/c", "NUL": "a/b\0c", "a surrogate": "a/\ud800", "no folder": "plain", "nothing": "",
    "a line": "a/b\nc", "another plan's manifest": "manifests/0123456789abcdef.json", "a lease": "leases/x",
    "a bundle's record": "bundles/0123456789abcdef.head", "a staging folder": ".staging-x/y", "hidden": "a/.b",
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE_FILES)
def test_a_signed_header_that_names_what_no_cache_has_is_refused(
    small: Packed, keys: Keys, old: tuple[Path, Listing], what: str
) -> None:
    """With a payload that fits, as far as a tar can hold such a name."""
    files = (*small.manifest.files, record(HOSTILE_FILES[what], CONTENT))
    payload = compressed(tar(*members_of(small.folder, small.manifest.files), member(HOSTILE_FILES[what], CONTENT)))
    message = refused(forge(old[0].parent / "evil.tcb", payload, small.manifest, files, keys.secret), old, keys)
    assert "names a file that no cache has" in message
    assert not Path("/tmp/tcdeploy-was-here").exists()


@pytest.mark.parametrize("size", [0, -1, -(1 << 70), True, 1.5, "7", None, 100 << 30, 1 << 70, float("inf")])
def test_a_signed_header_with_a_size_that_is_none_is_refused(
    small: Packed, keys: Keys, old: tuple[Path, Listing], size: Any
) -> None:
    files = (*small.manifest.files, FileRecord(NAME, size, "0" * 64))
    payload = compressed(tar(*members_of(small.folder, small.manifest.files), member(NAME, CONTENT)))
    refused(forge(old[0].parent / "evil.tcb", payload, small.manifest, files, keys.secret), old, keys)


def test_a_signed_header_that_names_a_file_twice_or_a_folder_as_a_file_is_refused(
    small: Packed, keys: Keys, old: tuple[Path, Listing]
) -> None:
    members = members_of(small.folder, small.manifest.files)
    for more in (small.manifest.files[0], record("fxgraph/evil/a", CONTENT)):
        files = (*small.manifest.files, record(NAME, CONTENT), more)
        payload = compressed(tar(*members, member(NAME, CONTENT), member(more.path, CONTENT)))
        refused(forge(old[0].parent / "evil.tcb", payload, small.manifest, files, keys.secret), old, keys)


def test_a_name_that_our_own_files_in_the_staging_folder_have_is_no_files_of_a_cache(
    small: Packed, keys: Keys, tmp_path: Path
) -> None:
    files = (record("manifest/x", CONTENT),)
    bundle = forge(
        tmp_path / "x.tcb", compressed(tar(member("manifest/x", CONTENT))), small.manifest, files, keys.secret
    )
    with pytest.raises(IntegrityError, match="it names a file that no cache has: 'manifest/x'"):
        unpack(bundle, tmp_path / "folder", keys.trusted)
    assert not (tmp_path / "folder").exists()


ODD = (None, True, 0, -1, 1.5, 1 << 70, float("inf"), float("nan"), "", "x", "\ud800", [], [[]], {}, {"a": 1})


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key and index of a JSON document; of long lists the first."""
    inner = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document[:1])
        if isinstance(document, list)
        else ()
    )
    found = [path] if path else []
    for key, value in inner:
        found += places(value, (*path, key))
    return found


def test_a_signed_header_with_anything_anywhere_is_taken_or_refused_and_never_a_crash(
    small: Packed, keys: Keys, tmp_path: Path
) -> None:
    """Each place of the header's document holds each odd value once, or is left out."""
    payload = compressed(tar(*members_of(small.folder, small.manifest.files)))
    documents: list[Any] = []
    with_document(small.manifest, payload, lambda document: documents.append(json.loads(json.dumps(document))))
    source, outcomes, here = random.Random(11), {True: 0, False: 0}, installed_versions()
    every = [(path, odd) for path in places(documents[0]) for odd in (*ODD, "left out")]
    facts = [
        (path, odd)
        for path, odd in every
        if odd == "left out" or "environment" in path or path[-1] in REQUIRED_PLAN_FIELDS
    ]
    for path, odd in [*facts, *source.sample(every, 150)]:

        def spoil(document: Any, path: tuple[Any, ...] = path, odd: Any = odd) -> None:
            for key in path[:-1]:
                document = document[key]
            if odd == "left out":
                del document[path[-1]]
            else:
                document[path[-1]] = odd

        header = with_document(small.manifest, payload, spoil)
        bundle = forge_header(tmp_path / "odd.tcb", header, payload, keys.secret)
        try:
            opened = open_bundle(bundle, keys.trusted)
            version_differences(opened.header.manifest, here)
            verify_bundle(bundle, keys.trusted)
            outcomes[True] += 1
        except IntegrityError:
            outcomes[False] += 1
        except Exception as error:
            raise AssertionError(f"{odd!r} at {path}") from error
    assert all(outcomes.values()), outcomes


@pytest.mark.parametrize("header", [b"", b"null", b"[]", b"{}", b"\xff", b"[" * 99_999, b'{"payload": 1}', b"9" * 9999])
def test_a_signed_header_that_is_no_document_is_refused(keys: Keys, old: tuple[Path, Listing], header: bytes) -> None:
    refused(forge_header(old[0].parent / "evil.tcb", header, b"", keys.secret), old, keys)


@pytest.mark.parametrize("depth", [100, 300, 900, 2000, 50_000])
def test_a_manifest_nested_deeply_is_refused(small: Packed, keys: Keys, old: tuple[Path, Listing], depth: int) -> None:
    payload = compressed(tar(*members_of(small.folder, small.manifest.files)))
    nested = "[" * depth + "]" * depth
    text = json.dumps({"schema": SCHEMA_VERSION, "sha256": "0" * 64, "plan": "here"}).replace('"here"', nested)
    header = json.dumps({"payload": {"bytes": len(payload), "sha256": "0" * 64}, "manifest": text}).encode()
    refused(forge_header(old[0].parent / "evil.tcb", header, payload, keys.secret), old, keys)

    def nest(document: Any) -> None:
        for _ in range(depth):
            document["manifest"]["plan"]["decisions"] = [document["manifest"]["plan"]["decisions"]]

    if depth <= 900:  # deeper, the forger's own json gives up
        header = with_document(small.manifest, payload, nest)
        bundle = forge_header(old[0].parent / "evil.tcb", header, payload, keys.secret)
        with pytest.raises(IntegrityError):
            verify_bundle(bundle, keys.trusted)
            raise IntegrityError("taken as it is: so deep it may be")


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
    """The error and the peak of memory in MiB of a process that unpacks this; its ru_maxrss would begin with ours."""
    with Child(MEASURED, bundle, tmp_path / "never", keys.trusted) as child:
        name, kilobytes = child.line().split()
    return name, int(kilobytes) // 1024


def test_the_measure_of_memory_measures(packed: Packed, keys: Keys, tmp_path: Path) -> None:
    name, peak = peak_of(packed.bundle, keys, tmp_path)
    assert name == "nothing" and 20 < peak < 150


def zeros(gigabytes: int) -> bytes:
    """One zstd frame that says it is so many GB of zeros, in blocks of 128 KiB that are one byte each, repeated."""
    return FRAME + zero_block(BLOCK) * (gigabytes << 13) + raw_block(b"", is_last=True)


def zero_block(length: int) -> bytes:
    return struct.pack("<I", length << 3 | 1 << 1)[:3] + b"\0"


def test_the_bomb_of_these_tests_decompresses() -> None:
    bomb = zeros(1)
    count = sum(len(chunk) for chunk in zstandard.ZstdDecompressor().read_to_iter(bomb))
    assert count == 1 << 30 and len(bomb) < 40_000


@pytest.mark.parametrize("place", ["instead of the files", "as one file", "behind the files"])
def test_ten_gigabytes_out_of_a_few_kilobytes_take_no_memory_and_no_disk(
    small: Packed, keys: Keys, place: str, tmp_path: Path
) -> None:
    files, payload = small.manifest.files, zeros(10)
    if place == "as one file":
        files = (FileRecord(NAME, 10 << 30, "0" * 64),)
    elif place == "behind the files":
        whole = tar(*members_of(small.folder, files))
        payload = FRAME + raw_block(whole, is_last=False) + payload[len(FRAME) :]
    bundle = forge(tmp_path / "bomb.tcb", payload, small.manifest, files, keys.secret)
    assert bundle.stat().st_size < 500_000
    started = time.monotonic()
    name, peak = peak_of(bundle, keys, tmp_path)
    assert name == "IntegrityError" and peak < 250
    assert time.monotonic() - started < 20, "it was decompressed to the end"
    assert not (tmp_path / "never").exists() or contents(tmp_path / "never") == {}


def test_a_large_file_goes_by_in_pieces(small: Packed, keys: Keys, tmp_path: Path) -> None:
    """400 MB of zeros, as the header says, and the digest wrong: taken to the end, and never held as a whole."""
    file = FileRecord(NAME, 3200 * BLOCK, "0" * 64)
    signed_header = member(NAME, b"", size=file.bytes)
    payload = FRAME + raw_block(signed_header, False) + zero_block(BLOCK) * 3200 + raw_block(bytes(1024), True)
    bundle = forge(tmp_path / "large.tcb", payload, small.manifest, (file,), keys.secret)
    name, peak = peak_of(bundle, keys, tmp_path)
    assert name == "IntegrityError" and peak < 150
    with pytest.raises(IntegrityError, match=f"{NAME} has other bytes"):
        verify_bundle(bundle, keys.trusted)


def test_a_million_files_are_refused_in_bounded_memory(small: Packed, keys: Keys, tmp_path: Path) -> None:
    """Named as shortly as it goes they are read and counted; with their digests the header is too long to be read."""
    files = ",".join(f'{{"path": "a/{count}", "bytes": 1, "sha256": ""}}' for count in range(1_000_000))
    few = json.dumps(
        {"payload": {"bytes": 0, "sha256": ""}, "manifest": f'{{"schema": {SCHEMA_VERSION}, "files": [{files}]}}'}
    )
    for header, most in ((few.encode(), 700), (bytes(150 << 20), 100)):
        bundle = forge_header(tmp_path / "many.tcb", header, b"", keys.secret)
        name, peak = peak_of(bundle, keys, tmp_path)
        assert (name, peak < most, (tmp_path / "never").exists()) == ("IntegrityError", True, False), peak


# Fault 3: who says so


def resigned(bundle: Path, target: Path, header: Callable[[bytes], bytes], *signatures: Signature) -> Path:
    """The bundle with another header, and signatures (its own, where none are given), under a digest that fits."""
    with open(bundle, "rb") as file:
        signed_header = read_signed_header(file, "x")
        payload = file.read()
    target.write_bytes(
        signed_header_bytes(header(signed_header.header), signatures or signed_header.signatures) + payload
    )
    return target


def as_it_is(header: bytes) -> bytes:
    return header


def header_alone(bundle: Path) -> bytes:
    with open(bundle, "rb") as file:
        return bundle.read_bytes()[: read_signed_header(file, "x").payload_offset]


def unsigned(small: Packed, target: Path) -> Path:
    pack(small.folder, small.key, target)
    return target


def test_without_a_signature_nothing_is_unpacked(small: Packed, keys: Keys, old: tuple[Path, Listing]) -> None:
    bundle = unsigned(small, old[0].parent / "unsigned.tcb")
    assert "is not signed" in refused(bundle, old, keys, TrustError)
    done = unpack(bundle, old[0], keys.trusted, allow_unsigned=True)
    assert done.signer is None and not done.already_present


def test_a_key_that_nobody_here_knows_is_no_signature(small: Packed, keys: Keys, old: tuple[Path, Listing]) -> None:
    place = old[0].parent
    stranger = generate_key(place / "stranger")
    pack(small.folder, small.key, place / "x.tcb", place / "stranger.key")
    assert f"signed by {stranger}, and that is no trusted key" in refused(place / "x.tcb", old, keys, TrustError)


def test_a_payload_that_changed_is_damage(small: Packed, keys: Keys, old: tuple[Path, Listing]) -> None:
    content = bytearray(small.bundle.read_bytes())
    content[-100] ^= 1
    (old[0].parent / "x.tcb").write_bytes(content)
    assert "its files have other bytes" in refused(old[0].parent / "x.tcb", old, keys)


def test_a_header_that_changed_is_damage_and_with_a_digest_that_fits_it_is_distrust(
    small: Packed, keys: Keys, old: tuple[Path, Listing]
) -> None:
    target = old[0].parent / "x.tcb"
    content = small.bundle.read_bytes()
    target.write_bytes(content.replace(b"someone/model", b"someone/other", 1))
    refused(target, old, keys, IntegrityError)
    resigned(small.bundle, target, lambda header: header.replace(b"someone/model", b"someone/other", 1))
    assert "the signature of ci does not fit" in refused(target, old, keys, TrustError)
    with pytest.raises(TrustError):
        unpack(target, old[0], keys.trusted, allow_unsigned=True)


def test_a_signature_made_for_something_else_is_none(
    small: Packed, packed: Packed, keys: Keys, old: tuple[Path, Listing]
) -> None:
    """Of the bare header, of another purpose, of another bundle, of nothing; and a key's name on another's work."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    place = old[0].parent
    key = load_pem_private_key(keys.secret.read_bytes(), None)
    with open(small.bundle, "rb") as file, open(packed.bundle, "rb") as other:
        signed_header, others = read_signed_header(file, "x"), read_signed_header(other, "x")
    [mine] = signed_header.signatures
    generate_key(place / "stranger")
    stranger = signing.sign(signed_header.header, place / "stranger.key")
    for wrong in (
        key.sign(signed_header.header).hex(),  # type: ignore[union-attr,call-arg]
        key.sign(b"tcdeploy bundle payload\n" + signed_header.header).hex(),  # type: ignore[union-attr,call-arg]
        others.signatures[0].signature,
        "00" * 64,
        "",
        "00",
        stranger.signature,
    ):
        bundle = resigned(small.bundle, place / "x.tcb", as_it_is, replace(mine, signature=wrong))
        assert "the signature of ci does not fit" in refused(bundle, old, keys, TrustError)
    bundle = resigned(small.bundle, place / "x.tcb", as_it_is, replace(stranger, signature=mine.signature))
    assert "no trusted key" in refused(bundle, old, keys, TrustError)
    resigned(small.bundle, place / "x.tcb", as_it_is, mine)
    assert verify_bundle(place / "x.tcb", keys.trusted).signer is not None, "the right one is taken in the same way"


@pytest.mark.parametrize("who", ["nobody", "a stranger", "a false hand"])
def test_nothing_behind_a_signature_that_is_none_is_read(small: Packed, keys: Keys, who: str, tmp_path: Path) -> None:
    """From a pipe that holds the head alone and stays open: who would read on would wait. The header is no document."""
    generate_key(tmp_path / "stranger")
    [mine] = (signing.sign(b"another header", keys.secret),)
    signatures = {
        "nobody": (), "a stranger": (signing.sign(b"{no header", tmp_path / "stranger.key"),), "a false hand": (mine,)
    }[who]  # fmt: skip
    content = signed_header_bytes(b"{no header", signatures)
    os.mkfifo(tmp_path / "pipe")
    end = os.open(tmp_path / "pipe", os.O_RDWR)
    try:
        os.write(end, content)
        with Child(MEASURED, tmp_path / "pipe", tmp_path / "never", keys.trusted) as child:
            assert child.line().split()[0] == "TrustError"
    finally:
        os.close(end)
    assert not (tmp_path / "never").exists()


def test_distrust_comes_before_the_cut_and_before_the_damage(
    small: Packed, keys: Keys, old: tuple[Path, Listing]
) -> None:
    target = old[0].parent / "x.tcb"
    signed_header = header_alone(unsigned(small, target))
    for behind in (b"", b"junk" * 100):
        target.write_bytes(signed_header + behind)
        refused(target, old, keys, TrustError)
    target.write_bytes(header_alone(small.bundle))
    assert "0 bytes behind its head instead of" in refused(target, old, keys, IntegrityError)


# Fault 5


class Poison:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def test_a_poisoned_pickle_of_an_unsigned_bundle_gets_nowhere(
    run_cli: Callable[..., Any], keys: Keys, tmp_path: Path
) -> None:
    """Where torch keeps its pickled graphs. With --allow-unsigned it is put there, and still nobody loaded it."""
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
    assert trace.exists(), "it was poisoned"


# Fault 6, as far as it shows without torch


def test_a_bundle_for_another_torch_is_exit_3_with_a_table(
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
    assert "made for another environment: python, torch" in result.stderr and "1.13.1" in result.stderr
    assert not (tmp_path / "folder").exists()
    assert run_cli(*arguments, "--any-environment").returncode == 0


# Fault 9: killed

UNPACKER = """
import sys, time
from pathlib import Path
from tcdeploy.bundle.unpack import unpack
import cryptography.hazmat.primitives.serialization, zstandard
bundle, folder, trusted = map(Path, sys.argv[1:])
print("ready", flush=True)
sys.stdin.readline()
started = time.perf_counter()
unpack(bundle, folder, trusted)
print(time.perf_counter() - started, flush=True)
"""


def test_killed_at_twenty_moments_the_old_cache_is_intact_and_the_next_one_succeeds(
    packed: Packed, keys: Keys, tmp_path: Path
) -> None:
    folder, source, left = tmp_path / "folder", random.Random(12), 0
    make_small(tmp_path / "made", seed=9, bucket=OLD_BUCKET)
    names = fill(folder, {f"old/{number}": 700 for number in range(8)})
    theirs = manifest_for(folder, names, bucket=OLD_BUCKET)
    write_manifest(path_of(folder, theirs), theirs)
    before = contents(folder)
    with Child(UNPACKER, packed.bundle, tmp_path / "measured", keys.trusted) as child:
        child.line()
        child.go()
        seconds = float(child.line())
    for number in range(20):
        with Child(UNPACKER, packed.bundle, folder, keys.trusted) as child:
            assert child.line() == "ready"
            child.kill_after(seconds * (number + source.random()) / 20)
        found = contents(folder)
        assert {name: found[name] for name in before} == before
        left += bool(staging_files_in(folder))
        plans = {one.plan_key: one for one in verify_folder(folder, keys.trusted)}
        assert key_of(theirs) in plans and plans[key_of(theirs)].files == len(names)
        if number % 4 == 3:
            done = unpack(packed.bundle, folder, keys.trusted)
            assert done.already_present == (packed.key in plans)
            assert [
                name for name in staging_files_in(folder) if name.startswith(".staging")
            ] == [] or done.already_present
            assert len(verify_folder(folder, keys.trusted)) == 2
            for name in set(contents(folder)) - set(before):
                (folder / name).unlink()
    assert left >= 5, "few were killed at their work"


DYING = """
import os, signal, sys
from pathlib import Path
from tcdeploy.bundle.unpack import unpack
bundle, folder, trusted = map(Path, sys.argv[1:4])
left = int(sys.argv[4])
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


def test_killed_between_any_two_renames_the_plan_is_there_whole_or_not_at_all(
    small: Packed, keys: Keys, tmp_path: Path
) -> None:
    """Files first, then the manifest that makes them count, then the record of the bundle."""
    seen = []
    for done in (0, 1, len(KINDS) // 2, len(KINDS) - 1, len(KINDS), len(KINDS) + 1):
        folder = tmp_path / f"killed after {done}"
        theirs = manifest_for(folder, fill(folder, {"old/x": 700}), bucket=OLD_BUCKET)
        write_manifest(path_of(folder, theirs), theirs)
        with Child(DYING, small.bundle, folder, keys.trusted, done) as child:
            assert child.process.wait() == -9
        plans = [one.plan_key for one in verify_folder(folder, keys.trusted)]
        seen.append((sum((folder / name).exists() for name in KINDS), small.key in plans))
        assert key_of(theirs) in plans and staging_files_in(folder)
        assert unpack(small.bundle, folder, keys.trusted).already_present == seen[-1][1]
        found = {one.plan_key: one.signer for one in verify_folder(folder, keys.trusted)}
        assert found[small.key] is not None and found[key_of(theirs)] is None
    half = len(KINDS) // 2
    assert seen == [(0, False), (1, False), (half, False), (16, False), (17, False), (17, True)]


def test_what_a_killed_one_left_is_removed_by_the_next(small: Packed, keys: Keys, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / ".staging-dead" / "fxgraph").mkdir(parents=True)
    (folder / ".staging-dead" / "fxgraph" / "half").write_bytes(b"half a file")
    unpack(small.bundle, folder, keys.trusted)
    assert staging_files_in(folder) == []


# Fault 11: full


def test_without_room_the_bytes_needed_are_said_and_nothing_is_begun(
    run_cli: Callable[..., Any], packed: Packed, keys: Keys, tmp_path: Path
) -> None:
    with mounted_tmpfs(tmp_path / "small", "-o", "size=8m") as place:
        make_small(place / "cache", seed=9, bucket=OLD_BUCKET)
        before = listing(place / "cache")
        arguments = ("cache", "unpack", str(packed.bundle), str(place / "cache"), "--trusted-keys", str(keys.trusted))
        result = run_cli(*arguments)
        assert listing(place / "cache") == before
    assert result.returncode == 7, result.stderr
    needed = sum(file.bytes for file in packed.manifest.files) + (16 << 20)
    assert f"error: unpacking needs {needed} bytes in {place / 'cache'}" in result.stderr
    assert "hint:" in result.stderr and "Traceback" not in result.stderr


def test_a_disk_that_fills_up_while_unpacking_leaves_the_old_state(keys: Keys, tmp_path: Path) -> None:
    """Thousands of small files take a page each: more than the room that is asked for first."""
    cache = tmp_path / "cache"
    manifest = manifest_for(cache, fill(cache, {f"fxgraph/{number:04}": 40 for number in range(5000)}))
    write_manifest(path_of(cache, manifest), manifest)
    pack(cache, key_of(manifest), tmp_path / "x.tcb", keys.secret)
    with mounted_tmpfs(tmp_path / "full", "-o", "size=60m") as place:
        make_small(place / "folder", seed=9, bucket=OLD_BUCKET)
        before = listing(place / "folder")
        fill_disk_leaving(place, (16 << 20) + 500_000)
        with pytest.raises(SpaceError, match=f"is full: {5000 * 40} bytes are needed") as caught:
            unpack(tmp_path / "x.tcb", place / "folder", keys.trusted)
        assert caught.value.exit_code == 7
        assert listing(place / "folder") == before
        (place / "filler").unlink()
        assert unpack(tmp_path / "x.tcb", place / "folder", keys.trusted).files == 5000


# Fault 12: at once


def test_eight_processes_at_once_all_succeed_and_one_works(packed: Packed, keys: Keys, tmp_path: Path) -> None:
    arguments = ("cache", "unpack", str(packed.bundle), str(tmp_path / "folder"), "--json")
    environ = cli_environment(tmp_path, TCDEPLOY_TRUSTED_KEYS=str(keys.trusted))
    runs = [
        subprocess.Popen(
            cli_command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
        )
        for _ in range(8)
    ]
    documents = []
    for run in runs:
        stdout, stderr = run.communicate(timeout=120)
        assert run.returncode == 0, stderr
        documents.append(json.loads(stdout))
    assert sorted(document["already_present"] for document in documents) == [False] + [True] * 7
    assert {document["plan_key"] for document in documents} == {packed.key}
    assert len(verify_folder(tmp_path / "folder", keys.trusted)) == 1 and staging_files_in(tmp_path / "folder") == []


def test_a_bundle_that_is_no_file_is_a_clear_error(keys: Keys, tmp_path: Path) -> None:
    for place, reason in ((tmp_path / "nowhere.tcb", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(TcdeployError, match=f"the bundle {place} cannot be read: {reason}"):
            open_bundle(place, keys.trusted)


def test_a_hundred_megabytes_come_back_as_they_were(keys: Keys, tmp_path: Path, record_property: Any) -> None:
    """Half of it compresses; the seconds stand in the report of the run."""
    cache = tmp_path / "cache"
    manifest = manifest_for(cache, fill(cache, {f"6n/{number:03}.so": 1 << 20 for number in range(100)}))
    write_manifest(path_of(cache, manifest), manifest)
    steps: dict[str, Callable[[], Any]] = {
        "pack": lambda: pack(cache, key_of(manifest), tmp_path / "x.tcb", keys.secret),
        "verify": lambda: verify_bundle(tmp_path / "x.tcb", keys.trusted),
        "unpack": lambda: unpack(tmp_path / "x.tcb", tmp_path / "folder", keys.trusted),
    }
    for name, step in steps.items():
        started = time.perf_counter()
        assert step().files == 100
        record_property(f"{name} seconds", round(time.perf_counter() - started, 2))
        print(f"{name}: {time.perf_counter() - started:.2f} s")
    print(f"{(tmp_path / 'x.tcb').stat().st_size / 1e6:.1f} MB")
    assert [one.files for one in verify_folder(tmp_path / "folder", keys.trusted)] == [100]
    shutil.rmtree(tmp_path / "folder")
    shutil.rmtree(cache)
