"""Plans and bundles of another version of tcdeploy: not used, not damaged, and each command says so."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.bundle.unpack import check_not_older, unpack
from tcdeploy.cache.folder.layout import manifest_path, stored_header_path
from tcdeploy.cache.folder.leases import acquire_lease
from tcdeploy.cache.inventory import LEFTOVER_AGE_SECONDS, collect_garbage, list_plans, usage_by_kind
from tcdeploy.cache.record.manifest import SCHEMA_VERSION, read_other_versions
from tcdeploy.cache.record.unlisted import unlisted_files
from tcdeploy.cache.staging.folder import create_staging_folder
from tcdeploy.cache.staging.restore import restore_plan
from tcdeploy.errors import MismatchError
from tests.bundle.conftest import Keys, Packed
from tests.bundle.fake_caches import KINDS, contents, key_of, make_cache
from tests.bundle.forging import forge_header, sealed, with_document

SENTENCE = "another version of tcdeploy"
DAY = LEFTOVER_AGE_SECONDS


def make_older(path: Path) -> None:
    """Rewrite a manifest as an earlier version of tcdeploy wrote it."""
    document = {**json.loads(path.read_text()), "schema": SCHEMA_VERSION - 1}
    del document["sha256"]
    path.write_text(sealed(document))


@pytest.fixture
def older(small: Packed, tmp_path: Path) -> Path:
    """A cache folder with a plan of an earlier version."""
    folder = tmp_path / "older"
    shutil.copytree(small.folder, folder)
    make_older(manifest_path(folder, small.key))
    return folder


@pytest.fixture
def older_bundle(small: Packed, keys: Keys, tmp_path: Path) -> Path:
    def change(document: dict[str, Any]) -> None:
        document["manifest"]["schema"] = SCHEMA_VERSION - 1

    return forge_header(
        tmp_path / "older.tcb", with_document(small.manifest, b"payload", change), b"payload", keys.secret
    )


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_a_start_names_the_other_version_and_compiles(
    older: Path, small: Packed, caplog: pytest.LogCaptureFixture
) -> None:
    before = contents(older)
    assert restore_plan(create_staging_folder(str(older)), "f" * 16, rebuild=False) is None
    assert f"{older} was warmed by {SENTENCE} (plans: 1)" in caplog.text
    assert {name: content for name, content in contents(older).items() if not name.startswith(".")} == before


def test_two_versions_share_a_folder(older: Path, small: Packed) -> None:
    assert usage_by_kind(older)["plans of other versions of tcdeploy"][0] == len(KINDS)
    manifest = make_cache(older, seed=1, bucket=64)
    assert [plan.plan_key for plan in list_plans(older)] == [key_of(manifest)] != [small.key]
    assert read_other_versions(older).keys() == {small.key} and unlisted_files(older) == []


@pytest.mark.parametrize(
    ("seconds", "all_unlisted", "is_removed"), [(0, False, False), (DAY + 9, False, True), (0, True, True)]
)
def test_gc_removes_plans_of_other_versions_a_day_after_their_last_start(
    older: Path, small: Packed, seconds: float, all_unlisted: bool, is_removed: bool
) -> None:
    for name in KINDS:
        age(older / name, 2 * DAY)
    age(manifest_path(older, small.key), seconds)
    stored_header_path(older, small.key).parent.mkdir()
    stored_header_path(older, small.key).write_bytes(b"header")
    removed = collect_garbage(older, None, None, all_unlisted=all_unlisted)
    assert removed.plan_keys == ((small.key,) if is_removed else ())
    left = [name for name in KINDS if (older / name).exists()]
    assert left == ([] if is_removed else list(KINDS))
    assert stored_header_path(older, small.key).exists() is not is_removed


def test_gc_keeps_a_plan_that_a_process_of_another_version_uses(older: Path, small: Packed) -> None:
    acquire_lease(str(older), small.key)
    assert collect_garbage(older, None, None, all_unlisted=True).plan_keys == ()
    assert all((older / name).exists() for name in KINDS)


@pytest.mark.parametrize(
    "command",
    [("verify",), ("diff", "{folder}"), ("pack", "-o", "x.tcb"), ("pack", "--plan", "{key}", "-o", "x.tcb"), ("why",)],
)
def test_commands_on_a_folder_name_the_other_version(
    command: tuple[str, ...], older: Path, small: Packed, run_cli: Callable[..., Any]
) -> None:
    name, *rest = (word.format(folder=older, key=small.key) for word in command)
    done = run_cli("cache", name, str(older), *rest)
    assert done.returncode == 3, done.stderr
    [error, hint] = done.stderr.splitlines()
    assert error.startswith("error: ") and SENTENCE in error
    assert "warm again with this version: tcdeploy warm MODEL" in hint


def test_ls_names_the_plans_that_it_does_not_list(older: Path, small: Packed, run_cli: Callable[..., Any]) -> None:
    done = run_cli("cache", "ls", str(older), "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["plans"] == []
    assert SENTENCE in done.stderr and small.key in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("verify",),
        ("unpack", "new"),
        ("unpack", "new", "--any-environment"),
        ("diff", "{other}"),
        ("why",),
        ("push", "."),
    ],
)
def test_commands_on_a_bundle_name_the_other_version(
    command: tuple[str, ...], older_bundle: Path, small: Packed, keys: Keys, run_cli: Callable[..., Any]
) -> None:
    name, *rest = (word.format(other=small.bundle) for word in command)
    done = run_cli("cache", name, str(older_bundle), *rest, TCDEPLOY_TRUSTED_KEYS=str(keys.trusted))
    assert done.returncode == 3, done.stderr
    [error, hint] = done.stderr.splitlines()
    assert error.startswith(f"error: the bundle {older_bundle} was packed by {SENTENCE}")
    assert "pack it again with this version" in hint


def test_a_bundle_of_another_version_may_be_replaced_but_replaces_none(
    older_bundle: Path, small: Packed, keys: Keys, tmp_path: Path
) -> None:
    check_not_older(small.bundle, older_bundle)
    with pytest.raises(MismatchError, match=SENTENCE):
        check_not_older(older_bundle, small.bundle)
    folder = tmp_path / "folder"
    unpack(small.bundle, folder, keys.trusted)
    header = stored_header_path(folder, small.key)
    header.write_bytes(older_bundle.read_bytes().removesuffix(b"payload"))
    unpack(small.bundle, folder, keys.trusted)
    assert header.read_bytes() == small.bundle.read_bytes()[: header.stat().st_size]
