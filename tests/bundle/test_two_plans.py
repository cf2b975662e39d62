"""Bundles with the two plans of a model: its jit programs and its packages."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import pytest

from tcdeploy.bundle.pack import WarmStartRequiredError, jit_and_packages, pack, plans_to_pack, warm_start_and_pack
from tcdeploy.bundle.unpack import open_bundle, unpack
from tcdeploy.bundle.verify import packed_manifest, verify_bundle, verify_folder
from tcdeploy.cache.files.records import find_damage, stored_path
from tcdeploy.cache.folder.layout import CONFLICTS_DIR
from tcdeploy.cache.record.bundle_header import header_bytes
from tcdeploy.cache.record.manifest import Manifest, read_manifests, write_manifest
from tcdeploy.cli.cache_target import shared_recipe
from tcdeploy.errors import IntegrityError, TrustError, UsageError
from tcdeploy.planning.plan import make_plan
from tests.bundle.conftest import Keys
from tests.bundle.fake_caches import KINDS, as_installed, fill, key_of, manifest_for, path_of
from tests.bundle.forging import forge_header
from tests.conftest import RunCLI
from tests.machines import LLAMA_8B, make_recipe

SHARED = "triton/AB12/kernel.cubin"
PACKAGE = "aot/0123456789abcdef/step.pt2"


class TwoPlans(NamedTuple):
    folder: Path
    jit: Manifest
    packages: Manifest
    bundle: Path

    @property
    def keys(self) -> list[str]:
        return [key_of(self.jit), key_of(self.packages)]


def with_packages(folder: Path, jit: Manifest, names: list[str]) -> Manifest:
    """The manifest of the same request with packages."""
    recipe = make_recipe(context=4096, buckets=(32,), batch_sizes=(1,), cache_dir=str(folder), programs="aot")
    plan = make_plan(recipe, as_installed(), LLAMA_8B)
    files = manifest_for(folder, names).files
    return replace(jit, plan=asdict(plan), origin=replace(jit.origin, recipe=asdict(recipe)), files=files)


@pytest.fixture
def two(tmp_path: Path, keys: Keys) -> TwoPlans:
    folder = tmp_path / "cache"
    names = fill(folder, {name: 100 + number for number, name in enumerate(KINDS)})
    jit = manifest_for(folder, names)
    packages = with_packages(folder, jit, [*fill(folder, {PACKAGE: 700}, seed=1), SHARED])
    for manifest in (jit, packages):
        write_manifest(path_of(folder, manifest), manifest)
    bundle = tmp_path / "two.tcb"
    pack(folder, key_of(jit), bundle, keys.secret, other_plans=[key_of(packages)])
    return TwoPlans(folder, jit, packages, bundle)


def test_a_bundle_holds_both_plans_and_a_shared_file_once(two: TwoPlans, keys: Keys) -> None:
    header = open_bundle(two.bundle, keys.trusted).header
    assert list(header.manifests) == two.keys and header.plan_key == two.keys[0]
    paths = [file.path for file in header.payload_files]
    assert paths.count(SHARED) == 1 and PACKAGE in paths and len(paths) == len(KINDS) + 1
    assert [plan.plan_key for plan in verify_bundle(two.bundle, keys.trusted)] == two.keys


def test_both_plans_are_unpacked_and_each_start_checks_its_own_files(two: TwoPlans, keys: Keys, tmp_path: Path) -> None:
    target = tmp_path / "target"
    unpacked = unpack(two.bundle, target, keys.trusted)
    assert (unpacked.plan_key, unpacked.other_plans) == (two.keys[0], (two.keys[1],))
    assert list(read_manifests(target)) == sorted(two.keys)
    plans = {plan.plan_key: plan for plan in verify_folder(target, keys.trusted, require_signed=True)}
    assert plans[two.keys[1]].files == 2 and all(plan.signer is not None for plan in plans.values())
    assert [packed_manifest(target, key).plan["key"] for key in two.keys] == two.keys
    assert unpack(two.bundle, target, keys.trusted).already_present
    (target / PACKAGE).write_bytes(b"damaged")
    with pytest.raises(IntegrityError, match=PACKAGE):
        verify_folder(target, keys.trusted)


def test_plans_may_have_different_files_with_one_path(two: TwoPlans, keys: Keys, tmp_path: Path) -> None:
    """As after a start whose file another plan's file occupies: it is stored below CONFLICTS_DIR."""
    content = b"of the packages"
    (two.folder / CONFLICTS_DIR).mkdir()
    other = tmp_path / "other"
    (other / SHARED).parent.mkdir(parents=True)
    (other / SHARED).write_bytes(content)
    (changed,) = manifest_for(other, [SHARED]).files
    (two.folder / CONFLICTS_DIR / changed.sha256).write_bytes(content)
    files = tuple(changed if file.path == SHARED else file for file in two.packages.files)
    packages = replace(two.packages, files=files)
    write_manifest(path_of(two.folder, packages), packages)
    pack(two.folder, two.keys[0], two.bundle, keys.secret, other_plans=two.keys[1:])
    assert verify_bundle(two.bundle, keys.trusted)
    target = tmp_path / "target"
    unpack(two.bundle, target, keys.trusted)
    for manifest in (two.jit, packages):
        assert not find_damage(target, manifest.files)
    assert (target / stored_path(target, changed)).read_bytes() == content


def test_one_plan_is_packed_to_the_same_bytes_as_before(two: TwoPlans, tmp_path: Path, keys: Keys) -> None:
    """Bundles of one plan have no key that earlier versions do not know."""
    pack(two.folder, two.keys[0], tmp_path / "one.tcb", keys.secret)
    header = open_bundle(tmp_path / "one.tcb", keys.trusted).header
    assert json.loads(header_bytes(header)).keys() == {"payload", "manifest"}


def test_the_signature_covers_the_second_plan(two: TwoPlans, keys: Keys, tmp_path: Path) -> None:
    header = open_bundle(two.bundle, keys.trusted).header
    document = json.loads(header_bytes(header))
    document["other_manifests"] *= 2
    payload = open_bundle(two.bundle, keys.trusted).signed_header.payload_offset
    content = two.bundle.read_bytes()[payload:]
    forge_header(two.bundle, json.dumps(document).encode(), content, keys.secret)
    with pytest.raises(IntegrityError, match="lists a plan twice"):
        open_bundle(two.bundle, keys.trusted)
    del document["other_manifests"]
    forge_header(two.bundle, json.dumps(document).encode(), content, None)
    with pytest.raises(TrustError):
        unpack(two.bundle, tmp_path / "target", keys.trusted)
    assert not (tmp_path / "target").exists()


def test_a_folder_with_the_two_plans_of_a_model_is_packed_without_choosing_one(two: TwoPlans) -> None:
    assert plans_to_pack(two.folder) == two.keys
    recipe = shared_recipe(list(read_manifests(two.folder).values()))
    assert recipe is not None and (recipe["programs"], recipe["buckets"]) == ("auto", [32]), "of `cache why`"
    third = manifest_for(two.folder, [SHARED], bucket=64)
    assert jit_and_packages([third, two.packages]) is None, "another request"
    write_manifest(path_of(two.folder, third), third)
    with pytest.raises(UsageError, match="3 plans"):
        plans_to_pack(two.folder)


def test_a_damaged_manifest_of_one_of_the_two_is_named(two: TwoPlans) -> None:
    path_of(two.folder, two.packages).write_text("")
    with pytest.raises(IntegrityError, match=key_of(two.packages)):
        plans_to_pack(two.folder)


def test_each_plan_that_compiled_is_started_once_more(
    two: TwoPlans, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missed = replace(two.packages, is_first_start=False)
    write_manifest(path_of(two.folder, missed), missed)
    with pytest.raises(WarmStartRequiredError):
        pack(two.folder, two.keys[0], tmp_path / "x.tcb", other_plans=two.keys[1:])
    started: list[str] = []

    def start(folder: Path, key: str) -> None:
        started.append(key)
        write_manifest(path_of(folder, two.packages), two.packages)

    monkeypatch.setattr("tcdeploy.bundle.pack.run_warm_start", start)
    assert warm_start_and_pack(two.folder, two.keys, tmp_path / "x.tcb").other_plans == (two.keys[1],)
    assert started == [two.keys[1]]


def test_the_command_line_names_both_plans(two: TwoPlans, keys: Keys, tmp_path: Path, run_cli: RunCLI) -> None:
    target = str(tmp_path / "target")
    for arguments in (
        ("cache", "pack", str(two.folder), "-o", str(tmp_path / "again.tcb")),
        ("cache", "unpack", str(two.bundle), target, "--trusted-keys", str(keys.trusted)),
    ):
        done = run_cli(*arguments)
        assert done.returncode == 0, done.stderr
        assert f"plans {', '.join(two.keys)}" in done.stdout
    listed = json.loads(run_cli("cache", "ls", target, "--json").stdout)["plans"]
    assert {plan["plan_key"]: plan["programs"] for plan in listed} == dict(zip(two.keys, ("jit", "aot"), strict=True))
