"""From a warmed cache folder to one file, for one plan.

What is packed is what the last start used, and that start must have compiled nothing: its list of files is complete,
because it was enough, and holds nothing of the candidates that lost. A folder that was warmed but never started again
is not packed yet; `warm_start_and_pack` starts it once more, in a process of its own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from tcdeploy.bundle.container import Payload, read_signed_header, replace_signatures, signed_header_bytes, write_bundle
from tcdeploy.bundle.header import Header, header_bytes, make_portable
from tcdeploy.bundle.signing import sign
from tcdeploy.cache.contents import find_damage
from tcdeploy.cache.leases import folder_lock
from tcdeploy.cache.manifest import MANIFESTS_DIR, Manifest, manifest_path, read_manifest
from tcdeploy.errors import IntegrityError, SpaceError, TcdeployError, ThresholdError, UsageError
from tcdeploy.planning.recipe import ENVIRONMENT_PREFIX


class WarmStartRequiredError(TcdeployError):
    """The plan is warm, and no start has shown yet which files are enough."""


@dataclass(frozen=True)
class PackResult:
    path: Path
    plan_key: str
    files: int
    unpacked_bytes: int
    packed_bytes: int
    header_bytes: int


def pack(folder: Path, plan_key: str, target: Path, key: Path | None = None) -> PackResult:
    """Write the bundle of a plan, signed if a key is given; it appears whole or not at all.

    Raises UsageError (no such plan), WarmStartRequiredError, IntegrityError (damaged or empty files) and SpaceError.
    """
    manifest = read_manifest(manifest_path(folder, plan_key))
    if manifest is None:
        raise UsageError(
            f"the folder {folder} knows no plan {plan_key}: what did not finish warming is not packed",
            "tcdeploy warm finishes it; tcdeploy cache ls shows what is there",
        )
    _check_packable(folder, manifest)
    with _translate_os_errors(target):
        _check_free_space(target, manifest)
        with (
            folder_lock(folder) if os.access(folder, os.W_OK) else contextlib.nullcontext()
        ):  # else nobody removes from it
            payload = write_bundle(
                target, folder, manifest.files, lambda payload: _make_signed_header(manifest, payload, key)
            )
    unpacked, packed = sum(file.bytes for file in manifest.files), target.stat().st_size
    return PackResult(target, plan_key, len(manifest.files), unpacked, packed, packed - payload.bytes)


def warm_start_and_pack(folder: Path, plan_key: str, target: Path, key: Path | None = None) -> PackResult:
    """`pack`, after a start that compiles nothing where none was yet. Raises ThresholdError too, if that one does."""
    try:
        return pack(folder, plan_key, target, key)
    except WarmStartRequiredError:
        run_warm_start(folder, plan_key)
        return pack(folder, plan_key, target, key)


def run_warm_start(folder: Path, plan_key: str) -> None:
    """Start the plan from the folder in a process of its own, which must find every bucket. Raises ThresholdError."""
    manifest = read_manifest(manifest_path(folder, plan_key))
    assert manifest is not None
    asked = {name: value for name, value in manifest.origin.recipe.items() if value is not None}
    with tempfile.TemporaryDirectory() as place:
        recipe = Path(place, "asked.yaml")
        recipe.write_text(yaml.safe_dump({**asked, "cache_dir": str(folder.absolute())}), encoding="utf-8")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
        command = [sys.executable, "-m", "tcdeploy", "warm", "--recipe", str(recipe), "--require-hit"]
        done = subprocess.run(command, env=environ, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise ThresholdError(
            f"a second start of the plan {plan_key} ended with {done.returncode}: what is not a hit is not packed",
            "tcdeploy warm with the same flags tells why",
        )


def _make_signed_header(manifest: Manifest, payload: Payload, key: Path | None) -> bytes:
    header = header_bytes(Header(make_portable(manifest), payload))
    return signed_header_bytes(header, (sign(header, key),) if key is not None else ())


def single_plan_key(folder: Path) -> str:
    """The folder's plan, where it has one. Raises UsageError that names them where it has several, or none."""
    keys = [path.stem for path in sorted((folder / MANIFESTS_DIR).glob("*.json"))]
    if len(keys) == 1:
        return keys[0]
    if not keys:
        raise UsageError(f"the folder {folder} holds no plan that finished warming", "tcdeploy warm MODEL --cache-dir")
    raise UsageError(f"the folder {folder} holds {len(keys)} plans", f"name one: --plan {' or '.join(keys)}")


def add_signature(path: Path, key: Path) -> None:
    """Sign a bundle in its place; one more signature beside those it has, and none twice."""
    with _translate_os_errors(path):
        with open(path, "rb") as file:
            signed_header = read_signed_header(file, str(path))
        mine = sign(signed_header.header, key)
        others = tuple(one for one in signed_header.signatures if one.key != mine.key)
        replace_signatures(path, signed_header, (*others, mine))


@contextlib.contextmanager
def _translate_os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SpaceError(f"no room for the bundle {path}", "free some room, or name another place") from error
        raise TcdeployError(f"the bundle {path} cannot be written: {error.strerror}", "name another place") from error


def _check_packable(folder: Path, manifest: Manifest) -> None:
    if damage := find_damage(folder, manifest.files):
        raise IntegrityError(
            f"{folder / damage[0].path} {damage[0].reason}", "--on-bad-cache rebuild discards it and compiles again"
        )
    if empty := [file.path for file in manifest.files if not file.bytes]:
        raise IntegrityError(f"{folder / empty[0]} is empty: a start that was killed left it", "warm again without it")
    if not manifest.was_warm:
        raise WarmStartRequiredError(
            "the last start of this plan compiled something: which files a start needs is not proven yet",
            "run the same tcdeploy warm again, with --require-hit",
        )


def _check_free_space(target: Path, manifest: Manifest) -> None:
    """Twice the files, generous: they are packed beside the bundle before they are behind its header."""
    free = shutil.disk_usage(target.parent).free
    needed = 2 * sum(file.bytes for file in manifest.files)
    if free < needed:
        raise SpaceError(f"packing may need {needed} bytes in {target.parent}, and {free} are free", "free some room")
