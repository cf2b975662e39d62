"""No bit of a bundle, or of a folder that one was unpacked into, changes unseen: a thousand flips of each, seeded."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.bundle.container import read_signed_header
from tcdeploy.bundle.pack import add_signature, pack
from tcdeploy.bundle.signing import generate_key, trust
from tcdeploy.bundle.unpack import unpack
from tcdeploy.bundle.verify import verify_bundle, verify_folder
from tcdeploy.cache import integrity
from tcdeploy.cache.contents import hash_files
from tcdeploy.cache.inventory import list_plans
from tcdeploy.cache.manifest import write_manifest
from tcdeploy.errors import IntegrityError, TcdeployError, TrustError, UsageError
from tests.bundle.conftest import Keys, Packed
from tests.bundle.fake_caches import KINDS, flipped, key_of, make_small, path_of

FLIPS = 1000


def outcome_of(check: Callable[[], Any], wanted: tuple[type[TcdeployError], ...], name: str) -> str:
    """The error that a check must raise, which names the file; by its type."""
    with pytest.raises(wanted) as caught:
        check()
    assert name in caught.value.message and caught.value.exit_code in (4, 5)
    return type(caught.value).__name__


def regions(bundle: Path) -> tuple[int, int, int]:
    """Where the header's block ends, where the signatures' ends, and where the file does."""
    content = bundle.read_bytes()
    with open(bundle, "rb") as file:
        payload = read_signed_header(file, str(bundle)).payload_offset
    return content.index(b"Q*M\x18"), payload, len(content)


def test_what_was_packed_verifies_and_its_signer_is_named(packed: Packed, keys: Keys) -> None:
    found = verify_bundle(packed.bundle, keys.trusted)
    assert (found.plan_key, found.model, found.files) == (packed.key, "someone/model", len(packed.manifest.files))
    assert found.bytes == sum(file.bytes for file in packed.manifest.files)
    assert found.signer is not None and found.signer.name == "ci" and found.is_from_bundle


def test_a_thousand_flipped_bits_of_a_bundle_are_caught(small: Packed, keys: Keys, tmp_path: Path) -> None:
    """Anywhere in the file: header, signature, compressed files."""
    content, target, source = small.bundle.read_bytes(), tmp_path / "x.tcb", random.Random(1)
    ends, found = regions(small.bundle), Counter()  # type: ignore[var-annotated]
    for _ in range(FLIPS):
        bit = source.randrange(len(content) * 8)
        target.write_bytes(flipped(content, bit))
        kind = outcome_of(lambda: verify_bundle(target, keys.trusted), (TrustError, IntegrityError), str(target))
        found[sum(bit // 8 >= end for end in ends)] += 1
        found[kind] += 1
    target.write_bytes(content)
    assert verify_bundle(target, keys.trusted).files == len(KINDS)
    assert all(found[region] > 5 for region in range(3)), found
    assert found["IntegrityError"] == FLIPS, "without a key's own doing no change is a matter of trust"


@pytest.mark.parametrize("region", range(3), ids=["header", "signatures", "payload"])
@pytest.mark.parametrize("signers", [0, 1, 2], ids=["nobody", "a stranger", "a stranger behind a trusted key"])
def test_flipped_bits_of_a_bundle_that_nobody_known_signed_are_caught_too(
    small: Packed, keys: Keys, signers: int, region: int, tmp_path: Path
) -> None:
    """--allow-unsigned gives up who made it, and not that it is whole."""
    target, source = tmp_path / "x.tcb", random.Random(2)
    pack(small.folder, small.key, target, keys.secret if signers == 2 else None)
    if signers:
        generate_key(tmp_path / "stranger")
        add_signature(target, tmp_path / "stranger.key")
    content, bounds = target.read_bytes(), (0, *regions(target))
    assert verify_bundle(target, keys.trusted, allow_unsigned=True).files == len(KINDS)
    for _ in range(120):
        bit = source.randrange(bounds[region] * 8, bounds[region + 1] * 8)
        target.write_bytes(flipped(content, bit))
        check = lambda: verify_bundle(target, keys.trusted, allow_unsigned=True)  # noqa: E731
        outcome_of(check, (IntegrityError,), str(target))


@pytest.mark.parametrize("is_signed", [True, False])
def test_a_thousand_flipped_bits_of_an_unpacked_folder_are_caught_and_their_file_named(
    small: Packed, keys: Keys, is_signed: bool, tmp_path: Path
) -> None:
    folder, bundle = tmp_path / "folder", tmp_path / "x.tcb"
    pack(small.folder, small.key, bundle, keys.secret if is_signed else None)
    unpack(bundle, folder, keys.trusted, allow_unsigned=not is_signed)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"]
    assert len(files) == len(KINDS) + 2, "the files, the manifest and the bundle's record"
    source, seen = random.Random(3), set()
    for number in range(FLIPS if is_signed else FLIPS // 4):
        path = files[number] if number < len(files) else source.choice(files)
        content = path.read_bytes()
        path.write_bytes(flipped(content, source.randrange(len(content) * 8)))
        check = lambda: verify_folder(folder, keys.trusted, allow_unsigned=not is_signed)  # noqa: E731
        outcome_of(check, (IntegrityError,), str(path))
        path.write_bytes(content)
        seen.add(path)
    assert seen == set(files)
    [found] = verify_folder(folder, keys.trusted, allow_unsigned=not is_signed)
    assert found.is_from_bundle and (found.signer is not None) == is_signed


def test_a_folder_that_was_warmed_here_verifies_without_a_key(small: Packed, tmp_path: Path) -> None:
    [found] = verify_folder(small.folder, tmp_path / "no keys")
    assert (found.plan_key, found.signer, found.is_from_bundle) == (small.key, None, False)


@pytest.fixture
def unpacked(small: Packed, keys: Keys, tmp_path: Path) -> Path:
    unpack(small.bundle, tmp_path / "unpacked", keys.trusted)
    return tmp_path / "unpacked"


def test_a_file_that_is_gone_is_named(unpacked: Path, keys: Keys) -> None:
    (unpacked / KINDS[2]).unlink()
    (unpacked / KINDS[5]).unlink()
    with pytest.raises(IntegrityError, match="is missing, and 1 more are damaged"):
        verify_folder(unpacked, keys.trusted)


def test_what_was_signed_counts_and_not_what_the_manifest_says_by_now(unpacked: Path, keys: Keys) -> None:
    """A program replaced, and a manifest made to fit: the record of the bundle knows better."""
    before = (unpacked / KINDS[2]).read_bytes()
    manifest = make_small(unpacked, seed=5)
    assert (unpacked / KINDS[2]).read_bytes() != before
    with pytest.raises(IntegrityError, match="has other bytes"):
        verify_folder(unpacked, keys.trusted)
    (unpacked / "bundles" / f"{key_of(manifest)}.head").unlink()
    assert len(verify_folder(unpacked, keys.trusted)) == 1, "without the record it would be a cache made here"


def test_a_plan_whose_manifest_is_gone_is_missed(unpacked: Path, keys: Keys) -> None:
    (manifest,) = (unpacked / "manifests").iterdir()
    manifest.unlink()
    with pytest.raises(IntegrityError, match=f"the plan {manifest.stem} was unpacked here, and its manifest is gone"):
        verify_folder(unpacked, keys.trusted)


def test_a_manifest_or_a_record_of_another_plan_is_refused(unpacked: Path, small: Packed, keys: Keys) -> None:
    record = unpacked / "bundles" / f"{small.key}.head"
    other = make_small(unpacked, bucket=64)
    shutil.copy(path_of(unpacked, other), unpacked / "manifests" / "0123456789abcdef.json")
    with pytest.raises(IntegrityError, match=r"0123456789abcdef\.json is corrupt: it is of another plan"):
        verify_folder(unpacked, keys.trusted)
    (unpacked / "manifests" / "0123456789abcdef.json").unlink()
    shutil.copy(record, record.with_name(f"{key_of(other)}.head"))
    with pytest.raises(IntegrityError, match=f"{key_of(other)}.head is of another plan"):
        verify_folder(unpacked, keys.trusted)


def test_a_record_that_grew_is_refused(unpacked: Path, small: Packed, keys: Keys) -> None:
    record = unpacked / "bundles" / f"{small.key}.head"
    record.write_bytes(record.read_bytes() + b"x")
    with pytest.raises(IntegrityError, match=f"the record {record} is longer than it was"):
        verify_folder(unpacked, keys.trusted)


def test_a_record_of_a_key_that_is_trusted_no_longer_is_a_matter_of_trust(
    unpacked: Path, keys: Keys, tmp_path: Path
) -> None:
    with pytest.raises(TrustError, match="that is no trusted key"):
        verify_folder(unpacked, tmp_path / "nobody")
    [found] = verify_folder(unpacked, tmp_path / "nobody", allow_unsigned=True)
    assert found.signer is None
    trust("again", keys.public, tmp_path / "nobody")
    [found] = verify_folder(unpacked, tmp_path / "nobody")
    assert found.signer is not None and found.signer.name == "again"


def test_several_plans_of_a_folder_are_verified_each(unpacked: Path, keys: Keys) -> None:
    other = make_small(unpacked, bucket=64)
    found = {one.plan_key: one for one in verify_folder(unpacked, keys.trusted)}
    assert len(found) == 2 and not found[key_of(other)].is_from_bundle


def test_a_start_that_rewrote_the_manifest_does_not_break_the_seal(unpacked: Path, small: Packed, keys: Keys) -> None:
    """Every start writes the manifest anew, with this machine's places in it."""
    write_manifest(path_of(unpacked, small.manifest), small.manifest)
    [found] = verify_folder(unpacked, keys.trusted)
    assert found.signer is not None


def test_a_stranger_that_torch_would_unpickle_is_found(unpacked: Path, small: Packed, keys: Keys) -> None:
    """Beside an entry that is named, under the same key; in another place it is nobody's business."""
    entry = next(name for name in KINDS if name.startswith("aotautograd/"))
    (unpacked / "6n" / "unnamed.py").write_bytes(b"left over")
    assert len(verify_folder(unpacked, keys.trusted)) == 1
    stranger = (unpacked / entry).with_name("stranger")
    stranger.write_bytes(b"cos\nsystem\n")
    with pytest.raises(IntegrityError, match=f"{stranger} is named by no manifest"):
        verify_folder(unpacked, keys.trusted)


def test_what_was_made_here_is_told_beside_who_signed_the_rest(unpacked: Path, small: Packed, keys: Keys) -> None:
    """A start that compiled one program more: the signer did not see it."""
    (unpacked / "6n" / "more.so").write_bytes(b"compiled here")
    files = hash_files(unpacked, [*(file.path for file in small.manifest.files), "6n/more.so"])
    write_manifest(path_of(unpacked, small.manifest), replace(small.manifest, files=files))
    [found] = verify_folder(unpacked, keys.trusted)
    assert found.signer is not None and (found.is_from_bundle, found.files_not_from_bundle) == (True, 1)


def test_bytes_that_another_plan_had_first_are_told_too(unpacked: Path, small: Packed, keys: Keys) -> None:
    other = make_small(unpacked, seed=5, bucket=64)
    files = {file.path: file for file in other.files}
    mine = replace(small.manifest, files=tuple(files[file.path] for file in small.manifest.files))
    write_manifest(path_of(unpacked, small.manifest), mine)
    found = {one.plan_key: one for one in verify_folder(unpacked, keys.trusted)}
    assert found[small.key].files_not_from_bundle > 0 and not found[other.plan["key"]].files_not_from_bundle


def test_what_another_version_left_is_passed_over(unpacked: Path, small: Packed, keys: Keys) -> None:
    (unpacked / "manifests" / ("0" * 16 + ".json")).write_text('{"schema": 3, "plan": {}}')
    assert [one.plan_key for one in verify_folder(unpacked, keys.trusted)] == [small.key]
    assert [entry.plan_key for entry in list_plans(unpacked)] == [small.key]
    assert integrity.read_verified_manifest(str(unpacked), "f" * 16, rebuild=False) is None


def test_a_rebuild_takes_the_record_of_the_bundle_along(unpacked: Path, small: Packed, keys: Keys) -> None:
    (unpacked / KINDS[2]).write_bytes(b"damaged")
    assert integrity.read_verified_manifest(str(unpacked), small.key, rebuild=True) is None
    make_small(unpacked, seed=7)
    [found] = verify_folder(unpacked, keys.trusted)
    assert not found.is_from_bundle


def test_what_is_no_cache_is_a_usage_error(keys: Keys, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no plan that finished warming"):
        verify_folder(tmp_path, keys.trusted)
    with pytest.raises(TcdeployError, match="cannot be read: No such file"):
        verify_bundle(tmp_path / "x.tcb", keys.trusted)


# The command


def test_the_command_says_who_signed_what(
    run_cli: Callable[..., Any], small: Packed, unpacked: Path, keys: Keys
) -> None:
    for target in (small.bundle, unpacked):
        result = run_cli("cache", "verify", str(target), TCDEPLOY_TRUSTED_KEYS=str(keys.trusted))
        assert result.returncode == 0, result.stderr
        assert f"{small.key} someone/model: {len(KINDS)} files" in result.stdout and "signed by ci" in result.stdout
    result = run_cli("cache", "verify", str(unpacked), "--trusted-keys", str(keys.trusted), "--json")
    [plan] = json.loads(result.stdout)["plans"]
    assert (plan["plan_key"], plan["signer"]["name"]) == (small.key, "ci")


def test_the_command_s_exit_codes_tell_damage_from_distrust(
    run_cli: Callable[..., Any], small: Packed, unpacked: Path, keys: Keys, tmp_path: Path
) -> None:
    for target in (small.bundle, unpacked):
        result = run_cli("cache", "verify", str(target))
        assert result.returncode == 4, result.stderr
        assert "no trusted key" in result.stderr and "tcdeploy cache trust NAME FILE.pub" in result.stderr
    (unpacked / KINDS[4]).write_bytes(b"something else")
    (tmp_path / "x.tcb").write_bytes(flipped(small.bundle.read_bytes(), 8 * small.bundle.stat().st_size - 4))
    for target, name in ((tmp_path / "x.tcb", "x.tcb"), (unpacked, KINDS[4])):
        result = run_cli("cache", "verify", str(target), TCDEPLOY_TRUSTED_KEYS=str(keys.trusted))
        assert result.returncode == 5, result.stderr
        assert name in result.stderr and "Traceback" not in result.stderr
