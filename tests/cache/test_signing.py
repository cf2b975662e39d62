"""Key files, trusted keys, and signatures over bundle headers."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tcdeploy.bundle.pack import add_signature, pack
from tcdeploy.bundle.verify import verify_bundle
from tcdeploy.cache.trust.signing import (
    SignedHeader,
    default_trusted_keys_folder,
    fingerprint,
    generate_key,
    read_signed_header,
    sign,
    trust,
    verify_signature,
)
from tcdeploy.errors import IntegrityError, SpaceError, TcdeployError, TrustError, UsageError
from tests.bundle.conftest import Keys, Packed
from tests.bundle.fake_caches import fill_disk_leaving
from tests.conftest import mounted_tmpfs


def header_signed_by(*secrets: Path) -> SignedHeader:
    return SignedHeader(b"header", tuple(sign(b"header", secret) for secret in secrets), 0)


def signed_header_of(bundle: Path) -> SignedHeader:
    with open(bundle, "rb") as file:
        return read_signed_header(file, str(bundle))


# Keys


def test_the_secret_key_has_mode_0600_and_both_keys_are_pem(tmp_path: Path) -> None:
    key_fingerprint = generate_key(tmp_path / "release.2026")
    secret, public = tmp_path / "release.2026.key", tmp_path / "release.2026.pub"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    key = serialization.load_pem_private_key(secret.read_bytes(), None)
    assert isinstance(key, Ed25519PrivateKey)
    assert public.read_bytes() == key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    assert fingerprint(key.public_key()) == key_fingerprint and len(key_fingerprint) == 32


@pytest.mark.parametrize("suffix", [".key", ".pub"])
def test_an_existing_key_is_not_overwritten(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"ci{suffix}").write_text("precious")
    with pytest.raises(UsageError, match=f"ci{suffix} already exists"):
        generate_key(tmp_path / "ci")
    assert [path.name for path in tmp_path.iterdir()] == [f"ci{suffix}"]
    assert (tmp_path / f"ci{suffix}").read_text() == "precious"


def test_generated_keys_differ(tmp_path: Path) -> None:
    assert len({generate_key(tmp_path / str(number)) for number in range(5)}) == 5


def test_a_missing_folder_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(TcdeployError, match="cannot be written: No such file"):
        generate_key(tmp_path / "nowhere" / "ci")


# Trust


def test_a_signer_is_reported_by_its_local_name(keys: Keys, tmp_path: Path) -> None:
    signed_header = header_signed_by(keys.secret)
    with pytest.raises(TrustError, match="no trusted key signed the bundle"):
        verify_signature(signed_header, "x", tmp_path / "trusted")
    trusted_key = trust("my-ci", keys.public, tmp_path / "trusted")
    assert verify_signature(signed_header, "x", tmp_path / "trusted") == trusted_key and trusted_key.name == "my-ci"
    assert trust("my-ci", keys.public, tmp_path / "trusted") == trusted_key, "trusting twice changes nothing"
    assert [path.name for path in (tmp_path / "trusted").iterdir()] == ["my-ci.pub"]


def test_a_second_key_under_the_same_name_is_refused(keys: Keys, tmp_path: Path) -> None:
    generate_key(tmp_path / "other")
    trust("ci", keys.public, tmp_path / "trusted")
    before = (tmp_path / "trusted" / "ci.pub").read_bytes()
    with pytest.raises(UsageError, match="another key is already trusted as ci"):
        trust("ci", tmp_path / "other.pub", tmp_path / "trusted")
    assert (tmp_path / "trusted" / "ci.pub").read_bytes() == before
    trust("other", tmp_path / "other.pub", tmp_path / "trusted")
    assert verify_signature(header_signed_by(tmp_path / "other.key"), "x", tmp_path / "trusted") is not None


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/x", ".hidden"])
def test_a_key_name_that_is_a_path_is_refused(keys: Keys, name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a valid key name"):
        trust(name, keys.public, tmp_path / "trusted")
    assert list(tmp_path.iterdir()) == []


def foreign(kind: str) -> Any:
    return ec.generate_private_key(ec.SECP256R1()) if kind == "EC" else rsa.generate_private_key(65537, 2048)


@pytest.mark.parametrize("kind", ["EC", "RSA"])
def test_a_key_of_another_algorithm_is_refused(kind: str, tmp_path: Path) -> None:
    key = foreign(kind)
    (tmp_path / "other.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    (tmp_path / "other.pub").write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    with pytest.raises(UsageError, match=r"other\.pub is not an Ed25519 key"):
        trust("other", tmp_path / "other.pub", tmp_path / "trusted")
    with pytest.raises(UsageError, match=r"other\.key is not an Ed25519 key"):
        sign(b"header", tmp_path / "other.key")
    assert not (tmp_path / "trusted").exists()


@pytest.mark.parametrize("content", [b"", b"no key", b"\xff" * 100, b"-----BEGIN PUBLIC KEY-----\nAAAA\n"])
def test_a_file_that_is_not_a_key_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(content)
    for path in (tmp_path / "bad", tmp_path / "missing", tmp_path):
        with pytest.raises(UsageError, match=f"{path} is not a public key"):
            trust("bad", path, tmp_path / "trusted")
        with pytest.raises(UsageError, match=f"{path} is not a private key"):
            sign(b"header", path)


def test_an_encrypted_secret_key_and_a_secret_key_as_public_key_are_refused(keys: Keys, tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    locked = serialization.BestAvailableEncryption(b"password")
    (tmp_path / "locked.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
    )
    with pytest.raises(UsageError, match=r"locked\.key is not a private key"):
        sign(b"header", tmp_path / "locked.key")
    with pytest.raises(UsageError, match="is not a public key"):
        trust("ci", keys.secret, tmp_path / "trusted")


def test_the_environment_sets_the_folder_of_trusted_keys() -> None:
    assert default_trusted_keys_folder({"TCDEPLOY_TRUSTED_KEYS": "/a/b"}) == Path("/a/b")
    assert default_trusted_keys_folder({"XDG_CONFIG_HOME": "/c"}) == Path("/c/tcdeploy/trusted")
    assert default_trusted_keys_folder({"TCDEPLOY_TRUSTED_KEYS": "", "XDG_CONFIG_HOME": ""}).parts[-3:] == (
        ".config", "tcdeploy", "trusted",
    )  # fmt: skip


def test_an_invalid_key_in_the_trusted_folder_is_an_error(keys: Keys, tmp_path: Path) -> None:
    trust("ci", keys.public, tmp_path)
    (tmp_path / "notes.txt").write_text("not a key file")
    assert verify_signature(header_signed_by(keys.secret), "x", tmp_path) is not None
    (tmp_path / "torn.pub").write_text("-----BEGIN PUBL")
    with pytest.raises(UsageError, match=r"torn\.pub is not a public key"):
        verify_signature(header_signed_by(keys.secret), "x", tmp_path)


# Signatures


def test_signing_twice_with_a_key_adds_one_signature(small: Packed, keys: Keys, tmp_path: Path) -> None:
    pack(small.folder, small.key, tmp_path / "x.tcb")
    assert signed_header_of(tmp_path / "x.tcb").signatures == ()
    for _ in range(2):
        add_signature(tmp_path / "x.tcb", keys.secret)
    assert len(signed_header_of(tmp_path / "x.tcb").signatures) == 1
    assert (tmp_path / "x.tcb").read_bytes() == small.bundle.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["x.tcb"]


def test_one_trusted_signer_of_two_is_enough(small: Packed, keys: Keys, tmp_path: Path) -> None:
    pack(small.folder, small.key, tmp_path / "x.tcb", keys.secret)
    generate_key(tmp_path / "second")
    add_signature(tmp_path / "x.tcb", tmp_path / "second.key")
    assert len(signed_header_of(tmp_path / "x.tcb").signatures) == 2
    trust("second", tmp_path / "second.pub", tmp_path / "only-second")
    for folder, name in ((keys.trusted, "ci"), (tmp_path / "only-second", "second")):
        signer = verify_bundle(tmp_path / "x.tcb", folder)[0].signer
        assert signer is not None and signer.name == name
    with pytest.raises(TrustError):
        verify_bundle(tmp_path / "x.tcb", tmp_path / "no keys")


def test_an_unknown_signer_before_a_trusted_one_is_ignored(keys: Keys, tmp_path: Path) -> None:
    generate_key(tmp_path / "unknown")
    signer = verify_signature(header_signed_by(tmp_path / "unknown.key", keys.secret), "x", keys.trusted)
    assert signer is not None and signer.name == "ci"


def test_a_signature_is_valid_for_its_header_only(keys: Keys) -> None:
    good = header_signed_by(keys.secret)
    assert verify_signature(good, "x", keys.trusted) is not None
    with pytest.raises(TrustError, match="the signature of ci does not match the bundle x"):
        verify_signature(SignedHeader(b"headeR", good.signatures, 0), "x", keys.trusted)
    with pytest.raises(TrustError):
        verify_signature(SignedHeader(b"headeR", good.signatures, 0), "x", keys.trusted, allow_unsigned=True)


def test_an_unsigned_header_has_no_signer_if_allowed_and_is_an_error_otherwise(keys: Keys, tmp_path: Path) -> None:
    generate_key(tmp_path / "unknown")
    for signed_header in (SignedHeader(b"header", (), 0), header_signed_by(tmp_path / "unknown.key")):
        assert verify_signature(signed_header, "x", keys.trusted, allow_unsigned=True) is None
        with pytest.raises(TrustError) as caught:
            verify_signature(signed_header, "x", keys.trusted)
        assert caught.value.exit_code == 4 and "--allow-unsigned" in caught.value.hint


def test_a_file_that_is_not_a_bundle_is_not_signed_or_changed(keys: Keys, tmp_path: Path) -> None:
    (tmp_path / "x.tcb").write_bytes(b"something else")
    with pytest.raises(IntegrityError):
        add_signature(tmp_path / "x.tcb", keys.secret)
    assert (tmp_path / "x.tcb").read_bytes() == b"something else"
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        add_signature(tmp_path / "nowhere.tcb", keys.secret)


def test_a_full_disk_leaves_the_bundle_unchanged(packed: Packed, keys: Keys, tmp_path: Path) -> None:
    generate_key(tmp_path / "second")
    with mounted_tmpfs(tmp_path / "full", "-o", "size=16m") as place:
        (place / "x.tcb").write_bytes(packed.bundle.read_bytes())
        fill_disk_leaving(place, 1 << 20)
        with pytest.raises(SpaceError):
            add_signature(place / "x.tcb", tmp_path / "second.key")
        assert sorted(path.name for path in place.iterdir()) == ["filler", "x.tcb"]
        assert (place / "x.tcb").read_bytes() == packed.bundle.read_bytes()


# The commands


def test_the_commands_create_trust_and_use_a_key_pair(
    run_cli: Callable[..., Any], small: Packed, tmp_path: Path
) -> None:
    """keygen, sign, trust (in the user's configuration folder) and verify."""
    bundle = tmp_path / "x.tcb"
    pack(small.folder, small.key, bundle)
    created = run_cli("cache", "keygen", str(tmp_path / "me"))
    assert created.returncode == 0 and created.stdout.split()[:2] == [
        str(tmp_path / "me.key"),
        str(tmp_path / "me.pub"),
    ]
    again = run_cli("cache", "keygen", str(tmp_path / "me"))
    assert again.returncode == 2 and "already exists" in again.stderr
    assert run_cli("cache", "sign", str(bundle), "--key", str(tmp_path / "me.key")).returncode == 0
    assert run_cli("cache", "verify", str(bundle)).returncode == 4
    assert run_cli("cache", "trust", "me", str(tmp_path / "me.pub")).returncode == 0
    assert (tmp_path / ".config" / "tcdeploy" / "trusted" / "me.pub").exists()
    result = run_cli("cache", "verify", str(bundle))
    assert result.returncode == 0 and "signed by me" in result.stdout


def test_the_commands_of_keys_print_documents(run_cli: Callable[..., Any], small: Packed, tmp_path: Path) -> None:
    bundle, secret, public = tmp_path / "x.tcb", str(tmp_path / "me.key"), str(tmp_path / "me.pub")
    pack(small.folder, small.key, bundle)
    created = json.loads(run_cli("cache", "keygen", str(tmp_path / "me"), "--json").stdout)
    assert (created["secret_key"], created["public_key"]) == (secret, public)
    signed = json.loads(run_cli("cache", "sign", str(bundle), "--key", secret, "--json").stdout)
    assert (signed["command"], signed["path"], signed["secret_key"]) == ("cache sign", str(bundle), secret)
    trusted = json.loads(run_cli("cache", "trust", "me", public, "--json").stdout)
    assert trusted["signer"] == {"name": "me", "fingerprint": created["fingerprint"]}
    verified = json.loads(run_cli("cache", "verify", str(bundle), "--json").stdout)
    assert verified["plans"][0]["signer"] == trusted["signer"]


def test_the_commands_report_errors_without_a_traceback(
    run_cli: Callable[..., Any], keys: Keys, tmp_path: Path
) -> None:
    nowhere, key = str(tmp_path / "nowhere" / "x"), str(keys.secret)
    for code, arguments in (
        (2, ("sign", nowhere, "--key", key)),
        (1, ("keygen", nowhere)),
        (2, ("trust", "../x", str(keys.public))),
        (2, ("trust", "x", nowhere)),
    ):
        result = run_cli("cache", *arguments)
        assert result.returncode == code, result.stderr
        assert result.stderr.startswith("error: ") and "Traceback" not in result.stderr
