"""A start from elsewhere: find the plan's bundle, fetch it, judge it, and put it where the start will look.

The plan's key is the name to look for, so a folder of bundles may hold those of many models and machines. A bundle that
was named itself must be of the plan that this start will make; one that is not is refused with what differs, because a
cache that is fetched and then silently not used is what this is here to prevent. A plan that the cache folder knows
already is not fetched again.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tcdeploy import pipeline
from tcdeploy.bundle.pack import warm_start_and_pack
from tcdeploy.bundle.signing import TrustedKey
from tcdeploy.bundle.unpack import open_bundle, unpack
from tcdeploy.bundle.why import forecast
from tcdeploy.cache.integrity import read_verified_manifest
from tcdeploy.cache.manifest import Manifest, manifest_path
from tcdeploy.errors import MismatchError
from tcdeploy.pipeline import PlannedDeployment
from tcdeploy.planning.environment import Difference
from tcdeploy.planning.plan import Plan
from tcdeploy.planning.recipe import Recipe
from tcdeploy.remote.address import LOCAL_SCHEMES, Address, parse_bundle_name
from tcdeploy.remote.transfer import PushResult, find, pull, push


@dataclass(frozen=True)
class FetchResult:
    """`url` is without secrets, and empty where the cache folder knew the plan; `seconds` of all of it."""

    plan_key: str
    url: str
    bytes: int
    signer: TrustedKey | None
    seconds: float


class EnvironmentMismatchError(MismatchError):
    """`differences` are what differs."""

    def __init__(self, message: str, hint: str, differences: tuple[Difference, ...]) -> None:
        super().__init__(message, hint)
        self.differences = differences


def fetch(recipe: Recipe, source: str, trusted_keys: Path, allow_unsigned: bool = False) -> FetchResult:
    """Put the recipe's plan into its cache folder, from a bundle (a file, a URL) or a folder of bundles.

    Raises MismatchError (none of this plan), TrustError, IntegrityError, NetworkError, SpaceError and UsageError.
    """
    start = time.perf_counter()
    planned = pipeline.decide(recipe)
    plan = planned.plan
    if manifest_path(plan.cache_dir, plan.key).is_file() and not _needs_refetch(plan, recipe):
        return FetchResult(plan.key, "", 0, None, time.perf_counter() - start)
    address = Address.parse(_resolve_bundle_url(source, plan.key))
    with tempfile.TemporaryDirectory(prefix="tcdeploy-fetch-") as place:
        path = Path(address.host_and_path)
        if address.scheme not in LOCAL_SCHEMES or parse_bundle_name(path.name):
            path = pull(address.url, Path(place, "bundle.tcb"))
        header = open_bundle(path, trusted_keys, allow_unsigned).header
        _check_compatible(planned, header.manifest, address.redacted)
        unpacked = unpack(path, Path(plan.cache_dir), trusted_keys, allow_unsigned)
    return FetchResult(header.plan_key, address.redacted, unpacked.bytes, unpacked.signer, time.perf_counter() - start)


def _needs_refetch(plan: Plan, recipe: Recipe) -> bool:
    """Damaged here, and to be rebuilt: then what is stored is better than compiling. Else the start tells."""
    if recipe.on_bad_cache != "rebuild":
        return False
    return read_verified_manifest(plan.cache_dir, plan.key, rebuild=True) is None


def _resolve_bundle_url(source: str, plan_key: str) -> str:
    """The source itself where it is a bundle; else the newest of the plan in it. Raises MismatchError."""
    address = Address.parse(source)
    if parse_bundle_name(address.host_and_path.rpartition("/")[2]) or (
        address.scheme in LOCAL_SCHEMES and Path(address.host_and_path).is_file()
    ):
        return source
    found = find(source, plan_key)
    if not found:
        raise MismatchError(
            f"{address.redacted} holds no bundle of the plan {plan_key}, which this machine and these flags make",
            "tcdeploy warm --cache-to puts one there; tcdeploy cache why FILE compares one with this machine",
        )
    return found[0]


def _check_compatible(planned: PlannedDeployment, cached: Manifest, name: str) -> None:
    if not planned.environment.compiler:
        planned = pipeline.with_cxx_compiler(
            planned, str(cached.environment["compiler"])
        )  # the bundle brings a stand-in
    found = forecast(cached, planned.plan, planned.environment, pipeline.origin_of(planned))
    if planned.plan.key != cached.plan["key"] or found.misses:
        names = [one.name for one in found.differences] or [one.reasons[0] for one in found.misses]
        raise EnvironmentMismatchError(
            f"the bundle {name} is of another plan: {', '.join(names[:5]) or 'another version of tcdeploy'}",
            "tcdeploy cache why tells what it would miss here",
            found.differences,
        )


def pack_and_push(cache_dir: str, plan_key: str, destination: str, key: Path | None = None) -> PushResult:
    """Pack the plan of a cache folder, sign it if a key is given, and push it."""
    with tempfile.TemporaryDirectory(prefix="tcdeploy-send-") as place:
        packed = warm_start_and_pack(Path(cache_dir), plan_key, Path(place, "bundle.tcb"), key)
        return push(packed.path, destination, plan_key)
