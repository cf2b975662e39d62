"""The first two frames of a bundle, Ed25519 signatures, and the keys that this machine trusts.

    zstd skippable frame    header, JSON (record/bundle_header.py)
    zstd skippable frame    signatures over the header, JSON

A cache folder keeps these frames of each bundle that was unpacked into it. Loading a bundle runs the code in it, so the
header stays unparsed bytes until its signature has been verified. `tcdeploy cache trust NAME FILE.pub` stores a trusted
key in a folder, one PEM file per name. A signer is reported by that local name, never by text from the bundle. Does not
import torch; `cryptography` implements Ed25519.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tcdeploy.errors import IntegrityError, TcdeployError, TrustError, UsageError
from tcdeploy.host.durable import write_durably
from tcdeploy.host.regular_file import open_regular, read_regular

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNATURE_CONTEXT = b"tcdeploy bundle header\n"  # starts each signed message: a key may also sign other things
KEYGEN_HINT = "create a pair: tcdeploy cache keygen NAME"
HEADER_MAGIC, SIGNATURES_MAGIC = 0x184D2A50, 0x184D2A51  # zstd skippable frames
HEADER_PREFIX = b"tcdeploy bundle 1\n"
MAX_HEADER_BYTES, MAX_SIGNATURES_BYTES = 64 << 20, 1 << 20
MAX_KEY_BYTES = 1 << 16
SECRET_SUFFIX, PUBLIC_SUFFIX = ".key", ".pub"


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
class TrustedKey:
    name: str
    fingerprint: str


def default_trusted_keys_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """TCDEPLOY_TRUSTED_KEYS, else tcdeploy/trusted in the user's configuration folder."""
    if folder := environ.get("TCDEPLOY_TRUSTED_KEYS"):
        return Path(folder)
    return Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "tcdeploy" / "trusted"


def generate_key(name: Path) -> str:
    """Write NAME.key (mode 0600) and NAME.pub; returns the fingerprint. Raises UsageError if either exists."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    secret, public = (name.with_name(name.name + suffix) for suffix in (SECRET_SUFFIX, PUBLIC_SUFFIX))
    for path in (secret, public):
        if path.exists():
            raise UsageError(f"{path} already exists", "choose another name: tcdeploy cache keygen NAME")
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with _translate_os_errors(secret):
        with os.fdopen(os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(private)
        public.write_bytes(_public_pem(key.public_key()))
    return fingerprint(key.public_key())


@contextlib.contextmanager
def _translate_os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TcdeployError(
            f"the key {path} cannot be written: {error.strerror}", "choose a writable folder"
        ) from error


def trust(name: str, public: Path, folder: Path) -> TrustedKey:
    """Add a public key to the trusted keys, under `name`. Raises UsageError."""
    if not name or name.startswith(".") or os.sep in name:
        raise UsageError(f"{name!r} is not a valid key name", "use a file name, such as ci or release-2026")
    path = folder / f"{name}{PUBLIC_SUFFIX}"
    key = _parse_public(public, Path.read_bytes)  # the user names the file, which may be a pipe
    if path.exists() and fingerprint(_read_trusted(path)) != fingerprint(key):
        raise UsageError(f"another key is already trusted as {name}: {path}", "delete it first, or choose another name")
    with _translate_os_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_durably(path, _public_pem(key))
    return TrustedKey(name, fingerprint(key))


def sign(header: bytes, secret: Path) -> Signature:
    """Sign a header with the private key in the file `secret`. Raises UsageError if it is not an Ed25519 key."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key: Ed25519PrivateKey = _parse_key(
        secret, "private", lambda: load_pem_private_key(secret.read_bytes(), password=None)
    )
    return Signature(fingerprint(key.public_key()), key.sign(SIGNATURE_CONTEXT + header).hex())


def verify_signature(
    signed_header: SignedHeader, name: str, folder: Path, allow_unsigned: bool = False
) -> TrustedKey | None:
    """The trusted key that signed the header, or None if no trusted key did and `allow_unsigned` is set.

    Raises TrustError if no trusted key signed it, or if a trusted key's signature is invalid.
    """
    from cryptography.exceptions import InvalidSignature

    trusted = _load_trusted_keys(folder)
    for signature in signed_header.signatures:
        if signature.key not in trusted:
            continue
        signer, key = trusted[signature.key]
        try:
            key.verify(bytes.fromhex(signature.signature), SIGNATURE_CONTEXT + signed_header.header)
        except InvalidSignature:
            raise TrustError(
                f"the signature of {signer} does not match the bundle {name}",
                "the bundle was changed after it was signed; fetch it again from its source",
            ) from None
        return TrustedKey(signer, signature.key)
    if allow_unsigned:
        return None
    unknown = ", ".join(signature.key for signature in signed_header.signatures)
    raise TrustError(
        f"no trusted key signed the bundle {name}; it is signed by {unknown}" if unknown else f"{name} is not signed",
        "trust a key whose owner you know: tcdeploy cache trust NAME FILE.pub; --allow-unsigned skips this check "
        "and runs the code in the bundle",
    )


def fingerprint(key: Ed25519PublicKey) -> str:
    """The first 32 hexadecimal digits of the sha256 of the raw public key."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:32]


def _load_trusted_keys(folder: Path) -> dict[str, tuple[str, Ed25519PublicKey]]:
    keys = {path.stem: _read_trusted(path) for path in sorted(folder.glob(f"*{PUBLIC_SUFFIX}"))}
    return {fingerprint(key): (name, key) for name, key in keys.items()}


def _public_pem(key: Ed25519PublicKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _read_trusted(path: Path) -> Ed25519PublicKey:
    """A key in the folder of trusted keys, where it may be a link, as in a mounted Secret of Kubernetes."""
    return _parse_public(path, lambda path: read_regular(path, MAX_KEY_BYTES, follows_links=True))


def _parse_public(path: Path, read: Callable[[Path], bytes]) -> Ed25519PublicKey:
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    return _parse_key(path, "public", lambda: load_pem_public_key(read(path)))


def _parse_key(path: Path, kind: str, parse: Callable[[], Any]) -> Any:
    """The Ed25519 key that `parse` returns. Raises UsageError."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

    try:
        key = parse()
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path} is not a {kind} key: {error}", KEYGEN_HINT) from error
    if not isinstance(key, Ed25519PublicKey | Ed25519PrivateKey):
        raise UsageError(f"{path} is not an Ed25519 key", KEYGEN_HINT)
    return key


def signed_header_bytes(header: bytes, signatures: tuple[Signature, ...]) -> bytes:
    """The two frames that start a bundle. A cache folder keeps them for each bundle unpacked into it."""
    signature_dicts = [asdict(signature) for signature in signatures]
    checksum = hashlib.sha256(header + _canonical_json(signature_dicts)).hexdigest()  # finds damage without a key
    content = HEADER_PREFIX + header
    document = _canonical_json({"sha256": checksum, "signatures": signature_dicts})
    frames = ((HEADER_MAGIC, content), (SIGNATURES_MAGIC, document))
    return b"".join(struct.pack("<II", magic, len(frame)) + frame for magic, frame in frames)


def read_bundle_header(path: Path) -> SignedHeader:
    """The signed header of a bundle, which may be a link. Raises OSError and IntegrityError."""
    with open_regular(path, follows_links=True) as file:
        return read_signed_header(file, str(path))


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
        has_header = magic == SIGNATURES_MAGIC
        reason = "its signatures are missing" if has_header else "it does not start with a bundle header"
        raise damaged_error(name, reason)
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
