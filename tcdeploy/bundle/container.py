"""The bundle file format: a header and its signatures, followed by the compressed cache files.

    zstd skippable frame    header, JSON: what the bundle was made from, one sha256 per file, one of the payload
    zstd skippable frame    signatures over the header, JSON
    zstd frame              payload: a tar of the files, in the order of the header

zstd decoders skip skippable frames, so `zstd -dc FILE.tcb | tar -t` lists the files. tcdeploy checks before it decodes:
the signature before it parses the header, the payload's sha256 before it decompresses, and each tar header must equal,
byte for byte, the one that the writer produces for the next file of the header. Links, devices, other paths,
duplicates, sparse files and extra members therefore all fail the same check, and only paths that `check_files` accepts
are ever written. Does not import torch.

Rejected: `tarfile.extractall` with a filter, which follows the archive instead of the signed header; and zip, which
compresses members separately, although the kernels of a cache resemble each other.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import struct
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from tcdeploy.cache.contents import CHUNK_BYTES, FileRecord, is_cache_file, stored_path
from tcdeploy.errors import IntegrityError

HEADER_MAGIC, SIGNATURES_MAGIC = 0x184D2A50, 0x184D2A51  # zstd skippable frames
HEADER_PREFIX = b"tcdeploy bundle 1\n"
MAX_HEADER_BYTES, MAX_SIGNATURES_BYTES = 64 << 20, 1 << 20
MAX_FILES, MAX_TOTAL_FILE_BYTES = 100_000, 8 << 30
ZSTD_LEVEL = 9
MAX_WINDOW_BYTES = 1 << 27  # limit on the decompressor's memory
TAR_END = bytes(2 * tarfile.BLOCKSIZE)
RLE_BLOCK = 1  # zstd block type: one byte, repeated


@dataclass(frozen=True)
class Signature:
    """An Ed25519 signature over the header, in hex. `key` is the fingerprint of the public key."""

    key: str
    signature: str


@dataclass(frozen=True)
class SignedHeader:
    """The first two frames of a bundle. `header` stays unparsed until a signature has been verified."""

    header: bytes
    signatures: tuple[Signature, ...]
    payload_offset: int  # bytes from the start of the file


@dataclass(frozen=True)
class Payload:
    bytes: int
    sha256: str


def write_bundle(
    target: Path, folder: Path, files: tuple[FileRecord, ...], make_signed_header: Callable[[Payload], bytes]
) -> Payload:
    """Write `files` of `folder` as a bundle. Deterministic: equal files and header give equal bytes.

    `target` is replaced atomically. Raises OSError, and IntegrityError for a file that differs from its record.
    """
    payload_path = target.with_name(f".{target.name}-{os.getpid()}.payload.tmp")
    try:
        with open(payload_path, "wb") as payload_file:
            _write_payload(folder, files, payload_file)
        payload = Payload(payload_path.stat().st_size, _sha256_from(payload_path, 0))
        _write_atomically(target, make_signed_header(payload), payload_path, 0)
    finally:
        payload_path.unlink(missing_ok=True)
    return payload


def replace_signatures(path: Path, signed_header: SignedHeader, signatures: tuple[Signature, ...]) -> None:
    """Replace the signatures of a bundle; the file is replaced atomically."""
    _write_atomically(path, signed_header_bytes(signed_header.header, signatures), path, signed_header.payload_offset)


def _write_atomically(target: Path, signed_header: bytes, payload: Path, offset: int) -> None:
    """Write the signed header and the bytes of `payload` from `offset` on; rename to `target` after fsync."""
    staging = target.with_name(f".{target.name}-{os.getpid()}.whole.tmp")
    try:
        with open(staging, "wb") as out, open(payload, "rb") as source:
            out.write(signed_header)
            source.seek(offset)
            shutil.copyfileobj(source, out, CHUNK_BYTES)
            out.flush()
            os.fsync(out.fileno())
        os.replace(staging, target)
    finally:
        staging.unlink(missing_ok=True)


def signed_header_bytes(header: bytes, signatures: tuple[Signature, ...]) -> bytes:
    """The two frames that start a bundle. A cache folder keeps them for each bundle unpacked into it."""
    signature_dicts = [asdict(signature) for signature in signatures]
    checksum = hashlib.sha256(header + _canonical_json(signature_dicts)).hexdigest()  # finds damage without a key
    content = HEADER_PREFIX + header
    document = _canonical_json({"sha256": checksum, "signatures": signature_dicts})
    return (
        struct.pack("<II", HEADER_MAGIC, len(content))
        + content
        + struct.pack("<II", SIGNATURES_MAGIC, len(document))
        + document
    )


def read_signed_header(file: IO[bytes], name: str) -> SignedHeader:
    """Read the first two frames and nothing after them. Raises IntegrityError."""
    content = _read_skippable_frame(file, HEADER_MAGIC, MAX_HEADER_BYTES, name)
    if not content.startswith(HEADER_PREFIX):
        raise IntegrityError(
            f"{name} is not a bundle of format version 1", "pack it again with this version: tcdeploy cache pack"
        )
    header = content[len(HEADER_PREFIX) :]
    document = _read_skippable_frame(file, SIGNATURES_MAGIC, MAX_SIGNATURES_BYTES, name)
    try:
        signatures = tuple(Signature(**fields) for fields in json.loads(document)["signatures"])
        canonical = signed_header_bytes(header, signatures)
        matches_checksum = canonical.endswith(document) and all(map(_is_canonical_hex, signatures))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged_error(name, "its signatures cannot be parsed") from error
    if not matches_checksum:
        raise _damaged_error(name, "its header and signatures do not match their checksum")
    return SignedHeader(header, signatures, len(canonical))


def _is_canonical_hex(signature: Signature) -> bool:
    texts = (signature.key, signature.signature)
    return all(isinstance(text, str) and bytes.fromhex(text).hex() == text for text in texts)


def _read_skippable_frame(file: IO[bytes], magic: int, max_bytes: int, name: str) -> bytes:
    frame_header = file.read(8)
    if len(frame_header) < 8 or struct.unpack("<I", frame_header[:4])[0] != magic:
        is_first = magic == HEADER_MAGIC
        raise _damaged_error(
            name, "it does not start with a bundle header" if is_first else "its signatures are missing"
        )
    (length,) = struct.unpack("<I", frame_header[4:])
    if length > max_bytes:
        raise _damaged_error(name, f"its header or signatures have {length} bytes; the limit is {max_bytes}")
    content = file.read(length)
    if len(content) < length:
        raise _damaged_error(name, "it is truncated")
    return content


def check_files(files: tuple[FileRecord, ...], name: str) -> None:
    """Check that the paths are plain, relative and unique, and the sizes within limits. Raises IntegrityError."""
    if len(files) > MAX_FILES:
        raise _damaged_error(name, f"it lists {len(files)} files; the limit is {MAX_FILES}")
    seen: set[str] = set()
    for file in files:
        if not _is_safe_file(file) or file.path in seen:
            raise _damaged_error(name, f"it lists an invalid or duplicate file: {file.path!r:.200}")
        seen.add(file.path)
    folders = {str(parent) for path in seen for parent in PurePosixPath(path).parents}
    if folders & seen:
        raise _damaged_error(name, "it lists the same path as a file and as a folder")
    total_bytes = sum(file.bytes for file in files)
    if total_bytes > MAX_TOTAL_FILE_BYTES:
        raise _damaged_error(name, f"its files have {total_bytes} bytes; the limit is {MAX_TOTAL_FILE_BYTES}")


def _is_safe_file(file: FileRecord) -> bool:
    path = file.path
    if not isinstance(path, str) or not isinstance(file.bytes, int) or isinstance(file.bytes, bool):
        return False
    parts = path.split("/")
    is_plain = all(part not in ("", ".", "..") and len(part) < 256 for part in parts)
    is_printable = not any(
        ord(char) < 32 or ord(char) == 127 or char == "\\" or 0xD800 <= ord(char) < 0xE000 for char in path
    )
    is_sha256 = isinstance(file.sha256, str) and len(file.sha256) == 64
    is_safe_path = is_plain and is_printable and len(path) < 1024 and not path.startswith(".") and is_cache_file(path)
    return is_safe_path and file.bytes > 0 and is_sha256


def check_payload(path: Path, signed_header: SignedHeader, payload: Payload) -> None:
    """Compare the payload's size and sha256 with the header, without decompressing. Raises IntegrityError."""
    length = path.stat().st_size - signed_header.payload_offset
    if length != payload.bytes:
        raise _damaged_error(str(path), f"its payload has {length} bytes; the header says {payload.bytes}")
    if _sha256_from(path, signed_header.payload_offset) != payload.sha256:
        raise _damaged_error(str(path), "its payload does not match the sha256 in the header")


def read_files(
    path: Path, signed_header: SignedHeader, files: tuple[FileRecord, ...]
) -> Iterator[tuple[FileRecord, Iterator[bytes]]]:
    """Yield each file with an iterator over its chunks. Consume the chunks before advancing to the next file.

    Raises IntegrityError if the payload is not exactly `files`. A file's sha256 is checked after its last chunk.
    """
    import zstandard

    name = str(path)
    with open(path, "rb") as file, _translate_zstd_errors(name):
        file.seek(signed_header.payload_offset)
        _check_single_frame(file, name)
        file.seek(signed_header.payload_offset)
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        with decompressor.stream_reader(file) as stream:
            for record in files:
                tar_header = _tar_header(record)
                if _read_up_to(stream, len(tar_header)) != tar_header:
                    raise _damaged_error(name, f"its payload does not hold {record.path} as the header lists it")
                yield record, _read_tar_member(stream, record, name)
            if _read_up_to(stream, len(TAR_END) + 1) != TAR_END:
                raise _damaged_error(name, "its payload holds more than the header lists")


@contextlib.contextmanager
def _translate_zstd_errors(name: str) -> Iterator[None]:
    import zstandard

    try:
        yield
    except zstandard.ZstdError as error:
        raise _damaged_error(name, f"it cannot be decompressed: {error}") from error


def _check_single_frame(file: IO[bytes], name: str) -> None:
    """Check that the payload is one zstd frame up to the end of the file, by walking its block headers.

    A zstd reader would continue into further frames, and skip skippable ones.
    """
    import zstandard

    start = file.tell()
    frame_header = file.read(18)  # the largest zstd frame header
    if not frame_header.startswith(zstandard.FRAME_HEADER):
        raise _damaged_error(name, "its payload is not a zstd frame")
    file.seek(start + zstandard.frame_header_size(frame_header))
    is_last = False
    while not is_last:
        block_header = _read_up_to(file, 3)
        if len(block_header) < 3:
            raise _damaged_error(name, "it is truncated")
        bits = int.from_bytes(block_header, "little")
        is_last, block_type, length = bool(bits & 1), bits >> 1 & 3, bits >> 3
        file.seek(1 if block_type == RLE_BLOCK else length, os.SEEK_CUR)
    end = file.tell() + 4 * zstandard.get_frame_parameters(frame_header).has_checksum
    if end != file.seek(0, os.SEEK_END):
        raise _damaged_error(name, "it is truncated, or data follows its payload")


def _read_tar_member(stream: IO[bytes], file: FileRecord, name: str) -> Iterator[bytes]:
    digest, remaining = hashlib.sha256(), file.bytes
    while remaining:
        with _translate_zstd_errors(name):  # read_files is suspended at its yield here
            chunk = stream.read(min(remaining, CHUNK_BYTES))
        if not chunk:
            raise _damaged_error(name, f"it is truncated in {file.path}")
        digest.update(chunk)
        remaining -= len(chunk)
        yield chunk
    if digest.hexdigest() != file.sha256:
        raise _damaged_error(name, f"{file.path} does not match its sha256")
    with _translate_zstd_errors(name):
        padding = _read_up_to(stream, _padding(file.bytes))
    if any(padding):
        raise _damaged_error(name, f"{file.path} is longer than the header says")


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
            digest, length = hashlib.sha256(), 0
            with open(folder / stored_path(folder, file), "rb") as source:
                while chunk := source.read(CHUNK_BYTES):
                    digest.update(chunk)
                    length += len(chunk)
                    stream.write(chunk)
            if digest.hexdigest() != file.sha256:
                raise IntegrityError(
                    f"{folder / file.path} does not match the sha256 in its manifest",
                    f"discard it and compile again: tcdeploy warm MODEL --cache-dir {folder} --on-bad-cache rebuild",
                )
            stream.write(bytes(_padding(length)))
        stream.write(TAR_END)


def _tar_header(file: FileRecord) -> bytes:
    """The header of a regular file without owner or time; a long path takes an extra member, as in GNU tar."""
    member = tarfile.TarInfo(file.path)
    member.size, member.mode = file.bytes, 0o644
    return member.tobuf(tarfile.GNU_FORMAT, "utf-8", "strict")


def _padding(length: int) -> int:
    return -length % tarfile.BLOCKSIZE


def _sha256_from(path: Path, offset: int) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=io.DEFAULT_BUFFER_SIZE) as file:
        file.seek(offset)
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _canonical_json(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _damaged_error(name: str, reason: str) -> IntegrityError:
    return IntegrityError(f"the bundle {name} is damaged: {reason}", "fetch it again; nothing from it was used")
