"""Session fixtures: a key pair and bundles of fake caches. Tests must not modify them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tcdeploy.bundle.pack import pack
from tcdeploy.cache.record.manifest import Manifest
from tcdeploy.cache.trust.signing import generate_key, trust
from tests.bundle.fake_caches import key_of, make_cache, make_small


class Keys(NamedTuple):
    secret: Path
    public: Path
    trusted: Path  # folder of trusted keys; this key is named "ci"


class Packed(NamedTuple):
    folder: Path
    manifest: Manifest
    bundle: Path

    @property
    def key(self) -> str:
        return key_of(self.manifest)


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    folder = tmp_path_factory.mktemp("keys")
    generate_key(folder / "ci")
    pair = Keys(folder / "ci.key", folder / "ci.pub", folder / "trusted")
    trust("ci", pair.public, pair.trusted)
    return pair


def _packed(folder: Path, keys: Keys, make_manifest: Callable[[Path], Manifest]) -> Packed:
    manifest = make_manifest(folder / "cache")
    pack(folder / "cache", key_of(manifest), folder / "signed.tcb", keys.secret)
    return Packed(folder / "cache", manifest, folder / "signed.tcb")


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory, keys: Keys) -> Packed:
    return _packed(tmp_path_factory.mktemp("packed"), keys, make_cache)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory, keys: Keys) -> Packed:
    return _packed(tmp_path_factory.mktemp("small"), keys, make_small)
