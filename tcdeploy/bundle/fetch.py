"""Fetches the bundle of a plan into its cache folder before a start, and pushes a bundle after one.

A folder of bundles is searched by plan key, so it may hold bundles of many models and machines. With `--programs auto`,
a bundle of packages is preferred to one of jit programs, which may hold the packages too. A bundle that is given by URL
must have a plan that this start could use. Otherwise it is rejected with the list of differences: a cache that is
fetched and then silently not used is the failure that this module prevents. A plan that the cache folder already has
is not fetched again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tcdeploy.bundle.pack import warm_start_and_pack
from tcdeploy.bundle.unpack import UnpackResult, open_bundle, unpack
from tcdeploy.bundle.why import forecast
from tcdeploy.cache.folder.access import check_folder
from tcdeploy.cache.folder.layout import manifest_path
from tcdeploy.cache.record.bundle_header import Header
from tcdeploy.cache.record.manifest import Manifest, read_manifest
from tcdeploy.cache.record.provenance import SigningPolicy, check_manifests
from tcdeploy.cache.record.unlisted import discard_if_damaged
from tcdeploy.cache.trust.signing import TrustedKey, default_trusted_keys_folder
from tcdeploy.engine.warm.early_gpu import start_initializing_gpu
from tcdeploy.errors import MismatchError, TcdeployError, TrustError
from tcdeploy.host.progress import NullProgress, Progress
from tcdeploy.host.temporary_files import temporary_folder
from tcdeploy.planning.environment import Difference
from tcdeploy.planning.plan import Plan
from tcdeploy.planning.recipe import Recipe
from tcdeploy.remote.address import LOCAL_SCHEMES, Address, CacheSource, parse_bundle_name
from tcdeploy.remote.transfer import PushResult, exists, find, pull, push
from tcdeploy.start.auto_programs import why_not_exported, with_programs
from tcdeploy.start.decide import decide, origin_of, with_cxx_compiler
from tcdeploy.start.planned import PlannedModel


@dataclass(frozen=True)
class FetchResult:
    """`url` has no secrets, and is empty if the cache folder already had the plan. `seconds` covers the whole fetch.

    `unpacked` is None if nothing was fetched.
    """

    plan_key: str
    url: str
    bytes: int
    signer: TrustedKey | None
    seconds: float
    unpacked: UnpackResult | None = None


class EnvironmentMismatchError(MismatchError):
    """The bundle was made for another environment or plan; `differences` lists what differs."""

    def __init__(self, message: str, hint: str, differences: tuple[Difference, ...]) -> None:
        super().__init__(message, hint)
        self.differences = differences


def fetch(
    recipe: Recipe, cache: CacheSource, trusted_keys: Path | None = None, progress: Progress | None = None
) -> FetchResult:
    """Fetch the recipe's plan into its cache folder. `trusted_keys`: the folder of public keys; None: the default.

    `progress`: gets the MiB of the download as the detail of the present stage.

    Raises MismatchError (no bundle of this plan), TrustError, IntegrityError, NetworkError, SpaceError and UsageError.
    """
    start, progress = time.perf_counter(), progress or NullProgress()
    trusted_keys = trusted_keys or default_trusted_keys_folder()
    policy = SigningPolicy(trusted_keys, recipe.require_signed)
    planned = decide(recipe, policy=policy, needs_weights=False, keeps_probe=True)
    plan = planned.plan
    if plan.device == "cuda":
        start_initializing_gpu()  # the start that follows waits for it
    check_folder(plan.cache_dir, recipe.trust_cache_dir)
    if manifest_path(plan.cache_dir, plan.key).is_file():
        check_folder(plan.cache_dir, recipe.trust_cache_dir, must_exist=True)  # it may be newer than the first check
        if not _needs_refetch(plan, recipe, trusted_keys):
            return FetchResult(plan.key, "", 0, None, time.perf_counter() - start)
    wanted = _usable_plans(planned, recipe.programs == "auto")
    # A bundle with jit programs and packages is named after the jit programs.
    names = [*(item.plan.key for item in wanted), with_programs(planned, "jit").plan.key]
    address = Address.parse(_resolve_bundle_url(cache.source, list(dict.fromkeys(names))))
    with temporary_folder("fetch") as work_dir:
        path = Path(address.host_and_path)
        if address.scheme not in LOCAL_SCHEMES or parse_bundle_name(path.name):
            path = pull(address.url, Path(work_dir, "bundle.tcb"), report=progress.detail)
        progress.detail("check and unpack the bundle")
        with _named(path, address.redacted):
            header = open_bundle(path, trusted_keys, cache.allow_unsigned).header
            key = _check_compatible(wanted, header, address.redacted)
            unpacked = unpack(
                path, Path(plan.cache_dir), trusted_keys, cache.allow_unsigned, cache.allow_rollback,
                recipe.trust_cache_dir, keeps_measurements=not recipe.require_signed,
            )  # fmt: skip
    seconds = time.perf_counter() - start
    return FetchResult(key, address.redacted, unpacked.bytes, unpacked.signer, seconds, unpacked)


@contextlib.contextmanager
def _named(path: Path, name: str) -> Iterator[None]:
    """Let errors in the block name a temporary file by what it is a copy of."""
    try:
        yield
    except TcdeployError as error:
        error.message, error.hint = (text.replace(str(path), name) for text in (error.message, error.hint))
        error.args = (error.message,)
        raise


def _needs_refetch(plan: Plan, recipe: Recipe, trusted_keys: Path) -> bool:
    """Whether to fetch a plan that the cache folder already has.

    With `on_bad_cache: rebuild`, a damaged plan is fetched, because fetching is faster than compiling. Otherwise the
    start reports the damage. With `require_signed`, a plan that is not from a signed bundle is fetched.
    """
    if recipe.on_bad_cache == "rebuild" and discard_if_damaged(plan.cache_dir, plan.key, trusted_keys):
        return True
    return recipe.require_signed and not _is_signed(plan, trusted_keys)


def _is_signed(plan: Plan, trusted_keys: Path) -> bool:
    manifest = read_manifest(manifest_path(plan.cache_dir, plan.key))
    try:
        manifests = {plan.key: manifest} if manifest is not None else {}
        check_manifests(plan.cache_dir, plan.key, manifests, SigningPolicy(trusted_keys, require_signed=True))
    except TrustError:
        return False
    return True


def _usable_plans(planned: PlannedModel, is_auto: bool) -> list[PlannedModel]:
    """The plans that the start could use, best first."""
    if not is_auto or why_not_exported(planned):
        return [planned]
    return [with_programs(planned, "aot"), with_programs(planned, "jit")]


def _resolve_bundle_url(source: str, plan_keys: Sequence[str]) -> str:
    """`source` if it is a bundle, else the newest bundle there of the first of these plans that has one.

    Raises MismatchError.
    """
    address = Address.parse(source)
    if parse_bundle_name(address.host_and_path.rpartition("/")[2]) or (
        address.scheme in LOCAL_SCHEMES and Path(address.host_and_path).is_file()
    ):
        return source
    urls = next(filter(None, (find(source, key) for key in plan_keys)), ())
    if not urls and not exists(source):
        raise MismatchError(
            f"{address.redacted} does not exist",
            "pass the path or URL of a bundle, or of a folder to which tcdeploy warm --cache-to has pushed one",
        )
    if not urls:
        raise MismatchError(
            f"{address.redacted} holds no bundle of the plan {' or '.join(plan_keys)} (these flags on this machine)",
            "push one with tcdeploy warm --cache-to (those of earlier versions of tcdeploy do not fit), or compare one "
            "with this machine: tcdeploy cache why FILE",
        )
    return urls[0]


def _check_compatible(wanted: Sequence[PlannedModel], header: Header, name: str) -> str:
    """The key of the first wanted plan that the bundle holds for this machine. Raises EnvironmentMismatchError."""
    of_kind = {str(manifest.plan["programs"]): manifest for manifest in header.manifests.values()}
    pairs = [(planned, of_kind[planned.plan.programs]) for planned in wanted if planned.plan.programs in of_kind]
    for planned, cached in pairs[:-1]:
        with contextlib.suppress(EnvironmentMismatchError):
            return _check_plan(planned, cached, name)
    return _check_plan(*(pairs[-1] if pairs else (wanted[0], header.manifest)), name)


def _check_plan(planned: PlannedModel, cached: Manifest, name: str) -> str:
    if not planned.environment.compiler and cached.plan["programs"] == "aot":  # packages start without one
        planned = with_cxx_compiler(planned, str(cached.environment["compiler"]))
    expected = forecast(cached, planned.plan, planned.environment, origin_of(planned))
    if planned.plan.key != cached.plan["key"] or expected.misses:
        names = [difference.name for difference in expected.differences]
        names = names or [bucket.reasons[0] for bucket in expected.misses]
        raise EnvironmentMismatchError(
            f"the bundle {name} was made for another plan: {', '.join(names[:5]) or 'another version of tcdeploy'}",
            "list the buckets that would be recompiled here: tcdeploy cache why FILE",
            expected.differences,
        )
    return str(cached.plan["key"])


def pack_and_push(
    cache_dir: str, plan_keys: Sequence[str], destination: str, secret_key: Path | None = None
) -> PushResult:
    """Pack plans of a cache folder, sign the bundle if `secret_key` is given, and push it, named after the first."""
    with temporary_folder("push") as work_dir:
        path = Path(work_dir, "bundle.tcb")
        with _named(path, f"of plan {plan_keys[0]}"):
            packed = warm_start_and_pack(Path(cache_dir), plan_keys, path, secret_key)
            return push(packed.path, destination, plan_keys[0])
