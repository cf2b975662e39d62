"""Bundles that an init container or a server must refuse, made from a good one and stored as `cache push` does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tcdeploy.cache.record.manifest import read_manifests
from tcdeploy.cache.trust.signing import generate_key, read_signed_header, sign, signed_header_bytes
from tcdeploy.planning.environment import parse_environment
from tcdeploy.remote.address import parse_bundle_name
from tcdeploy.remote.transfer import push
from tests.bundle.forging import compressed, forge, member, record, tar
from tests.machines import changed_environment

OTHER_PLAN = "f" * 16


def damage(bundle: Path, store: Path) -> str:
    """Change one byte of the payload. The file name keeps the digest of the undamaged bundle."""
    content = bytearray(bundle.read_bytes())
    content[-1000] ^= 1
    store.mkdir()
    (store / bundle.name).write_bytes(content)
    return str(store / bundle.name)


def sign_with_another_key(bundle: Path, store: Path, folder: Path) -> str:
    """Sign the bundle with a new, untrusted key, which is written to `folder`."""
    generate_key(folder / "unknown")
    with bundle.open("rb") as file:
        signed = read_signed_header(file, str(bundle))
    payload = bundle.read_bytes()[signed.payload_offset :]
    header = signed_header_bytes(signed.header, (sign(signed.header, folder / "unknown.key"),))
    (folder / "unknown.tcb").write_bytes(header + payload)
    return push(folder / "unknown.tcb", str(store), plan_key_of(bundle)).url


def move_to_another_environment(store: Path, cache: Path, secret: Path, **changes: Any) -> str:
    """Rewrite a bundle as if it had been packed in another environment, with another plan key.

    `cache`: a cache folder of one plan with packages. `changes`: see tests.machines.changed_environment.
    """
    [manifest] = read_manifests(cache).values()
    contents = {item.path: (cache / item.path).read_bytes() for item in manifest.files}
    [path] = [path for path in contents if path.startswith("aot/start-") and path.endswith(".json")]
    contents[path] = json.dumps({**json.loads(contents[path]), "plan_key": OTHER_PLAN}).encode()
    environment = changed_environment(parse_environment(manifest.environment), **changes)
    moved = dataclasses.replace(
        manifest, plan={**manifest.plan, "key": OTHER_PLAN}, environment=dataclasses.asdict(environment)
    )
    payload = compressed(tar(*(member(path, content) for path, content in contents.items())))
    forged = forge(secret.with_name("moved.tcb"), payload, moved, [record(*item) for item in contents.items()], secret)
    return push(forged, str(store), OTHER_PLAN).url


def plan_key_of(bundle: Path) -> str:
    name = parse_bundle_name(bundle.name)
    assert name is not None
    return name.plan_key
