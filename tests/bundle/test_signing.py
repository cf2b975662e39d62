"""Keys are files, trust is a name for one, and a signature is of one header for one purpose."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tcdeploy.bundle.container import SignedHeader, read_signed_header
from tcdeploy.bundle.pack import add_signature, pack
from tcdeploy.bundle.signing import (
    default_trusted_keys_folder,
    fingerprint,
    generate_key,
    sign,
    trust,
    verify_signature,
)
from tcdeploy.bundle.verify import verify_bundle
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


def test_the_secret_is_for_its_owner_alone_and_both_are_pem(tmp_path: Path) -> None:
    print_ = generate_key(tmp_path / "release.2026")
    secret, public = tmp_path / "release.2026.key", tmp_path / "release.2026.pub"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    key = serialization.load_pem_private_key(secret.read_bytes(), None)
    assert isinstance(key, Ed25519PrivateKey)
    assert public.read_bytes() == key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    assert fingerprint(key.public_key()) == print_ and len(print_) == 32


@pytest.mark.parametrize("suffix", [".key", ".pub"])
def test_a_key_that_is_there_is_not_written_over(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"ci{suffix}").write_text("precious")
    with pytest.raises(UsageError, match=f"ci{suffix} is there already"):
        generate_key(tmp_path / "ci")
    assert [path.name for path in tmp_path.iterdir()] == [f"ci{suffix}"]
    assert (tmp_path / f"ci{suffix}").read_text() == "precious"


def test_no_two_keys_are_the_same(tmp_path: Path) -> None:
    assert len({generate_key(tmp_path / str(number)) for number in range(5)}) == 5


def test_a_place_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(TcdeployError, match="cannot be written: No such file"):
        generate_key(tmp_path / "nowhere" / "ci")


# Trust


def test_a_trusted_key_is_known_by_the_name_it_was_given(keys: Keys, tmp_path: Path) -> None:
    signed_header = header_signed_by(keys.secret)
    with pytest.raises(TrustError, match="that is no trusted key"):
        verify_signature(signed_header, "x", tmp_path / "trusted")
    given = trust("my-ci", keys.public, tmp_path / "trusted")
    assert verify_signature(signed_header, "x", tmp_path / "trusted") == given and given.name == "my-ci"
    assert trust("my-ci", keys.public, tmp_path / "trusted") == given, "twice is once"
    assert [path.name for path in (tmp_path / "trusted").iterdir()] == ["my-ci.pub"]


def test_another_key_under_a_name_that_is_given_is_refused(keys: Keys, tmp_path: Path) -> None:
    generate_key(tmp_path / "other")
    trust("ci", keys.public, tmp_path / "trusted")
    before = (tmp_path / "trusted" / "ci.pub").read_bytes()
    with pytest.raises(UsageError, match="another key is trusted as ci"):
        trust("ci", tmp_path / "other.pub", tmp_path / "trusted")
    assert (tmp_path / "trusted" / "ci.pub").read_bytes() == before
    trust("other", tmp_path / "other.pub", tmp_path / "trusted")
    assert verify_signature(header_signed_by(tmp_path / "other.key"), "x", tmp_path / "trusted") is not None


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/x", ".hidden"])
def test_a_name_that_is_a_path_is_refused(keys: Keys, name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no name for a key"):
        trust(name, keys.public, tmp_path / "trusted")
    assert list(tmp_path.iterdir()) == []


def foreign(kind: str) -> Any:
    return ec.generate_private_key(ec.SECP256R1()) if kind == "EC" else rsa.generate_private_key(65537, 2048)


@pytest.mark.parametrize("kind", ["EC", "RSA"])
def test_a_key_of_another_kind_is_refused(kind: str, tmp_path: Path) -> None:
    key = foreign(kind)
    (tmp_path / "other.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    (tmp_path / "other.pub").write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    with pytest.raises(UsageError, match=r"other\.pub is no Ed25519 key"):
        trust("other", tmp_path / "other.pub", tmp_path / "trusted")
    with pytest.raises(UsageError, match=r"other\.key is no Ed25519 key"):
        sign(b"header", tmp_path / "other.key")
    assert not (tmp_path / "trusted").exists()


@pytest.mark.parametrize("content", [b"", b"no key", b"\xff" * 100, b"-----BEGIN PUBLIC KEY-----\nAAAA\n"])
def test_a_file_that_is_no_key_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(content)
    for path in (tmp_path / "bad", tmp_path / "missing", tmp_path):
        with pytest.raises(UsageError, match=f"{path} is no public key"):
            trust("bad", path, tmp_path / "trusted")
        with pytest.raises(UsageError, match=f"{path} is no private key"):
            sign(b"header", path)


def test_a_secret_under_a_password_is_refused_and_a_secret_is_no_public_key(keys: Keys, tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    locked = serialization.BestAvailableEncryption(b"password")
    (tmp_path / "locked.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
    )
    with pytest.raises(UsageError, match=r"locked\.key is no private key"):
        sign(b"header", tmp_path / "locked.key")
    with pytest.raises(UsageError, match="is no public key"):
        trust("ci", keys.secret, tmp_path / "trusted")


def test_trusted_keys_lie_where_the_environment_says() -> None:
    assert default_trusted_keys_folder({"TCDEPLOY_TRUSTED_KEYS": "/a/b"}) == Path("/a/b")
    assert default_trusted_keys_folder({"XDG_CONFIG_HOME": "/c"}) == Path("/c/tcdeploy/trusted")
    assert default_trusted_keys_folder({"TCDEPLOY_TRUSTED_KEYS": "", "XDG_CONFIG_HOME": ""}).parts[-3:] == (
        ".config", "tcdeploy", "trusted",
    )  # fmt: skip


def test_a_trusted_folder_with_something_else_in_it_says_so(keys: Keys, tmp_path: Path) -> None:
    trust("ci", keys.public, tmp_path)
    (tmp_path / "notes.txt").write_text("not looked at")
    assert verify_signature(header_signed_by(keys.secret), "x", tmp_path) is not None
    (tmp_path / "torn.pub").write_text("-----BEGIN PUBL")
    with pytest.raises(UsageError, match=r"torn\.pub is no public key"):
        verify_signature(header_signed_by(keys.secret), "x", tmp_path)


# Signatures


def test_signing_twice_is_one_signature(small: Packed, keys: Keys, tmp_path: Path) -> None:
    pack(small.folder, small.key, tmp_path / "x.tcb")
    assert signed_header_of(tmp_path / "x.tcb").signatures == ()
    for _ in range(2):
        add_signature(tmp_path / "x.tcb", keys.secret)
    assert len(signed_header_of(tmp_path / "x.tcb").signatures) == 1
    assert (tmp_path / "x.tcb").read_bytes() == small.bundle.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["x.tcb"]


def test_of_two_signers_either_is_enough(small: Packed, keys: Keys, tmp_path: Path) -> None:
    pack(small.folder, small.key, tmp_path / "x.tcb", keys.secret)
    generate_key(tmp_path / "second")
    add_signature(tmp_path / "x.tcb", tmp_path / "second.key")
    assert len(signed_header_of(tmp_path / "x.tcb").signatures) == 2
    trust("second", tmp_path / "second.pub", tmp_path / "only-second")
    for folder, name in ((keys.trusted, "ci"), (tmp_path / "only-second", "second")):
        signer = verify_bundle(tmp_path / "x.tcb", folder).signer
        assert signer is not None and signer.name == name
    with pytest.raises(TrustError):
        verify_bundle(tmp_path / "x.tcb", tmp_path / "nobody")


def test_a_stranger_before_a_known_signer_is_passed_over(keys: Keys, tmp_path: Path) -> None:
    generate_key(tmp_path / "stranger")
    judged = verify_signature(header_signed_by(tmp_path / "stranger.key", keys.secret), "x", keys.trusted)
    assert judged is not None and judged.name == "ci"


def test_a_signature_is_of_this_header(keys: Keys) -> None:
    good = header_signed_by(keys.secret)
    assert verify_signature(good, "x", keys.trusted) is not None
    with pytest.raises(TrustError, match="the signature of ci does not fit the bundle x"):
        verify_signature(SignedHeader(b"headeR", good.signatures, 0), "x", keys.trusted)
    with pytest.raises(TrustError):
        verify_signature(SignedHeader(b"headeR", good.signatures, 0), "x", keys.trusted, allow_unsigned=True)


def test_unsigned_is_none_where_it_is_allowed_and_an_error_else(keys: Keys, tmp_path: Path) -> None:
    generate_key(tmp_path / "stranger")
    for signed_header in (SignedHeader(b"header", (), 0), header_signed_by(tmp_path / "stranger.key")):
        assert verify_signature(signed_header, "x", keys.trusted, allow_unsigned=True) is None
        with pytest.raises(TrustError) as caught:
            verify_signature(signed_header, "x", keys.trusted)
        assert caught.value.exit_code == 4 and "--allow-unsigned" in caught.value.hint


def test_what_is_no_bundle_is_not_signed_and_stays_as_it_is(keys: Keys, tmp_path: Path) -> None:
    (tmp_path / "x.tcb").write_bytes(b"something else")
    with pytest.raises(IntegrityError):
        add_signature(tmp_path / "x.tcb", keys.secret)
    assert (tmp_path / "x.tcb").read_bytes() == b"something else"
    with pytest.raises(TcdeployError, match="No such file"):
        add_signature(tmp_path / "nowhere.tcb", keys.secret)


def test_a_full_disk_leaves_the_bundle_as_it_was(packed: Packed, keys: Keys, tmp_path: Path) -> None:
    generate_key(tmp_path / "second")
    with mounted_tmpfs(tmp_path / "full", "-o", "size=16m") as place:
        (place / "x.tcb").write_bytes(packed.bundle.read_bytes())
        fill_disk_leaving(place, 1 << 20)
        with pytest.raises(SpaceError):
            add_signature(place / "x.tcb", tmp_path / "second.key")
        assert sorted(path.name for path in place.iterdir()) == ["filler", "x.tcb"]
        assert (place / "x.tcb").read_bytes() == packed.bundle.read_bytes()


# The commands


def test_a_pair_is_made_trusted_and_used_by_the_commands(
    run_cli: Callable[..., Any], small: Packed, tmp_path: Path
) -> None:
    """keygen, sign, trust (into the user's own configuration) and verify, one after another."""
    bundle = tmp_path / "x.tcb"
    pack(small.folder, small.key, bundle)
    made = run_cli("cache", "keygen", str(tmp_path / "me"))
    assert made.returncode == 0 and made.stdout.split()[:2] == [str(tmp_path / "me.key"), str(tmp_path / "me.pub")]
    again = run_cli("cache", "keygen", str(tmp_path / "me"))
    assert again.returncode == 2 and "is there already" in again.stderr
    assert run_cli("cache", "sign", str(bundle), "--key", str(tmp_path / "me.key")).returncode == 0
    assert run_cli("cache", "verify", str(bundle)).returncode == 4
    assert run_cli("cache", "trust", "me", str(tmp_path / "me.pub")).returncode == 0
    assert (tmp_path / ".config" / "tcdeploy" / "trusted" / "me.pub").exists()
    result = run_cli("cache", "verify", str(bundle))
    assert result.returncode == 0 and "signed by me" in result.stdout


def test_the_commands_name_what_is_wrong_and_show_no_traceback(
    run_cli: Callable[..., Any], keys: Keys, tmp_path: Path
) -> None:
    nowhere, key = str(tmp_path / "nowhere" / "x"), str(keys.secret)
    for code, arguments in (
        (1, ("sign", nowhere, "--key", key)),
        (1, ("keygen", nowhere)),
        (2, ("trust", "../x", str(keys.public))),
        (2, ("trust", "x", nowhere)),
    ):
        result = run_cli("cache", *arguments)
        assert result.returncode == code, result.stderr
        assert result.stderr.startswith("error: ") and "Traceback" not in result.stderr
