"""Who says that a bundle is good: Ed25519 signatures over its header, and the keys that this machine trusts.

Loading a bundle is running code, so the signature is judged before anything else of it is used. A key is trusted by
name: `tcdeploy cache trust NAME FILE.pub` puts it into a folder, one PEM file per name; who signed is told by that name
and by nothing that stands in the bundle. No torch here; `cryptography` does the arithmetic.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tcdeploy.bundle.container import Signature, SignedHeader
from tcdeploy.errors import TcdeployError, TrustError, UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNATURE_CONTEXT = b"tcdeploy bundle header\n"  # a signature made for something else is none
SECRET_SUFFIX, PUBLIC_SUFFIX = ".key", ".pub"


@dataclass(frozen=True)
class TrustedKey:
    name: str
    fingerprint: str


def default_trusted_keys_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where trusted keys lie: TCDEPLOY_TRUSTED_KEYS, else in the user's configuration."""
    if folder := environ.get("TCDEPLOY_TRUSTED_KEYS"):
        return Path(folder)
    return Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "tcdeploy" / "trusted"


def generate_key(name: Path) -> str:
    """Write NAME.key, for its owner alone, and NAME.pub; returns the fingerprint. Raises UsageError if one is there."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    secret, public = (name.with_name(name.name + suffix) for suffix in (SECRET_SUFFIX, PUBLIC_SUFFIX))
    for path in (secret, public):
        if path.exists():
            raise UsageError(f"{path} is there already", "give the key another name")
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
        raise TcdeployError(f"the key {path} cannot be written: {error.strerror}", "name another place") from error


def trust(name: str, public: Path, folder: Path) -> TrustedKey:
    """Believe from now on what this key signs. Raises UsageError."""
    if not name or name.startswith(".") or os.sep in name:
        raise UsageError(f"{name!r} is no name for a key", "such as ci, or release-2026")
    path = folder / f"{name}{PUBLIC_SUFFIX}"
    key = _read_public(public)
    if path.exists() and fingerprint(_read_public(path)) != fingerprint(key):
        raise UsageError(f"another key is trusted as {name}: {path}", "remove it first, or choose another name")
    with _translate_os_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_public_pem(key))
    return TrustedKey(name, fingerprint(key))


def sign(header: bytes, secret: Path) -> Signature:
    """Raises UsageError for a file that is no Ed25519 key."""
    key = _read_secret(secret)
    return Signature(fingerprint(key.public_key()), key.sign(SIGNATURE_CONTEXT + header).hex())


def verify_signature(
    signed_header: SignedHeader, name: str, folder: Path, allow_unsigned: bool = False
) -> TrustedKey | None:
    """The trusted key that signed the head; None for one that nobody we know signed, where that is allowed.

    Raises TrustError: no signature of a trusted key, or one that does not fit.
    """
    from cryptography.exceptions import InvalidSignature

    trusted = _load_trusted_keys(folder)
    for one in signed_header.signatures:
        if one.key not in trusted:
            continue
        who, key = trusted[one.key]
        try:
            key.verify(bytes.fromhex(one.signature), SIGNATURE_CONTEXT + signed_header.header)
        except InvalidSignature:
            raise TrustError(
                f"the signature of {who} does not fit the bundle {name}", "it was changed after it was signed"
            ) from None
        return TrustedKey(who, one.key)
    if allow_unsigned:
        return None
    unknown = ", ".join(one.key for one in signed_header.signatures)
    raise TrustError(
        f"the bundle {name} is signed by {unknown}, and that is no trusted key" if unknown else f"{name} is not signed",
        "tcdeploy cache trust NAME FILE.pub, if you know the key; --allow-unsigned runs code that nobody vouches for",
    )


def fingerprint(key: Ed25519PublicKey) -> str:
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:32]


def _load_trusted_keys(folder: Path) -> dict[str, tuple[str, Ed25519PublicKey]]:
    keys = {path.stem: _read_public(path) for path in sorted(folder.glob(f"*{PUBLIC_SUFFIX}"))}
    return {fingerprint(key): (name, key) for name, key in keys.items()}


def _public_pem(key: Ed25519PublicKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _read_public(path: Path) -> Ed25519PublicKey:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = serialization.load_pem_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no public key: {error}", "tcdeploy cache keygen NAME makes a pair") from error
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError(f"{path} is no Ed25519 key", "tcdeploy cache keygen NAME makes a pair")
    return key


def _read_secret(path: Path) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path} is no private key: {error}", "tcdeploy cache keygen NAME makes a pair") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{path} is no Ed25519 key", "tcdeploy cache keygen NAME makes a pair")
    return key
