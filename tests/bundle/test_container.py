"""The file format: other tools can read it, our reader takes nothing but what our writer writes."""

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

from tcdeploy.bundle.container import (
    Signature,
    SignedHeader,
    check_files,
    read_files,
    read_signed_header,
    signed_header_bytes,
)
from tcdeploy.bundle.header import make_portable, parse_header
from tcdeploy.cache.contents import FileRecord
from tcdeploy.errors import IntegrityError
from tests.bundle.conftest import Packed
from tests.bundle.fake_caches import KINDS
from tests.bundle.forging import record


def signed_header_of(bundle: Path) -> SignedHeader:
    with open(bundle, "rb") as file:
        return read_signed_header(file, str(bundle))


def test_the_files_come_out_as_they_went_in(packed: Packed) -> None:
    signed_header = signed_header_of(packed.bundle)
    header = parse_header(signed_header, "x")
    found = {file: b"".join(chunks) for file, chunks in read_files(packed.bundle, signed_header, header.manifest.files)}
    assert found == {file: (packed.folder / file.path).read_bytes() for file in packed.manifest.files}


def test_the_header_is_the_manifest_without_the_places_of_its_machine(packed: Packed) -> None:
    manifest = parse_header(signed_header_of(packed.bundle), "x").manifest
    assert manifest.plan["key"] == packed.key and manifest.files == packed.manifest.files
    assert packed.manifest.plan["cache_dir"] == str(packed.folder)
    assert make_portable(packed.manifest).plan["cache_dir"] == manifest.plan["cache_dir"] == ""
    assert str(packed.folder) not in signed_header_of(packed.bundle).header.decode()
    assert packed.manifest.environment["user_cache_dir"] not in signed_header_of(packed.bundle).header.decode()


def test_the_made_up_cache_has_the_names_that_are_hard_for_a_tar() -> None:
    lengths = {len(path) for path in KINDS}
    assert {99, 100, 101} <= lengths and max(lengths) > 255 and any(not path.isascii() for path in KINDS)


@pytest.mark.skipif(not (shutil.which("zstd") and shutil.which("tar")), reason="needs the tools zstd and tar")
def test_zstd_and_tar_list_it_and_take_it_apart(packed: Packed, tmp_path: Path) -> None:
    """GNU tar writes what is not ASCII in octal unless it is told not to."""
    listed = subprocess.run(
        f"zstd -dc {packed.bundle} | tar -t --quoting-style=literal", shell=True, capture_output=True, check=True
    )
    assert listed.stdout.decode().splitlines() == [file.path for file in packed.manifest.files]
    subprocess.run(f"zstd -dc {packed.bundle} | tar -x -C {tmp_path}", shell=True, check=True)
    for file in packed.manifest.files:
        assert record(file.path, (tmp_path / file.path).read_bytes()) == file


def test_python_s_own_tarfile_reads_it_too(small: Packed) -> None:
    with open(small.bundle, "rb") as file:
        content = zstandard.ZstdDecompressor().stream_reader(file.read(), read_across_frames=True).read()
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        members = archive.getmembers()
    assert [one.name for one in members] == [file.path for file in small.manifest.files]
    assert all(one.isreg() and (one.mode, one.mtime, one.uid, one.uname) == (0o644, 0, 0, "") for one in members)


# The head


def test_a_head_is_read_and_not_a_byte_behind_it() -> None:
    signatures = (Signature("ab" * 16, "cd" * 64), Signature("ef" * 16, "01" * 64))
    content = signed_header_bytes(b"header", signatures)
    assert read_signed_header(io.BytesIO(content + b"payload"), "x") == SignedHeader(
        b"header", signatures, len(content)
    )
    assert read_signed_header(io.BytesIO(signed_header_bytes(b"", ())), "x").header == b""


def test_a_head_cut_anywhere_is_an_integrity_error() -> None:
    content = signed_header_bytes(b"header", (Signature("ab" * 16, "cd" * 64),))
    for length in range(len(content)):
        with pytest.raises(IntegrityError):
            read_signed_header(io.BytesIO(content[:length]), "x")


def test_every_flipped_bit_of_a_head_is_an_integrity_error_whoever_signed_it() -> None:
    """Of keys that nobody here knows too: the block has a digest of its own."""
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


def test_the_frames_of_these_tests_are_those_that_are_written() -> None:
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
def test_signatures_that_are_none_are_an_integrity_error(signatures: bytes) -> None:
    with pytest.raises(IntegrityError):
        read_signed_header(io.BytesIO(frames(b"header", signatures)), "x")


@pytest.mark.parametrize(
    "one", [("zz", "00"), ("AB", "00"), ("ab", "CD"), ("a b", "00"), ("ab ", "00"), (1, "00"), ("ab", None)]
)
def test_a_signature_that_is_not_plain_hex_is_refused_under_a_digest_that_fits(one: tuple[Any, Any]) -> None:
    assert read_signed_header(io.BytesIO(signed_header_bytes(b"header", (Signature("ab", "cd"),))), "x").signatures
    with pytest.raises(IntegrityError):
        read_signed_header(io.BytesIO(signed_header_bytes(b"header", (Signature(*one),))), "x")


def test_signatures_written_otherwise_than_we_do_are_refused() -> None:
    content = signed_header_bytes(b"header", ())
    document = content[content.index(b'{"sha256') :]
    assert read_signed_header(io.BytesIO(frames(b"header", document)), "x").signatures == ()
    for other in (b" " + document, document + b"\n", document.replace(b":", b": ", 1)):
        with pytest.raises(IntegrityError, match="not as they were written"):
            read_signed_header(io.BytesIO(frames(b"header", other)), "x")


@pytest.mark.parametrize("content", [b"", b"P", b"\x28\xb5\x2f\xfd", b"PK\x03\x04" * 10, bytes(100), b"#!/bin/sh\n"])
def test_a_file_of_another_kind_is_no_bundle(content: bytes) -> None:
    with pytest.raises(IntegrityError, match="it does not begin as a bundle does"):
        read_signed_header(io.BytesIO(content), "x.tcb")


def test_a_later_format_is_told_from_a_damaged_one() -> None:
    content = b"tcdeploy bundle 2\n" + b"{}"
    with pytest.raises(IntegrityError, match="no bundle of this version of tcdeploy"):
        read_signed_header(io.BytesIO(struct.pack("<II", 0x184D2A50, len(content)) + content), "x.tcb")


@pytest.mark.parametrize("magics", [(0x184D2A50,), (0x184D2A50, 0x184D2A51)], ids=["header", "signatures"])
def test_a_block_that_says_it_is_huge_is_not_read(magics: tuple[int, ...]) -> None:
    class Careful(io.BytesIO):
        def read(self, count: int | None = -1, /) -> bytes:
            assert count is not None and 0 <= count < 1 << 27
            return super().read(count)

    whole = b"tcdeploy bundle 1\nheader"
    begin = b"" if len(magics) == 1 else struct.pack("<II", magics[0], len(whole)) + whole
    with pytest.raises(IntegrityError, match="is the most"):
        read_signed_header(Careful(begin + struct.pack("<II", magics[-1], 0xFFFFFFFF)), "x")


# What a header may name

GOOD = FileRecord("fxgraph/ab/graph", 10, "0" * 64)


@pytest.mark.parametrize(
    "path",
    [
        "../x", "ab/../x", "ab/..", "/etc/passwd", "/", "", "a", "ab/", "ab//b", "./a", "ab/./b", "a\\b/c", "ab/b\0c",
        "ab/\nb", "ab/\x7f", "ab/\ud800", "ab/" + "b" * 256, "/".join(["abcdefg"] * 130), "C:\\x\\y", "..\\x/y",
        3, None, b"ab/b", ["ab/b"],
        "manifests/0123456789abcdef.json", "bundles/0123456789abcdef.head", "leases/0123456789abcdef", "locks/x",
        ".staging-x/y", ".lock/x", "ab/.hidden", "ab/x.lock", "ab/x.tmp", "ab/lock",
    ],
    ids=lambda path: repr(path)[:30],
)  # fmt: skip
def test_a_path_that_no_cache_has_is_refused(path: object) -> None:
    check_files((GOOD,), "x")
    with pytest.raises(IntegrityError, match="names a file that no cache has"):
        check_files((GOOD, FileRecord(path, 10, "0" * 64)), "x")  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, -1, -(1 << 70), True, 1.5, 1.0, "10", None, float("inf"), [10]])
def test_a_size_that_is_none_is_refused(size: object) -> None:
    with pytest.raises(IntegrityError, match="names a file that no cache has"):
        check_files((FileRecord("ab/b", size, "0" * 64),), "x")  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [(100 << 30,), (1 << 70,), (8 << 30, 1), (3 << 30, 3 << 30, 3 << 30)])
def test_more_bytes_than_any_cache_has_are_refused(sizes: tuple[int, ...]) -> None:
    files = tuple(FileRecord(f"ab/{number}", size, "0" * 64) for number, size in enumerate(sizes))
    with pytest.raises(IntegrityError, match=f"its files are more than {8 << 30} bytes"):
        check_files(files, "x")


def test_eight_gigabytes_and_a_hundred_thousand_files_are_still_allowed_and_one_more_is_not() -> None:
    check_files((FileRecord("ab/b", 8 << 30, "0" * 64),), "x")
    many = tuple(FileRecord(f"ab/{number}", 1, "0" * 64) for number in range(100_001))
    check_files(many[1:], "x")
    with pytest.raises(IntegrityError, match="names 100001 files, and 100000 is the most"):
        check_files(many, "x")


@pytest.mark.parametrize("digest", ["", "0" * 63, "0" * 65, None, 0, ["0"] * 64])
def test_a_digest_that_is_none_is_refused(digest: object) -> None:
    with pytest.raises(IntegrityError, match="names a file that no cache has"):
        check_files((FileRecord("ab/b", 10, digest),), "x")  # type: ignore[arg-type]


def test_a_name_twice_and_a_file_that_is_a_folder_too_are_refused() -> None:
    with pytest.raises(IntegrityError, match="names a file that no cache has"):
        check_files((GOOD, GOOD), "x")
    for path in ("fxgraph/ab/graph/inner", "fxgraph/ab/graph/a/b/c"):
        with pytest.raises(IntegrityError, match="names a file and a folder alike"):
            check_files((FileRecord(path, 10, "0" * 64), GOOD), "x")
