"""One made-up cache, one key pair, and the bundle of both, for all tests that leave them as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tcdeploy.bundle.pack import pack
from tcdeploy.bundle.signing import generate_key, trust
from tcdeploy.cache.manifest import Manifest
from tests.bundle.fake_caches import key_of, make_cache, make_small


class Keys(NamedTuple):
    secret: Path
    public: Path
    trusted: Path  # folder that knows the key as "ci"


class Packed(NamedTuple):
    folder: Path
    manifest: Manifest
    bundle: Path

    @property
    def key(self) -> str:
        return key_of(self.manifest)


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    place = tmp_path_factory.mktemp("keys")
    generate_key(place / "ci")
    found = Keys(place / "ci.key", place / "ci.pub", place / "trusted")
    trust("ci", found.public, found.trusted)
    return found


def _packed(place: Path, keys: Keys, make: Callable[[Path], Manifest]) -> Packed:
    manifest = make(place / "cache")
    pack(place / "cache", key_of(manifest), place / "signed.tcb", keys.secret)
    return Packed(place / "cache", manifest, place / "signed.tcb")


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory, keys: Keys) -> Packed:
    return _packed(tmp_path_factory.mktemp("packed"), keys, make_cache)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory, keys: Keys) -> Packed:
    return _packed(tmp_path_factory.mktemp("small"), keys, make_small)
