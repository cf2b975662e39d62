"""Checks of the cache folder: whether a start may use it, what it holds, what fits this machine. Changes nothing."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from tcdeploy.cache.folder.access import check_folder, folder_error, write_test_file
from tcdeploy.cache.folder.layout import MANIFESTS_DIR, UNPACKING_PREFIX
from tcdeploy.cache.folder.leases import is_folder_locked
from tcdeploy.cache.record.manifest import Manifest, read_manifest
from tcdeploy.cache.staging.journal import abandoned_folders
from tcdeploy.doctor.host import existing_parent, is_noexec
from tcdeploy.doctor.result import Request, Result, blocking, note, ok, unchecked
from tcdeploy.errors import IntegrityError, TcdeployError
from tcdeploy.planning.environment import Difference, Environment, diff_environments, diff_mappings, parse_environment
from tcdeploy.planning.memory import gib

CHOOSE = "choose a writable folder: --cache-dir DIR, or TCDEPLOY_CACHE_DIR=DIR"
MAX_NAMED = 3  # plans, or differences of a plan


def check_cache_folder(request: Request) -> Result:
    """Owner, mode and writability, by the same rules as a start."""
    folder = request.cache_folder
    if folder.startswith("~"):
        reason = "because HOME is not set and this user has no home folder"
        return blocking(f"the cache folder would be {folder}, {reason}", CHOOSE)
    if os.path.lexists(folder) and not os.path.isdir(folder):
        return blocking(f"the cache folder {folder} is not a folder", CHOOSE)
    try:
        check_folder(folder, request.is_trusted)
    except TcdeployError as error:
        return blocking(error.message, error.hint)
    try:
        write_test_file(existing_parent(folder))
    except OSError as error:
        problem = folder_error(folder, error)
        if any(Path(folder, MANIFESTS_DIR).glob("*.json")):
            return note(f"{problem.message}; starts use a private copy of their plan in the temporary folder")
        return blocking(problem.message, problem.hint)
    if is_noexec(str(existing_parent(folder))):
        return blocking(
            f"the cache folder {folder} is mounted with noexec, and a start loads libraries from there",
            "choose a folder on another disk: --cache-dir DIR, or TCDEPLOY_CACHE_DIR=DIR",
        )
    if not os.path.isdir(folder):
        return note(f"{folder} does not exist yet; the first start creates it")
    files, size, status = *_measure(folder), os.stat(folder)
    return ok(f"{folder}, {files} files, {gib(size)}, owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}")


def _measure(folder: str | Path) -> tuple[int, int]:
    """(number, bytes) of the files below. The bytes of files that disappear meanwhile do not count."""
    paths = [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]
    total = 0
    for path in paths:
        with contextlib.suppress(OSError):
            total += path.lstat().st_size
    return len(paths), total


def check_plans(request: Request) -> Result | list[Result]:
    """Whether the manifests are intact, and which plans were made on a machine like this."""
    folder = request.cache_folder
    manifests, results, other_schema = [], [], 0
    for path in sorted(Path(folder, MANIFESTS_DIR).glob("*.json")):
        try:
            manifest = read_manifest(path)
        except IntegrityError as error:
            cure = f"start its plan with --on-bad-cache rebuild, or remove it: rm {path}"
            results.append(blocking(error.message, cure))
        except OSError as error:
            results.append(blocking(f"{path} cannot be read: {error.strerror}", f"make it readable: chmod u+r {path}"))
        else:
            manifests += [manifest] if manifest is not None else []
            other_schema += manifest is None
    if not results and not manifests and not other_schema:
        return note("no plan yet: the first start of each model compiles it", "tcdeploy warm MODEL")
    if manifests:
        results.append(_compare_with_machine(manifests, request))
    if other_schema:
        results.append(note(f"{other_schema} plans of another version of tcdeploy, which are not used"))
    return results


def _compare_with_machine(manifests: list[Manifest], request: Request) -> Result:
    environment, keys = request.probe.environment, request.probe.sections.get("cache keys")
    if environment is None or keys is None:
        section = "environment" if environment is None else "cache keys"
        return unchecked(f"{len(manifests)} plans; whether they fit: {request.probe.reason(section)}")
    unfit = []
    for manifest in manifests:
        differences = plan_differences(manifest, environment, keys["sources"], keys["settings"])
        if differences:
            unfit.append(f"{manifest.plan['key']} ({manifest.plan['model']}): {_describe_differences(differences)}")
    if not unfit:
        return ok(f"{len(manifests)} fit this machine; for a model and its flags: tcdeploy cache why")
    more = f"; and {len(unfit) - MAX_NAMED} more" if len(unfit) > MAX_NAMED else ""
    return note(
        f"{len(unfit)} of {len(manifests)} were made for another machine or version, and their programs would be "
        f"compiled again: {'; '.join(unfit[:MAX_NAMED])}{more}"
    )


def plan_differences(
    manifest: Manifest, environment: Environment, sources: dict[str, str], settings: dict[str, str]
) -> list[Difference]:
    """What torch's cache key holds besides the model and the plan, where it differs here."""
    unneeded = set()
    if manifest.plan.get("programs") == "aot":  # packages start without these
        unneeded = {name for name in ("transformers", "compiler") if not getattr(environment, name)}
    differences = diff_environments(environment, parse_environment(manifest.environment))
    return [
        *(difference for difference in differences if difference.name not in unneeded),
        *diff_mappings(sources, manifest.origin.sources, "tcdeploy/"),
        *diff_mappings(settings, manifest.origin.torch_settings, "torch."),
    ]


def _describe_differences(differences: list[Difference]) -> str:
    shown = [f"{item.name} {item.there[:24] or '-'} (here {item.here[:24] or '-'})" for item in differences[:MAX_NAMED]]
    more = [f"{len(differences) - MAX_NAMED} more"] if len(differences) > MAX_NAMED else []
    return ", ".join(shown + more)


def check_leftovers(request: Request) -> Result:
    """Staging folders of processes that were killed. Running ones hold a lock."""
    folder = Path(request.cache_folder)
    folders = abandoned_folders(folder)
    if not is_folder_locked(folder, if_unknown=True):  # as an unpack does
        folders += folder.glob(f"{UNPACKING_PREFIX}*")
    if not folders:
        return ok("none")
    size = sum(_measure(path)[1] for path in folders)
    return note(
        f"{len(folders)} folders of starts or unpacks that did not finish, {gib(size)}; a start reuses what it can",
        f"tcdeploy cache gc {folder} deletes them",
    )
