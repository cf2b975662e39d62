"""Packs a plan of a warmed cache folder into a bundle, or the two plans of a model with jit programs and with packages.

A bundle holds the files that the plan's last start used, and that start must have compiled nothing: then the list of
files is complete, and it excludes the variants that lost in tuning. If the last start compiled something,
`warm_start_and_pack` starts the plan once more in a subprocess.

The header contains the time at which the plan was last compiled (`compiled_at` of the manifest), so that `unpack` can
refuse a bundle that is older than the one that the folder has. The time of packing is not used, because packing a
folder twice must give the same bytes, and because repacking must not make an old cache newer. SOURCE_DATE_EPOCH
replaces the date, as in other reproducible builds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tcdeploy.bundle.container import check_free_space, replace_signatures, write_bundle
from tcdeploy.cache.files.records import find_damage
from tcdeploy.cache.folder.layout import manifest_path, plan_keys
from tcdeploy.cache.folder.leases import folder_lock
from tcdeploy.cache.record.bundle_header import Header, Payload, header_bytes, make_portable
from tcdeploy.cache.record.manifest import (
    Manifest,
    no_plan_error,
    read_manifest,
    read_manifests,
    read_other_versions,
)
from tcdeploy.cache.record.provenance import check_manifest, read_stored_bundle
from tcdeploy.cache.trust.signing import default_trusted_keys_folder, read_bundle_header, sign, signed_header_bytes
from tcdeploy.errors import IntegrityError, SpaceError, TcdeployError, ThresholdError, UsageError
from tcdeploy.host.regular_file import DISK_FULL
from tcdeploy.planning.plan import IGNORED_PLAN_FIELDS
from tcdeploy.remote.address import unreadable_bundle_error
from tcdeploy.start.package_build import warm_command


class WarmStartRequiredError(TcdeployError):
    """The plan's last start compiled something, so its list of files is not final."""


@dataclass(frozen=True)
class PackResult:
    path: Path
    plan_key: str
    files: int
    unpacked_bytes: int
    packed_bytes: int
    header_bytes: int
    other_plans: tuple[str, ...] = ()


def pack(
    folder: Path, plan_key: str, target: Path, secret_key: Path | None = None, trusted_keys: Path | None = None,
    other_plans: Sequence[str] = (),
) -> PackResult:  # fmt: skip
    """Write the bundle of a plan, and of `other_plans`, atomically, signed if `secret_key` is given.

    `trusted_keys`: the folder of trusted public keys, for a plan that was unpacked from a bundle; None: the default.

    Raises UsageError (no such plan), MismatchError (it is of another version of tcdeploy), WarmStartRequiredError,
    IntegrityError (damaged or empty files, or files that differ from the bundle that the plan was unpacked from),
    TrustError (that bundle's signature is invalid) and SpaceError.
    """
    trusted_keys = trusted_keys or default_trusted_keys_folder()
    manifests = [_packable_manifest(folder, key, trusted_keys) for key in (plan_key, *other_plans)]
    manifest, *others = map(make_portable, manifests)
    header = Header(manifest, Payload(0, ""), tuple(others))
    files = header.payload_files
    unpacked_bytes = sum(file.bytes for file in files)
    with _translate_os_errors(target):
        # Payload and bundle exist side by side for a moment, both at most that large.
        check_free_space(target.parent, 2 * unpacked_bytes, "packing may need")
        # A folder that cannot be written needs no lock: nothing removes files from it.
        with folder_lock(folder) if os.access(folder, os.W_OK) else contextlib.nullcontext():
            payload = write_bundle(
                target, folder, files, lambda payload: _make_signed_header(replace(header, payload=payload), secret_key)
            )
    packed_bytes = target.stat().st_size
    return PackResult(
        target, plan_key, len(files), unpacked_bytes, packed_bytes, packed_bytes - payload.bytes, tuple(other_plans)
    )


def warm_start_and_pack(
    folder: Path, plan_keys: Sequence[str], target: Path, secret_key: Path | None = None
) -> PackResult:
    """`pack`, preceded by a warm start of each plan whose last start compiled something.

    The bundle is named after the first plan. Raises what `pack` raises, and ThresholdError if a warm start fails or
    compiles.
    """
    plan_key, *other_plans = plan_keys
    try:
        return pack(folder, plan_key, target, secret_key, other_plans=other_plans)
    except WarmStartRequiredError:
        for key in plan_keys:
            manifest = read_manifest(manifest_path(folder, key))
            if manifest is not None and not manifest.was_warm:
                run_warm_start(folder, key)
        return pack(folder, plan_key, target, secret_key, other_plans=other_plans)


def run_warm_start(folder: Path, plan_key: str) -> None:
    """Start the plan in a subprocess in which every bucket must be a cache hit. Raises ThresholdError."""
    manifest = read_manifest(manifest_path(folder, plan_key))
    assert manifest is not None
    settings = {name: value for name, value in manifest.origin.recipe.items() if value is not None}
    for name in ("require_signed", "compile"):  # the start may compile files that an earlier one did not use
        settings.pop(name, None)
    with warm_command({**settings, "cache_dir": str(folder.absolute())}, "--require-hit") as (command, environ):
        completed = subprocess.run(command, env=environ, stdout=subprocess.DEVNULL)
    if completed.returncode:
        raise ThresholdError(
            f"the warm start of plan {plan_key} before packing exited with code {completed.returncode}",
            f"run it with the plan's flags and read its report: tcdeploy warm MODEL --cache-dir {folder} --require-hit",
        )


def _with_source_date(manifest: Manifest) -> Manifest:
    """Raises UsageError for an invalid SOURCE_DATE_EPOCH."""
    text = os.environ.get("SOURCE_DATE_EPOCH", "")
    if text and not re.fullmatch("[0-9]{1,18}", text):
        raise UsageError(
            f"SOURCE_DATE_EPOCH is {text!r}; it must be a number of seconds since 1970",
            "unset it, or set it to a number",
        )
    return dataclasses.replace(manifest, compiled_at=int(text)) if text else manifest


def _make_signed_header(header: Header, secret_key: Path | None) -> bytes:
    content = header_bytes(header)
    return signed_header_bytes(content, (sign(content, secret_key),) if secret_key is not None else ())


def plans_to_pack(folder: Path) -> list[str]:
    """The folder's only plan; or both plans of a model, as `tcdeploy warm` leaves them. Else as `single_plan_key`.

    Raises IntegrityError for a damaged manifest, because its plan might be one of the two.
    """
    pair = jit_and_packages(read_manifests(folder).values())
    return [single_plan_key(folder)] if pair is None else [str(manifest.plan["key"]) for manifest in pair]


def jit_and_packages(manifests: Iterable[Manifest]) -> tuple[Manifest, Manifest] | None:
    """The two plans of one model that differ only in `--programs`, jit first; None if these are other plans."""
    by_kind = sorted(manifests, key=lambda manifest: str(manifest.plan.get("programs")), reverse=True)
    if [manifest.plan.get("programs") for manifest in by_kind] != ["jit", "aot"]:
        return None
    jit, packages = by_kind
    is_same = jit.plan["model"] == packages.plan["model"] and jit.origin.model_config == packages.origin.model_config
    return (jit, packages) if is_same and _program_fields(jit) == _program_fields(packages) else None


def _program_fields(manifest: Manifest) -> dict[str, Any]:
    ignored = IGNORED_PLAN_FIELDS | {"programs"}
    return {name: value for name, value in manifest.plan.items() if name not in ignored}


def single_plan_key(folder: Path) -> str:
    """The key of the folder's only plan. Raises UsageError if it has several (the hint lists them), or none.

    Raises MismatchError if it has only plans of other versions of tcdeploy.
    """
    keys = sorted(plan_keys(folder) - read_other_versions(folder).keys())
    if len(keys) == 1:
        return keys[0]
    if not keys:
        raise no_plan_error(folder)
    raise UsageError(f"the folder {folder} holds {len(keys)} plans", f"choose one: --plan {' or '.join(keys)}")


def add_signature(path: Path, secret_key: Path) -> None:
    """Add a signature to a bundle. An earlier signature of the same key is replaced; those of other keys stay."""
    try:
        signed_header = read_bundle_header(path)
    except OSError as error:
        raise unreadable_bundle_error(path, error) from error
    with _translate_os_errors(path):
        added = sign(signed_header.header, secret_key)
        others = tuple(signature for signature in signed_header.signatures if signature.key != added.key)
        replace_signatures(path, signed_header, (*others, added))


@contextlib.contextmanager
def _translate_os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise SpaceError(
                f"the disk is full, the bundle {path} was not written", "free some space, or choose another disk"
            ) from error
        raise TcdeployError(
            f"the bundle {path} cannot be written: {error.strerror}", "choose a path in an existing, writable folder"
        ) from error


def _packable_manifest(folder: Path, plan_key: str, trusted_keys: Path) -> Manifest:
    """The manifest of a plan whose files are complete and intact. Raises what `pack` raises."""
    manifest = read_manifest(manifest_path(folder, plan_key))
    if manifest is None:
        raise no_plan_error(folder, plan_key)
    check_manifest(folder, plan_key, manifest, read_stored_bundle(folder, plan_key, trusted_keys))
    _check_packable(folder, manifest)
    return _with_source_date(manifest)


def _check_packable(folder: Path, manifest: Manifest) -> None:
    if damage := find_damage(folder, manifest.files):
        raise IntegrityError(
            f"{folder / damage[0].path} {damage[0].reason}",
            f"discard it and compile again: tcdeploy warm MODEL --cache-dir {folder} --on-bad-cache rebuild",
        )
    if empty := [file.path for file in manifest.files if not file.bytes]:
        raise IntegrityError(
            f"{folder / empty[0]} is empty; a start that was killed left it",
            f"delete it, then warm again: tcdeploy warm MODEL --cache-dir {folder}",
        )
    if manifest.has_run and not manifest.was_warm:  # a build without the GPU lists what it has made
        raise WarmStartRequiredError(
            f"the last start of plan {manifest.plan['key']} compiled programs, so its list of files is not final",
            f"start it once more: tcdeploy warm MODEL --cache-dir {folder} --require-hit",
        )
