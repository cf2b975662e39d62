"""The bundle file format: a header and its signatures, followed by the compressed cache files.

    zstd skippable frame    header, JSON: what the bundle was made from, one sha256 per file, one of the payload
    zstd skippable frame    signatures over the header, JSON
    zstd frame              payload: a tar of the files, in the order of the header

zstd decoders skip skippable frames, so `zstd -dc FILE.tcb | tar -t` lists the files. tcdeploy checks before it decodes:
the signature before it parses the header, the payload's sha256 before it decompresses, and each tar header must equal,
byte for byte, the one that the writer produces for the next file of the header. Links, devices, other paths,
duplicates, sparse files and extra members therefore all fail the same check, and only paths that
`bundle_header.check_files` accepts are ever written. Does not import torch.

Rejected: `tarfile.extractall` with a filter, which follows the archive instead of the signed header; and zip, which
compresses members separately, although the kernels of a cache resemble each other.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from tcdeploy.cache.files.records import CHUNK_BYTES, FileRecord, read_checked
from tcdeploy.cache.record.bundle_header import Payload
from tcdeploy.cache.trust.signing import Signature, SignedHeader, damaged_error, signed_header_bytes
from tcdeploy.errors import IntegrityError, SpaceError
from tcdeploy.host.durable import sync_folders
from tcdeploy.host.regular_file import open_regular
from tcdeploy.host.temporary_files import temporary_file

ZSTD_LEVEL = 9
MAX_WINDOW_BYTES = 1 << 27  # limit on the decompressor's memory
TAR_END = bytes(2 * tarfile.BLOCKSIZE)
RLE_BLOCK = 1  # zstd block type: one byte, repeated


def check_free_space(folder: Path, needed: int, purpose: str) -> None:
    """Raise SpaceError if the disk of a folder has less than `needed` bytes free. `purpose`: "unpacking needs"."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise SpaceError(
            f"{purpose} {needed} bytes in {folder}; {free} are free", "free some space, or choose another folder"
        )


def write_bundle(
    target: Path, folder: Path, files: tuple[FileRecord, ...], make_signed_header: Callable[[Payload], bytes]
) -> Payload:
    """Write `files` of `folder` as a bundle. Deterministic: equal files and header give equal bytes.

    `target` is replaced atomically. Raises OSError, and IntegrityError for a file that differs from its record.
    """
    with temporary_file(target) as payload_path:
        with open_regular(payload_path, "r+b") as payload_file:
            _write_payload(folder, files, payload_file)
        payload = Payload(payload_path.stat().st_size, _sha256_from(payload_path, 0))
        _write_atomically(target, make_signed_header(payload), payload_path, 0)
    return payload


def replace_signatures(path: Path, signed_header: SignedHeader, signatures: tuple[Signature, ...]) -> None:
    """Replace the signatures of a bundle; the file is replaced atomically."""
    _write_atomically(path, signed_header_bytes(signed_header.header, signatures), path, signed_header.payload_offset)


def _write_atomically(target: Path, signed_header: bytes, payload: Path, offset: int) -> None:
    """Write the signed header and the bytes of `payload` from `offset` on; rename to `target` after fsync."""
    with temporary_file(target) as staging:
        with open_regular(staging, "r+b") as out, open_regular(payload, follows_links=True) as source:
            out.write(signed_header)
            source.seek(offset)
            shutil.copyfileobj(source, out, CHUNK_BYTES)
            out.flush()
            os.fsync(out.fileno())
        os.replace(staging, target)
        sync_folders(target.parent, [target.name])


def check_payload(path: Path, signed_header: SignedHeader, payload: Payload) -> None:
    """Compare the payload's size and sha256 with the header, without decompressing. Raises IntegrityError."""
    length = path.stat().st_size - signed_header.payload_offset
    if length != payload.bytes:
        raise damaged_error(str(path), f"its payload has {length} bytes; the header says {payload.bytes}")
    if _sha256_from(path, signed_header.payload_offset) != payload.sha256:
        raise damaged_error(str(path), "its payload does not match the sha256 in the header")


def read_files(
    path: Path, signed_header: SignedHeader, files: tuple[FileRecord, ...]
) -> Iterator[tuple[FileRecord, Iterator[bytes]]]:
    """Yield each file with an iterator over its chunks. Consume the chunks before advancing to the next file.

    Raises IntegrityError if the payload is not exactly `files`. A file's sha256 is checked after its last chunk.
    """
    import zstandard

    name = str(path)
    with open_regular(path, follows_links=True) as file, _translate_zstd_errors(name):
        file.seek(signed_header.payload_offset)
        _check_single_frame(file, name)
        file.seek(signed_header.payload_offset)
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        with decompressor.stream_reader(file) as stream:
            for record in files:
                tar_header = _tar_header(record)
                if _read_up_to(stream, len(tar_header)) != tar_header:
                    raise damaged_error(name, f"its payload does not hold {record.path} as the header lists it")
                yield record, _read_tar_member(stream, record, name)
            if _read_up_to(stream, len(TAR_END) + 1) != TAR_END:
                raise damaged_error(name, "its payload holds more than the header lists")


@contextlib.contextmanager
def _translate_zstd_errors(name: str) -> Iterator[None]:
    import zstandard

    try:
        yield
    except zstandard.ZstdError as error:
        raise damaged_error(name, f"it cannot be decompressed: {error}") from error


def _check_single_frame(file: IO[bytes], name: str) -> None:
    """Check that the payload is one zstd frame up to the end of the file, by walking its block headers.

    A zstd reader would continue into further frames, and skip skippable ones.
    """
    import zstandard

    start = file.tell()
    frame_header = file.read(18)  # the largest zstd frame header
    if not frame_header.startswith(zstandard.FRAME_HEADER):
        raise damaged_error(name, "its payload is not a zstd frame")
    file.seek(start + zstandard.frame_header_size(frame_header))
    is_last = False
    while not is_last:
        block_header = _read_up_to(file, 3)
        if len(block_header) < 3:
            raise damaged_error(name, "it is truncated")
        bits = int.from_bytes(block_header, "little")
        is_last, block_type, length = bool(bits & 1), bits >> 1 & 3, bits >> 3
        file.seek(1 if block_type == RLE_BLOCK else length, os.SEEK_CUR)
    end = file.tell() + 4 * zstandard.get_frame_parameters(frame_header).has_checksum
    if end != file.seek(0, os.SEEK_END):
        raise damaged_error(name, "it is truncated, or data follows its payload")


def _read_tar_member(stream: IO[bytes], file: FileRecord, name: str) -> Iterator[bytes]:
    digest, remaining = hashlib.sha256(), file.bytes
    while remaining:
        with _translate_zstd_errors(name):  # read_files is suspended at its yield here
            chunk = stream.read(min(remaining, CHUNK_BYTES))
        if not chunk:
            raise damaged_error(name, f"it is truncated in {file.path}")
        digest.update(chunk)
        remaining -= len(chunk)
        yield chunk
    if digest.hexdigest() != file.sha256:
        raise damaged_error(name, f"{file.path} does not match its sha256")
    with _translate_zstd_errors(name):
        padding = _read_up_to(stream, _padding(file.bytes))
    if any(padding):
        raise damaged_error(name, f"{file.path} is longer than the header says")


def _read_up_to(stream: IO[bytes], count: int) -> bytes:
    """Read `count` bytes, or fewer at the end of the stream."""
    content = b""
    while len(content) < count and (chunk := stream.read(count - len(content))):
        content += chunk
    return content


def _write_payload(folder: Path, files: tuple[FileRecord, ...], out: IO[bytes]) -> None:
    import zstandard

    with zstandard.ZstdCompressor(level=ZSTD_LEVEL).stream_writer(out, closefd=False) as stream:
        for file in files:
            stream.write(_tar_header(file))
            if damage := read_checked(folder, file, stream.write):
                raise IntegrityError(
                    f"{folder / file.path} {damage.reason}",
                    f"discard it and compile again: tcdeploy warm MODEL --cache-dir {folder} --on-bad-cache rebuild",
                )
            stream.write(bytes(_padding(file.bytes)))
        stream.write(TAR_END)


def _tar_header(file: FileRecord) -> bytes:
    """The header of a regular file without owner or time; a long path takes an extra member, as in GNU tar."""
    member = tarfile.TarInfo(file.path)
    member.size, member.mode = file.bytes, 0o644
    return member.tobuf(tarfile.GNU_FORMAT, "utf-8", "strict")


def _padding(length: int) -> int:
    return -length % tarfile.BLOCKSIZE


def _sha256_from(path: Path, offset: int) -> str:
    with open_regular(path, follows_links=True) as file:
        file.seek(offset)
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # IO lacks readinto
