"""The first two frames of a bundle: its header, unparsed, and the signatures over it.

    zstd skippable frame    header, JSON (bundle_header.py)
    zstd skippable frame    signatures over the header, JSON

A cache folder keeps these frames of each bundle that was unpacked into it. The header stays bytes until its signature
has been verified (signing.py). Does not import torch.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict, dataclass
from typing import IO, Any

from tcdeploy.errors import IntegrityError

HEADER_MAGIC, SIGNATURES_MAGIC = 0x184D2A50, 0x184D2A51  # zstd skippable frames
HEADER_PREFIX = b"tcdeploy bundle 1\n"
MAX_HEADER_BYTES, MAX_SIGNATURES_BYTES = 64 << 20, 1 << 20


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
        raise damaged_error(name, "its signatures cannot be parsed") from error
    if not matches_checksum:
        raise damaged_error(name, "its header and signatures do not match their checksum")
    return SignedHeader(header, signatures, len(canonical))


def _is_canonical_hex(signature: Signature) -> bool:
    texts = (signature.key, signature.signature)
    return all(isinstance(text, str) and bytes.fromhex(text).hex() == text for text in texts)


def _read_skippable_frame(file: IO[bytes], magic: int, max_bytes: int, name: str) -> bytes:
    frame_header = file.read(8)
    if len(frame_header) < 8 or struct.unpack("<I", frame_header[:4])[0] != magic:
        is_first = magic == HEADER_MAGIC
        raise damaged_error(
            name, "it does not start with a bundle header" if is_first else "its signatures are missing"
        )
    (length,) = struct.unpack("<I", frame_header[4:])
    if length > max_bytes:
        raise damaged_error(name, f"its header or signatures have {length} bytes; the limit is {max_bytes}")
    content = file.read(length)
    if len(content) < length:
        raise damaged_error(name, "it is truncated")
    return content


def _canonical_json(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def damaged_error(name: str, reason: str) -> IntegrityError:
    return IntegrityError(f"the bundle {name} is damaged: {reason}", "fetch it again; nothing from it was used")
