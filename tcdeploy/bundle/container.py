"""The file format of a bundle: two small blocks that are read first, and the files behind them.

    zstd skippable frame    header: what the bundle is, with one sha256 per file and one of the payload, as JSON
    zstd skippable frame    signatures over the header, as JSON
    zstd frame              payload: a tar of the files, in the header's order

Every tool that knows zstd and tar can look inside (`zstd -dc FILE.tcb | tar -t`), since skippable frames are skipped.
We read it the other way round: the header is judged by its signature before it is parsed, the payload by its digest
before it is decompressed, and a member of the tar must be, byte for byte, the head that we would have written for the
next file of the header. So links, devices, other paths, duplicates, sparse files and members too many are all the same
error, and nothing that a bundle says is ever a path but what the header's rules allow. No torch here.

Rejected: `tarfile.extractall` with a filter (it follows the archive; we follow the header), and zip, whose members are
compressed apart (the kernels of a cache are alike).
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

from tcdeploy.cache.contents import CHUNK_BYTES, FileRecord, is_cache_file
from tcdeploy.errors import IntegrityError

HEADER_MAGIC, SIGNATURES_MAGIC = 0x184D2A50, 0x184D2A51  # of zstd's skippable frames
HEADER_PREFIX = b"tcdeploy bundle 1\n"
MAX_HEADER_BYTES, MAX_SIGNATURES_BYTES = 64 << 20, 1 << 20
MAX_FILES, MAX_TOTAL_FILE_BYTES = 100_000, 8 << 30
ZSTD_LEVEL = 9  # of zstd
MAX_WINDOW_BYTES = 1 << 27  # the most that decompressing may hold
TAR_END = bytes(2 * tarfile.BLOCKSIZE)
RLE_BLOCK = 1  # the kind of a zstd block that is one byte, repeated


@dataclass(frozen=True)
class Signature:
    """Ed25519 over the header, in hex; `key` is the fingerprint of the public key."""

    key: str
    signature: str


@dataclass(frozen=True)
class SignedHeader:
    """The first two blocks of a bundle, not believed yet: `header` is bytes until its signature was judged."""

    header: bytes
    signatures: tuple[Signature, ...]
    payload_offset: int  # in the file


@dataclass(frozen=True)
class Payload:
    bytes: int
    sha256: str


def write_bundle(
    target: Path, folder: Path, files: tuple[FileRecord, ...], make_signed_header: Callable[[Payload], bytes]
) -> Payload:
    """Pack `files` of `folder`; the same files and head make the same bytes. The target appears whole or not at all.

    Raises OSError, and IntegrityError for a file that is not as recorded.
    """
    packed = target.with_name(f".{target.name}-{os.getpid()}.payload.tmp")
    try:
        with open(packed, "wb") as payload:
            _write_payload(folder, files, payload)
        found = Payload(packed.stat().st_size, _sha256_from(packed, 0))
        _write_atomically(target, make_signed_header(found), packed, 0)
    finally:
        packed.unlink(missing_ok=True)
    return found


def replace_signatures(path: Path, signed_header: SignedHeader, signatures: tuple[Signature, ...]) -> None:
    """The same bundle with other signatures; it is replaced whole."""
    _write_atomically(path, signed_header_bytes(signed_header.header, signatures), path, signed_header.payload_offset)


def _write_atomically(target: Path, signed_header: bytes, payload: Path, offset: int) -> None:
    """The head, and what stands in `payload` from `offset` on; under the final name when it is on the disk."""
    whole = target.with_name(f".{target.name}-{os.getpid()}.whole.tmp")
    try:
        with open(whole, "wb") as out, open(payload, "rb") as rest:
            out.write(signed_header)
            rest.seek(offset)
            shutil.copyfileobj(rest, out, CHUNK_BYTES)
            out.flush()
            os.fsync(out.fileno())
        os.replace(whole, target)
    finally:
        whole.unlink(missing_ok=True)


def signed_header_bytes(header: bytes, signatures: tuple[Signature, ...]) -> bytes:
    """What a bundle begins with; alone, it is the record that stays in a folder that the bundle was unpacked into."""
    signed = [asdict(one) for one in signatures]
    digest = hashlib.sha256(header + _canonical_json(signed)).hexdigest()  # over all, whoever may have signed it
    content = HEADER_PREFIX + header
    document = _canonical_json({"sha256": digest, "signatures": signed})
    return (
        struct.pack("<II", HEADER_MAGIC, len(content))
        + content
        + struct.pack("<II", SIGNATURES_MAGIC, len(document))
        + document
    )


def read_signed_header(file: IO[bytes], name: str) -> SignedHeader:
    """The first two blocks, and no byte behind them. Raises IntegrityError."""
    content = _read_skippable_frame(file, HEADER_MAGIC, MAX_HEADER_BYTES, name)
    if not content.startswith(HEADER_PREFIX):
        raise IntegrityError(f"{name} is no bundle of this version of tcdeploy", "tcdeploy cache pack makes one")
    header = content[len(HEADER_PREFIX) :]
    document = _read_skippable_frame(file, SIGNATURES_MAGIC, MAX_SIGNATURES_BYTES, name)
    try:
        told = json.loads(document)
        signatures = tuple(Signature(**one) for one in told["signatures"])
        written = signed_header_bytes(header, signatures)
        is_as_written = written.endswith(document) and all(map(_is_canonical_hex, signatures))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged_error(name, "its signatures cannot be read") from error
    if not is_as_written:
        raise _damaged_error(name, "its header or its signatures are not as they were written")
    return SignedHeader(header, signatures, len(written))


def _is_canonical_hex(one: Signature) -> bool:
    return all(isinstance(text, str) and bytes.fromhex(text).hex() == text for text in (one.key, one.signature))


def _read_skippable_frame(file: IO[bytes], magic: int, most: int, name: str) -> bytes:
    signed_header = file.read(8)
    if len(signed_header) < 8 or struct.unpack("<I", signed_header[:4])[0] != magic:
        raise _damaged_error(
            name, "it does not begin as a bundle does" if magic == HEADER_MAGIC else "its signatures are gone"
        )
    (length,) = struct.unpack("<I", signed_header[4:])
    if length > most:
        raise _damaged_error(name, f"a block of {length} bytes, and {most} is the most")
    content = file.read(length)
    if len(content) < length:
        raise _damaged_error(name, "it was cut")
    return content


def check_files(files: tuple[FileRecord, ...], name: str) -> None:
    """What a header may name: plain relative paths, each once, sizes within bounds. Raises IntegrityError."""
    if len(files) > MAX_FILES:
        raise _damaged_error(name, f"it names {len(files)} files, and {MAX_FILES} is the most")
    seen: set[str] = set()
    for file in files:
        if not _is_safe_file(file) or file.path in seen:
            raise _damaged_error(name, f"it names a file that no cache has: {file.path!r:.200}")
        seen.add(file.path)
    folders = {str(parent) for path in seen for parent in PurePosixPath(path).parents}
    if folders & seen:
        raise _damaged_error(name, "it names a file and a folder alike")
    if sum(file.bytes for file in files) > MAX_TOTAL_FILE_BYTES:
        raise _damaged_error(name, f"its files are more than {MAX_TOTAL_FILE_BYTES} bytes")


def _is_safe_file(file: FileRecord) -> bool:
    path = file.path
    if not isinstance(path, str) or not isinstance(file.bytes, int) or isinstance(file.bytes, bool):
        return False
    parts = path.split("/")
    is_plain = all(part not in ("", ".", "..") and len(part) < 256 for part in parts)
    has_odd = any(ord(char) < 32 or ord(char) == 127 or char == "\\" or 0xD800 <= ord(char) < 0xE000 for char in path)
    is_hash = isinstance(file.sha256, str) and len(file.sha256) == 64
    is_named = is_plain and not has_odd and len(path) < 1024 and not path.startswith(".") and is_cache_file(path)
    return is_named and file.bytes > 0 and is_hash


def check_payload(path: Path, signed_header: SignedHeader, payload: Payload) -> None:
    """The bytes behind the head, all of them and as they are: nothing is decompressed. Raises IntegrityError."""
    length = path.stat().st_size - signed_header.payload_offset
    if length != payload.bytes:
        raise _damaged_error(str(path), f"{length} bytes behind its head instead of {payload.bytes}")
    if _sha256_from(path, signed_header.payload_offset) != payload.sha256:
        raise _damaged_error(str(path), "its files have other bytes")


def read_files(
    path: Path, signed_header: SignedHeader, files: tuple[FileRecord, ...]
) -> Iterator[tuple[FileRecord, Iterator[bytes]]]:
    """Each file with its bytes in chunks, which must be taken before the next one is.

    Raises IntegrityError where the payload is not exactly these files; a file's own bytes are checked as they go by.
    """
    import zstandard

    name = str(path)
    with open(path, "rb") as file, _translate_zstd_errors(name):
        file.seek(signed_header.payload_offset)
        _check_single_frame(file, name)
        file.seek(signed_header.payload_offset)
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        with decompressor.stream_reader(file) as stream:
            for one in files:
                expected = _tar_header(one)
                if _read_up_to(stream, len(expected)) != expected:
                    raise _damaged_error(name, f"what should be the file {one.path} is something else")
                yield one, _read_tar_member(stream, one, name)
            if _read_up_to(stream, len(TAR_END) + 1) != TAR_END:
                raise _damaged_error(name, "it holds more than its header names")


@contextlib.contextmanager
def _translate_zstd_errors(name: str) -> Iterator[None]:
    import zstandard

    try:
        yield
    except zstandard.ZstdError as error:
        raise _damaged_error(name, f"it cannot be decompressed: {error}") from error


def _check_single_frame(file: IO[bytes], name: str) -> None:
    """From block to block by their lengths: zstd itself would read on behind the first frame, and skip what it may."""
    import zstandard

    start = file.tell()
    begin = file.read(18)  # the longest head of a frame
    if not begin.startswith(zstandard.FRAME_HEADER):
        raise _damaged_error(name, "what stands behind its head is not compressed")
    file.seek(start + zstandard.frame_header_size(begin))
    is_last = False
    while not is_last:
        block = _read_up_to(file, 3)
        if len(block) < 3:
            raise _damaged_error(name, "it was cut")
        bits = int.from_bytes(block, "little")
        is_last, kind, length = bool(bits & 1), bits >> 1 & 3, bits >> 3
        file.seek(1 if kind == RLE_BLOCK else length, os.SEEK_CUR)
    end = file.tell() + 4 * zstandard.get_frame_parameters(begin).has_checksum
    if end != file.seek(0, os.SEEK_END):
        raise _damaged_error(name, "it was cut, or something stands behind its files")


def _read_tar_member(stream: IO[bytes], file: FileRecord, name: str) -> Iterator[bytes]:
    digest, left = hashlib.sha256(), file.bytes
    while left:
        with _translate_zstd_errors(name):  # here: read_files stands still while these are taken
            chunk = stream.read(min(left, CHUNK_BYTES))
        if not chunk:
            raise _damaged_error(name, f"it was cut in {file.path}")
        digest.update(chunk)
        left -= len(chunk)
        yield chunk
    if digest.hexdigest() != file.sha256:
        raise _damaged_error(name, f"{file.path} has other bytes")
    with _translate_zstd_errors(name):
        padding = _read_up_to(stream, _padding(file.bytes))
    if any(padding):
        raise _damaged_error(name, f"{file.path} is longer than its header says")


def _read_up_to(stream: IO[bytes], count: int) -> bytes:
    """`count` bytes, or what there is."""
    found = b""
    while len(found) < count and (chunk := stream.read(count - len(found))):
        found += chunk
    return found


def _write_payload(folder: Path, files: tuple[FileRecord, ...], out: IO[bytes]) -> None:
    import zstandard

    with zstandard.ZstdCompressor(level=ZSTD_LEVEL).stream_writer(out, closefd=False) as stream:
        for file in files:
            stream.write(_tar_header(file))
            digest, length = hashlib.sha256(), 0
            with open(folder / file.path, "rb") as source:
                while chunk := source.read(CHUNK_BYTES):
                    digest.update(chunk)
                    length += len(chunk)
                    stream.write(chunk)
            if digest.hexdigest() != file.sha256:
                raise IntegrityError(f"{folder / file.path} has other bytes than its manifest says", "warm again")
            stream.write(bytes(_padding(length)))
        stream.write(TAR_END)


def _tar_header(file: FileRecord) -> bytes:
    """Of a regular file without owner or time; a long name takes a member of its own, as GNU tar does it."""
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
    return IntegrityError(f"the bundle {name} is damaged: {reason}", "fetch it again; nothing of it was used")
