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
HEADER_START = b"tcdeploy bundle 1\n"
MOST_HEADER_BYTES, MOST_SIGNATURES_BYTES = 64 << 20, 1 << 20
MOST_FILES, MOST_FILE_BYTES = 100_000, 8 << 30
LEVEL = 9  # of zstd
WINDOW_BYTES = 1 << 27  # the most that decompressing may hold
TAR_END = bytes(2 * tarfile.BLOCKSIZE)
RUN_LENGTH = 1  # the kind of a zstd block that is one byte, repeated


@dataclass(frozen=True)
class Signature:
    """Ed25519 over the header, in hex; `key` is the fingerprint of the public key."""

    key: str
    signature: str


@dataclass(frozen=True)
class Head:
    """The first two blocks of a bundle, not believed yet: `header` is bytes until its signature was judged."""

    header: bytes
    signatures: tuple[Signature, ...]
    payload_offset: int  # in the file


@dataclass(frozen=True)
class Payload:
    bytes: int
    sha256: str


def write_bundle(
    target: Path, folder: Path, files: tuple[FileRecord, ...], head_of: Callable[[Payload], bytes]
) -> Payload:
    """Pack `files` of `folder`; the same files and head make the same bytes. The target appears whole or not at all.

    Raises OSError, and IntegrityError for a file that is not as recorded.
    """
    packed = target.with_name(f".{target.name}-{os.getpid()}.payload.tmp")
    try:
        with open(packed, "wb") as payload:
            _compress(folder, files, payload)
        found = Payload(packed.stat().st_size, _digest_of(packed, 0))
        _write_whole(target, head_of(found), packed, 0)
    finally:
        packed.unlink(missing_ok=True)
    return found


def replace_head(path: Path, head: Head, signatures: tuple[Signature, ...]) -> None:
    """The same bundle with other signatures; it is replaced whole."""
    _write_whole(path, head_bytes(head.header, signatures), path, head.payload_offset)


def _write_whole(target: Path, head: bytes, payload: Path, offset: int) -> None:
    """The head, and what stands in `payload` from `offset` on; under the final name when it is on the disk."""
    whole = target.with_name(f".{target.name}-{os.getpid()}.whole.tmp")
    try:
        with open(whole, "wb") as out, open(payload, "rb") as rest:
            out.write(head)
            rest.seek(offset)
            shutil.copyfileobj(rest, out, CHUNK_BYTES)
            out.flush()
            os.fsync(out.fileno())
        os.replace(whole, target)
    finally:
        whole.unlink(missing_ok=True)


def head_bytes(header: bytes, signatures: tuple[Signature, ...]) -> bytes:
    """What a bundle begins with; alone, it is the record that stays in a folder that the bundle was unpacked into."""
    signed = [asdict(one) for one in signatures]
    digest = hashlib.sha256(header + _canonical(signed)).hexdigest()  # over all, whoever may have signed it
    content = HEADER_START + header
    document = _canonical({"sha256": digest, "signatures": signed})
    return (
        struct.pack("<II", HEADER_MAGIC, len(content))
        + content
        + struct.pack("<II", SIGNATURES_MAGIC, len(document))
        + document
    )


def read_head(file: IO[bytes], name: str) -> Head:
    """The first two blocks, and no byte behind them. Raises IntegrityError."""
    content = _frame(file, HEADER_MAGIC, MOST_HEADER_BYTES, name)
    if not content.startswith(HEADER_START):
        raise IntegrityError(f"{name} is no bundle of this version of tcdeploy", "tcdeploy cache pack makes one")
    header = content[len(HEADER_START) :]
    document = _frame(file, SIGNATURES_MAGIC, MOST_SIGNATURES_BYTES, name)
    try:
        told = json.loads(document)
        signatures = tuple(Signature(**one) for one in told["signatures"])
        written = head_bytes(header, signatures)
        is_as_written = written.endswith(document) and all(map(_is_plain, signatures))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _broken(name, "its signatures cannot be read") from error
    if not is_as_written:
        raise _broken(name, "its header or its signatures are not as they were written")
    return Head(header, signatures, len(written))


def _is_plain(one: Signature) -> bool:
    return all(isinstance(text, str) and bytes.fromhex(text).hex() == text for text in (one.key, one.signature))


def _frame(file: IO[bytes], magic: int, most: int, name: str) -> bytes:
    head = file.read(8)
    if len(head) < 8 or struct.unpack("<I", head[:4])[0] != magic:
        raise _broken(
            name, "it does not begin as a bundle does" if magic == HEADER_MAGIC else "its signatures are gone"
        )
    (length,) = struct.unpack("<I", head[4:])
    if length > most:
        raise _broken(name, f"a block of {length} bytes, and {most} is the most")
    content = file.read(length)
    if len(content) < length:
        raise _broken(name, "it was cut")
    return content


def check_files(files: tuple[FileRecord, ...], name: str) -> None:
    """What a header may name: plain relative paths, each once, sizes within bounds. Raises IntegrityError."""
    if len(files) > MOST_FILES:
        raise _broken(name, f"it names {len(files)} files, and {MOST_FILES} is the most")
    seen: set[str] = set()
    for file in files:
        if not _is_allowed(file) or file.path in seen:
            raise _broken(name, f"it names a file that no cache has: {file.path!r:.200}")
        seen.add(file.path)
    folders = {str(parent) for path in seen for parent in PurePosixPath(path).parents}
    if folders & seen:
        raise _broken(name, "it names a file and a folder alike")
    if sum(file.bytes for file in files) > MOST_FILE_BYTES:
        raise _broken(name, f"its files are more than {MOST_FILE_BYTES} bytes")


def _is_allowed(file: FileRecord) -> bool:
    path = file.path
    if not isinstance(path, str) or not isinstance(file.bytes, int) or isinstance(file.bytes, bool):
        return False
    parts = path.split("/")
    is_plain = all(part not in ("", ".", "..") and len(part) < 256 for part in parts)
    has_odd = any(ord(char) < 32 or ord(char) == 127 or char == "\\" or 0xD800 <= ord(char) < 0xE000 for char in path)
    is_hash = isinstance(file.sha256, str) and len(file.sha256) == 64
    is_named = is_plain and not has_odd and len(path) < 1024 and not path.startswith(".") and is_cache_file(path)
    return is_named and file.bytes > 0 and is_hash


def check_payload(path: Path, head: Head, payload: Payload) -> None:
    """The bytes behind the head, all of them and as they are: nothing is decompressed. Raises IntegrityError."""
    length = path.stat().st_size - head.payload_offset
    if length != payload.bytes:
        raise _broken(str(path), f"{length} bytes behind its head instead of {payload.bytes}")
    if _digest_of(path, head.payload_offset) != payload.sha256:
        raise _broken(str(path), "its files have other bytes")


def read_files(path: Path, head: Head, files: tuple[FileRecord, ...]) -> Iterator[tuple[FileRecord, Iterator[bytes]]]:
    """Each file with its bytes in chunks, which must be taken before the next one is.

    Raises IntegrityError where the payload is not exactly these files; a file's own bytes are checked as they go by.
    """
    import zstandard

    name = str(path)
    with open(path, "rb") as file, _zstd_errors_of(name):
        file.seek(head.payload_offset)
        _insist_on_one_frame(file, name)
        file.seek(head.payload_offset)
        decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES)
        with decompressor.stream_reader(file) as stream:
            for one in files:
                expected = _tar_head(one)
                if _exactly(stream, len(expected)) != expected:
                    raise _broken(name, f"what should be the file {one.path} is something else")
                yield one, _file_bytes(stream, one, name)
            if _exactly(stream, len(TAR_END) + 1) != TAR_END:
                raise _broken(name, "it holds more than its header names")


@contextlib.contextmanager
def _zstd_errors_of(name: str) -> Iterator[None]:
    import zstandard

    try:
        yield
    except zstandard.ZstdError as error:
        raise _broken(name, f"it cannot be decompressed: {error}") from error


def _insist_on_one_frame(file: IO[bytes], name: str) -> None:
    """From block to block by their lengths: zstd itself would read on behind the first frame, and skip what it may."""
    import zstandard

    start = file.tell()
    begin = file.read(18)  # the longest head of a frame
    if not begin.startswith(zstandard.FRAME_HEADER):
        raise _broken(name, "what stands behind its head is not compressed")
    file.seek(start + zstandard.frame_header_size(begin))
    is_last = False
    while not is_last:
        block = _exactly(file, 3)
        if len(block) < 3:
            raise _broken(name, "it was cut")
        bits = int.from_bytes(block, "little")
        is_last, kind, length = bool(bits & 1), bits >> 1 & 3, bits >> 3
        file.seek(1 if kind == RUN_LENGTH else length, os.SEEK_CUR)
    end = file.tell() + 4 * zstandard.get_frame_parameters(begin).has_checksum
    if end != file.seek(0, os.SEEK_END):
        raise _broken(name, "it was cut, or something stands behind its files")


def _file_bytes(stream: IO[bytes], file: FileRecord, name: str) -> Iterator[bytes]:
    digest, left = hashlib.sha256(), file.bytes
    while left:
        with _zstd_errors_of(name):  # here: read_files stands still while these are taken
            chunk = stream.read(min(left, CHUNK_BYTES))
        if not chunk:
            raise _broken(name, f"it was cut in {file.path}")
        digest.update(chunk)
        left -= len(chunk)
        yield chunk
    if digest.hexdigest() != file.sha256:
        raise _broken(name, f"{file.path} has other bytes")
    with _zstd_errors_of(name):
        padding = _exactly(stream, _padding(file.bytes))
    if any(padding):
        raise _broken(name, f"{file.path} is longer than its header says")


def _exactly(stream: IO[bytes], count: int) -> bytes:
    """`count` bytes, or what there is."""
    found = b""
    while len(found) < count and (chunk := stream.read(count - len(found))):
        found += chunk
    return found


def _compress(folder: Path, files: tuple[FileRecord, ...], out: IO[bytes]) -> None:
    import zstandard

    with zstandard.ZstdCompressor(level=LEVEL).stream_writer(out, closefd=False) as stream:
        for file in files:
            stream.write(_tar_head(file))
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


def _tar_head(file: FileRecord) -> bytes:
    """Of a regular file without owner or time; a long name takes a member of its own, as GNU tar does it."""
    member = tarfile.TarInfo(file.path)
    member.size, member.mode = file.bytes, 0o644
    return member.tobuf(tarfile.GNU_FORMAT, "utf-8", "strict")


def _padding(length: int) -> int:
    return -length % tarfile.BLOCKSIZE


def _digest_of(path: Path, offset: int) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=io.DEFAULT_BUFFER_SIZE) as file:
        file.seek(offset)
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _canonical(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _broken(name: str, reason: str) -> IntegrityError:
    return IntegrityError(f"the bundle {name} is damaged: {reason}", "fetch it again; nothing of it was used")
