"""Where the files of a plan come from: a signed bundle, or this machine.

When a bundle is unpacked, its header and signatures are stored in bundles/KEY.head. Each start rewrites the manifest of
its plan, and anyone with write access to the folder can change a manifest. The header cannot be changed without the
signer's key. Each start and `cache verify` therefore require that the plan's manifest lists every file of the header
with the header's size and sha256. Files in the manifest that are not in the header were compiled on this machine.

A plan whose header was deleted looks like a plan that was compiled on this machine. `--require-signed` refuses both.

Start records decide which plan is started, so they are read before the plan's other files are verified: only those that
a manifest lists, after this check, and after their size and sha256 are compared. Does not import torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tcdeploy.cache.files.records import FileRecord, is_plain_record, read_checked, stored_path
from tcdeploy.cache.folder.layout import manifest_path, plan_keys, stored_header_path
from tcdeploy.cache.record.bundle_header import CheckedHeader, parse_header
from tcdeploy.cache.record.manifest import Manifest, read_manifest
from tcdeploy.cache.trust.ownership import check_no_links
from tcdeploy.cache.trust.signing import SignedHeader, read_signed_header, verify_signature
from tcdeploy.errors import IntegrityError, TrustError
from tcdeploy.host.regular_file import MAX_DOCUMENT_BYTES, open_regular

DAMAGE_HINT = "nothing was loaded; to discard the plan and compile again: --on-bad-cache rebuild"


@dataclass(frozen=True)
class SigningPolicy:
    """`trusted_keys` is the folder of trusted public keys. `require_signed`: use only files of bundles they signed."""

    trusted_keys: Path
    require_signed: bool = False


class ListedFile(NamedTuple):
    """A file with exactly the bytes that the manifest of its plan lists."""

    manifest: Manifest
    path: str  # in the cache folder
    content: bytes

    @property
    def plan_key(self) -> str:
        return str(self.manifest.plan["key"])


class ListedFiles(NamedTuple):
    """`problems`: of plans that list such files, but whose manifest, signature or file is damaged."""

    files: list[ListedFile]
    problems: list[IntegrityError | TrustError]


def read_stored_bundle(
    folder: str | Path, plan_key: str, trusted_keys: Path, allow_unsigned: bool = True
) -> CheckedHeader | None:
    """The stored header of a plan; None if the plan is not from a bundle.

    Raises IntegrityError for a damaged header, and TrustError if a trusted key's signature does not match it, or if no
    trusted key signed it and `allow_unsigned` is false. If the package `cryptography` is not installed and
    `allow_unsigned` is true, the signatures are not checked and `signer` is None.
    """
    signed_header = read_stored_header(folder, plan_key)
    if signed_header is None:
        return None
    name = str(stored_header_path(folder, plan_key))
    signer = None
    if importlib.util.find_spec("cryptography") or not allow_unsigned:
        signer = verify_signature(signed_header, name, trusted_keys, allow_unsigned)
    header = parse_header(signed_header, name)
    if plan_key not in header.manifests:
        raise IntegrityError(f"the stored header {name} belongs to plan {header.plan_key}", "unpack the bundle again")
    return CheckedHeader(header.of_plan(plan_key), signed_header, signer)


def read_stored_header(folder: str | Path, plan_key: str) -> SignedHeader | None:
    """The frames of a stored header, unverified. Raises IntegrityError, and TrustError for a symbolic link."""
    path = stored_header_path(folder, plan_key)
    check_no_links(folder, [path.relative_to(folder).as_posix()])
    try:
        with open_regular(path) as file:
            signed_header = read_signed_header(file, str(path))
            if file.read(1):
                raise IntegrityError(f"the stored header {path} has trailing bytes", "unpack the bundle again")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise IntegrityError(
            f"the stored header {path} cannot be read: {error.strerror}", "unpack the bundle again"
        ) from error
    return signed_header


def check_manifest(folder: str | Path, key: str, manifest: Manifest, bundle: CheckedHeader | None) -> None:
    """Check a manifest, and that it lists every file of `bundle` with the bundle's size and sha256.

    Raises IntegrityError if it does not, if the manifest belongs to another plan, or if it lists a file twice or
    outside of the folder. Raises TrustError if the manifest is a symbolic link.
    """
    check_no_links(folder, [manifest_path("", key).as_posix()])
    if manifest.plan["key"] != key:
        raise _manifest_error(folder, key, f"is corrupt: it belongs to plan {manifest.plan['key']!r:.50}")
    listed = {file.path: file for file in manifest.files if is_plain_record(file)}
    if len(listed) != len(manifest.files):
        raise _manifest_error(folder, key, "lists an invalid or duplicate file")
    for file in bundle.files if bundle is not None else ():
        if listed.get(file.path) != file:
            raise _manifest_error(folder, key, f"does not list {file.path} with the size and sha256 of its bundle")


def check_manifests(
    folder: str, plan_key: str, manifests: Mapping[str, Manifest], policy: SigningPolicy
) -> CheckedHeader | None:
    """Check the manifests whose files a start would use, and return the bundle of `plan_key`; None if it has none.

    Raises IntegrityError, and TrustError for an invalid signature. With `policy.require_signed`, also raises TrustError
    if a file of `plan_key` is not from a signed bundle.
    """
    bundles = {key: read_stored_bundle(folder, key, policy.trusted_keys) for key in manifests}
    for key, manifest in manifests.items():
        check_manifest(folder, key, manifest, bundles[key])
    bundle = bundles.get(plan_key)
    if policy.require_signed:
        if bundle is None or bundle.signer is None:
            raise TrustError(
                f"plan {plan_key} in {folder} is not from a bundle that a trusted key signed",
                "--require-signed needs such a bundle: tcdeploy cache unpack FILE.tcb FOLDER, or --cache-from URL; "
                "to trust its key: tcdeploy cache trust NAME FILE.pub",
            )
        require_bundled(plan_key, manifests[plan_key].files, bundle)
    return bundle


def require_bundled(plan_key: str, files: Iterable[FileRecord], bundle: CheckedHeader) -> None:
    """Raise TrustError if one of the plan's files is not in the bundle."""
    if made_here := files_made_here(files, bundle):
        raise TrustError(
            f"{len(made_here)} files of plan {plan_key} were compiled on this machine, for example {made_here[0]}",
            "--require-signed uses only files of a signed bundle; to discard the others, unpack the bundle again: "
            "tcdeploy cache unpack FILE.tcb FOLDER --allow-rollback",
        )


def files_made_here(files: Iterable[FileRecord], bundle: CheckedHeader) -> list[str]:
    """The paths of the files that the bundle does not list: they were compiled on this machine."""
    signed = set(bundle.files)
    return [file.path for file in files if file not in signed]


def has_bundle_changed(folder: str, plan_key: str, bundle: CheckedHeader | None) -> bool:
    """Whether another process has unpacked or discarded the plan since `bundle` was read."""
    stored = read_stored_header(folder, plan_key)
    return stored != (None if bundle is None else bundle.signed_header)


def _manifest_error(folder: str | Path, plan_key: str, reason: str) -> IntegrityError:
    return IntegrityError(
        f"the manifest {manifest_path(folder, plan_key)} {reason}",
        f"nothing was loaded; unpack the bundle again: tcdeploy cache unpack FILE.tcb {folder}; or discard the plan "
        "and compile: --on-bad-cache rebuild",
    )


def read_listed(folder: str | Path, prefix: str, suffix: str, policy: SigningPolicy) -> ListedFiles:
    """The files with these paths in the cache folder, newest first. Manifests that do not name `prefix` are skipped."""
    dated_files: list[tuple[float, str, ListedFile]] = []
    problems: list[IntegrityError | TrustError] = []
    for key in sorted(plan_keys(folder)):
        try:
            manifest = None
            with contextlib.suppress(OSError):
                manifest = read_manifest(manifest_path(folder, key), containing=prefix)
            files = [file for file in manifest.files if file.path.startswith(prefix)] if manifest is not None else []
            if manifest is None or not files:
                continue
            check_manifests(str(folder), key, {key: manifest}, policy)
            for file in files:
                if file.path.endswith(suffix):
                    listed = ListedFile(manifest, file.path, _read(Path(folder), file))
                    dated_files.append((_modification_time(folder, file), f"{key} {file.path}", listed))
        except (IntegrityError, TrustError) as problem:
            problems.append(problem)
    return ListedFiles(
        [listed for *_, listed in sorted(dated_files, key=lambda item: item[:2], reverse=True)], problems
    )


def _modification_time(folder: str | Path, file: FileRecord) -> float:
    with contextlib.suppress(OSError):
        return Path(folder, stored_path(folder, file)).lstat().st_mtime
    return 0.0


def _read(folder: Path, file: FileRecord) -> bytes:
    """Raises IntegrityError if the file is damaged, or too large to be read at once."""
    reason, chunks = f"has {file.bytes} bytes, and the limit is {MAX_DOCUMENT_BYTES}", list[bytes]()
    if file.bytes <= MAX_DOCUMENT_BYTES:
        damage = read_checked(folder, file, chunks.append)
        if damage is None:
            return b"".join(chunks)
        reason = damage.reason
    raise IntegrityError(f"the cache is damaged: {folder / file.path} {reason}", DAMAGE_HINT)
