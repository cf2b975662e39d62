"""The file format: other tools can read it, and our reader accepts only what our writer writes."""

from __future__ import annotations

import hashlib
import io
import shutil
import struct
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tcdeploy.bundle.container import read_files
from tcdeploy.cache.files.records import FileRecord
from tcdeploy.cache.record import bundle_header
from tcdeploy.cache.record.bundle_header import check_files, make_portable, parse_header
from tcdeploy.cache.trust.signing import Signature, SignedHeader, read_signed_header, signed_header_bytes
from tcdeploy.errors import IntegrityError
from tests.bundle.conftest import Packed
from tests.bundle.fake_caches import KINDS
from tests.bundle.forging import record


def signed_header_of(bundle: Path) -> SignedHeader:
    with open(bundle, "rb") as file:
        return read_signed_header(file, str(bundle))


def test_files_are_read_back_unchanged(packed: Packed) -> None:
    signed_header = signed_header_of(packed.bundle)
    header = parse_header(signed_header, "x")
    files = read_files(packed.bundle, signed_header, header.manifest.files)
    assert {file: b"".join(chunks) for file, chunks in files} == {
        file: (packed.folder / file.path).read_bytes() for file in packed.manifest.files
    }


def test_the_header_is_the_manifest_without_paths_of_the_machine(packed: Packed) -> None:
    manifest = parse_header(signed_header_of(packed.bundle), "x").manifest
    assert manifest.plan["key"] == packed.key and manifest.files == packed.manifest.files
    assert packed.manifest.plan["cache_dir"] == str(packed.folder)
    assert make_portable(packed.manifest).plan["cache_dir"] == manifest.plan["cache_dir"] == ""
    assert str(packed.folder) not in signed_header_of(packed.bundle).header.decode()
    assert packed.manifest.environment["user_cache_dir"] not in signed_header_of(packed.bundle).header.decode()


def test_the_fake_cache_has_paths_that_are_hard_for_tar() -> None:
    lengths = {len(path) for path in KINDS}
    assert {99, 100, 101} <= lengths and max(lengths) > 255 and any(not path.isascii() for path in KINDS)


@pytest.mark.skipif(not (shutil.which("zstd") and shutil.which("tar")), reason="needs the tools zstd and tar")
def test_zstd_and_tar_list_and_extract_it(packed: Packed, tmp_path: Path) -> None:
    """GNU tar prints non-ASCII names in octal without --quoting-style=literal."""
    listed = subprocess.run(
        f"zstd -dc {packed.bundle} | tar -t --quoting-style=literal", shell=True, capture_output=True, check=True
    )
    assert listed.stdout.decode().splitlines() == [file.path for file in packed.manifest.files]
    subprocess.run(f"zstd -dc {packed.bundle} | tar -x -C {tmp_path}", shell=True, check=True)
    for file in packed.manifest.files:
        assert record(file.path, (tmp_path / file.path).read_bytes()) == file


def test_python_tarfile_reads_it(small: Packed) -> None:
    with open(small.bundle, "rb") as file:
        content = zstandard.ZstdDecompressor().stream_reader(file.read(), read_across_frames=True).read()
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        members = archive.getmembers()
    assert [member.name for member in members] == [file.path for file in small.manifest.files]
    assert all(member.isreg() for member in members)
    assert {(member.mode, member.mtime, member.uid, member.uname) for member in members} == {(0o644, 0, 0, "")}


# The signed header


def test_reading_the_signed_header_stops_before_the_payload() -> None:
    signatures = (Signature("ab" * 16, "cd" * 64), Signature("ef" * 16, "01" * 64))
    content = signed_header_bytes(b"header", signatures)
    assert read_signed_header(io.BytesIO(content + b"payload"), "x") == SignedHeader(
        b"header", signatures, len(content)
    )
    assert read_signed_header(io.BytesIO(signed_header_bytes(b"", ())), "x").header == b""


def test_a_truncated_signed_header_is_an_integrity_error() -> None:
    content = signed_header_bytes(b"header", (Signature("ab" * 16, "cd" * 64),))
    for length in range(len(content)):
        with pytest.raises(IntegrityError):
            read_signed_header(io.BytesIO(content[:length]), "x")


def test_every_flipped_bit_of_a_signed_header_is_an_integrity_error() -> None:
    """Also with signatures of unknown keys: a checksum covers header and signatures."""
    content = signed_header_bytes(b"header", (Signature("ab" * 16, "cd" * 64), Signature("ef" * 16, "01" * 64)))
    for bit in range(len(content) * 8):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(IntegrityError):
            read_signed_header(io.BytesIO(changed), "x")


def frames(header: bytes, signatures: bytes) -> bytes:
    content = b"tcdeploy bundle 1\n" + header
    return (
        struct.pack("<II", 0x184D2A50, len(content)) + content
        + struct.pack("<II", 0x184D2A51, len(signatures)) + signatures
    )  # fmt: skip


def test_the_frames_of_these_tests_match_the_writer() -> None:
    digest = hashlib.sha256(b"header[]").hexdigest()
    assert frames(b"header", f'{{"sha256":"{digest}","signatures":[]}}'.encode()) == signed_header_bytes(b"header", ())


@pytest.mark.parametrize(
    "signatures",
    [
        b"", b"{}", b"[]", b"null", b"1", b'"x"', b"\xff", b"[" * 100_000, b'{"signatures": null}',
        b'{"signatures": 3}', b'{"signatures": [3]}', b'{"signatures": [{}]}',
        b'{"signatures": [{"key": 1, "signature": 2}]}',
        b'{"signatures": [{"key": "zz", "signature": "\\ud800"}]}', b'{"signatures": []}', b'{"signatures": {}}',
        b'{"signatures": [{"key": "", "signature": "", "more": 1}]}', b'{"signatures": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda content: content[:40].decode("latin-1"),
)  # fmt: skip
def test_invalid_signature_documents_are_an_integrity_error(signatures: bytes) -> None:
    with pytest.raises(IntegrityError):
        read_signed_header(io.BytesIO(frames(b"header", signatures)), "x")


@pytest.mark.parametrize(
    "fields", [("zz", "00"), ("AB", "00"), ("ab", "CD"), ("a b", "00"), ("ab ", "00"), (1, "00"), ("ab", None)]
)
def test_a_signature_that_is_not_canonical_hex_is_refused_despite_a_valid_checksum(fields: tuple[Any, Any]) -> None:
    assert read_signed_header(io.BytesIO(signed_header_bytes(b"header", (Signature("ab", "cd"),))), "x").signatures
    with pytest.raises(IntegrityError):
        read_signed_header(io.BytesIO(signed_header_bytes(b"header", (Signature(*fields),))), "x")


def test_signatures_that_are_not_canonical_json_are_refused() -> None:
    content = signed_header_bytes(b"header", ())
    document = content[content.index(b'{"sha256') :]
    assert read_signed_header(io.BytesIO(frames(b"header", document)), "x").signatures == ()
    for other in (b" " + document, document + b"\n", document.replace(b":", b": ", 1)):
        with pytest.raises(IntegrityError, match="its header and signatures do not match their checksum"):
            read_signed_header(io.BytesIO(frames(b"header", other)), "x")


@pytest.mark.parametrize("content", [b"", b"P", b"\x28\xb5\x2f\xfd", b"PK\x03\x04" * 10, bytes(100), b"#!/bin/sh\n"])
def test_a_file_of_another_format_is_not_a_bundle(content: bytes) -> None:
    with pytest.raises(IntegrityError, match="it does not start with a bundle header"):
        read_signed_header(io.BytesIO(content), "x.tcb")


def test_a_later_format_version_is_not_reported_as_damage() -> None:
    content = b"tcdeploy bundle 2\n" + b"{}"
    with pytest.raises(IntegrityError, match="is not a bundle of format version 1"):
        read_signed_header(io.BytesIO(struct.pack("<II", 0x184D2A50, len(content)) + content), "x.tcb")


@pytest.mark.parametrize("magics", [(0x184D2A50,), (0x184D2A50, 0x184D2A51)], ids=["header", "signatures"])
def test_a_frame_that_claims_a_huge_size_is_not_read(magics: tuple[int, ...]) -> None:
    class BoundedReads(io.BytesIO):
        def read(self, count: int | None = -1, /) -> bytes:
            assert count is not None and 0 <= count < 1 << 27
            return super().read(count)

    content = b"tcdeploy bundle 1\nheader"
    first_frame = b"" if len(magics) == 1 else struct.pack("<II", magics[0], len(content)) + content
    with pytest.raises(IntegrityError, match="its header or signatures have .* bytes; the limit is"):
        read_signed_header(BoundedReads(first_frame + struct.pack("<II", magics[-1], 0xFFFFFFFF)), "x")


# The files of a header

GOOD = FileRecord("fxgraph/ab/graph", 10, "0" * 64)


@pytest.mark.parametrize(
    "path",
    [
        "../x", "ab/../x", "ab/..", "/etc/passwd", "/", "", "a", "ab/", "ab//b", "./a", "ab/./b", "a\\b/c", "ab/b\0c",
        "ab/\nb", "ab/\x7f", "ab/\ud800", "ab/" + "b" * 256, "/".join(["abcdefg"] * 130), "C:\\x\\y", "..\\x/y",
        3, None, b"ab/b", ["ab/b"],
        "manifests/0123456789abcdef.json", "bundles/0123456789abcdef.head", "leases/0123456789abcdef", "locks/x",
        ".unpack-x/y", ".lock/x", "ab/.hidden", "ab/x.lock", "ab/x.tmp", "ab/lock",
    ],
    ids=lambda path: repr(path)[:30],
)  # fmt: skip
def test_an_invalid_path_is_refused(path: object) -> None:
    check_files((GOOD,), "x")
    with pytest.raises(IntegrityError, match="lists an invalid or duplicate file"):
        check_files((GOOD, FileRecord(path, 10, "0" * 64)), "x")  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, -1, -(1 << 70), True, 1.5, 1.0, "10", None, float("inf"), [10]])
def test_an_invalid_size_is_refused(size: object) -> None:
    with pytest.raises(IntegrityError, match="lists an invalid or duplicate file"):
        check_files((FileRecord("ab/b", size, "0" * 64),), "x")  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [(100 << 30,), (1 << 70,), (8 << 30, 1), (3 << 30, 3 << 30, 3 << 30)])
def test_more_than_the_total_byte_limit_is_refused(sizes: tuple[int, ...]) -> None:
    files = tuple(FileRecord(f"ab/{number}", size, "0" * 64) for number, size in enumerate(sizes))
    with pytest.raises(IntegrityError, match=rf"its files have \d+ bytes; the limit is {8 << 30}"):
        check_files(files, "x")


def test_the_limits_are_eight_gigabytes_and_a_hundred_thousand_files(monkeypatch: pytest.MonkeyPatch) -> None:
    check_files((FileRecord("ab/b", 8 << 30, "0" * 64),), "x")
    with pytest.raises(IntegrityError, match="lists 100001 files; the limit is 100000"):
        check_files((FileRecord("ab/b", 1, "0" * 64),) * 100_001, "x")
    monkeypatch.setattr(bundle_header, "MAX_FILES", 100)
    many = tuple(FileRecord(f"ab/{number}", 1, "0" * 64) for number in range(101))
    check_files(many[1:], "x")
    with pytest.raises(IntegrityError, match="lists 101 files; the limit is 100"):
        check_files(many, "x")


@pytest.mark.parametrize("digest", ["", "0" * 63, "0" * 65, None, 0, ["0"] * 64])
def test_an_invalid_digest_is_refused(digest: object) -> None:
    with pytest.raises(IntegrityError, match="lists an invalid or duplicate file"):
        check_files((FileRecord("ab/b", 10, digest),), "x")  # type: ignore[arg-type]


def test_duplicate_paths_and_files_used_as_folders_are_refused() -> None:
    with pytest.raises(IntegrityError, match="lists an invalid or duplicate file"):
        check_files((GOOD, GOOD), "x")
    for path in ("fxgraph/ab/graph/inner", "fxgraph/ab/graph/a/b/c"):
        with pytest.raises(IntegrityError, match="lists the same path as a file and as a folder"):
            check_files((FileRecord(path, 10, "0" * 64), GOOD), "x")
