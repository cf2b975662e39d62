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
from tcdeploy.bundle.pack import pack_proven
from tcdeploy.bundle.signing import TrustedKey
from tcdeploy.bundle.unpack import open_bundle, unpack
from tcdeploy.bundle.why import forecast
from tcdeploy.cache.folder import read_verified_manifest
from tcdeploy.cache.manifest import Manifest, manifest_path
from tcdeploy.planning.environment import Difference
from tcdeploy.errors import MismatchError
from tcdeploy.pipeline import Decided
from tcdeploy.planning.plan import Plan
from tcdeploy.planning.recipe import Recipe
from tcdeploy.remote.address import PATHS, Address, read_name
from tcdeploy.remote.transfer import Pushed, find, pull, push


@dataclass(frozen=True)
class Fetched:
    """`url` is without secrets, and empty where the cache folder knew the plan; `seconds` of all of it."""

    plan_key: str
    url: str
    bytes: int
    signer: TrustedKey | None
    seconds: float


class OtherEnvironment(MismatchError):
    """`factors` are what differs."""

    def __init__(self, message: str, hint: str, factors: tuple[Difference, ...]) -> None:
        super().__init__(message, hint)
        self.factors = factors


def fetch(recipe: Recipe, source: str, trusted: Path, allow_unsigned: bool = False) -> Fetched:
    """Put the recipe's plan into its cache folder, from a bundle (a file, a URL) or a folder of bundles.

    Raises MismatchError (none of this plan), TrustError, IntegrityError, NetworkError, SpaceError and UsageError.
    """
    start = time.perf_counter()
    decided = pipeline.decide(recipe)
    plan = decided.plan
    if manifest_path(plan.cache_dir, plan.key).is_file() and not _is_to_be_replaced(plan, recipe):
        return Fetched(plan.key, "", 0, None, time.perf_counter() - start)
    where = Address.parse(_bundle_at(source, plan.key))
    with tempfile.TemporaryDirectory(prefix="tcdeploy-fetch-") as place:
        path = Path(where.body)
        if where.scheme not in PATHS or read_name(path.name):
            path = pull(where.url, Path(place, "bundle.tcb"))
        header = open_bundle(path, trusted, allow_unsigned).header
        _insist_on_fit(decided, header.manifest, where.shown)
        unpacked = unpack(path, Path(plan.cache_dir), trusted, allow_unsigned)
    return Fetched(header.plan_key, where.shown, unpacked.bytes, unpacked.signer, time.perf_counter() - start)


def _is_to_be_replaced(plan: Plan, recipe: Recipe) -> bool:
    """Damaged here, and to be rebuilt: then what is stored is better than compiling. Else the start tells."""
    if recipe.on_bad_cache != "rebuild":
        return False
    return read_verified_manifest(plan.cache_dir, plan.key, rebuild=True) is None


def _bundle_at(source: str, plan_key: str) -> str:
    """The source itself where it is a bundle; else the newest of the plan in it. Raises MismatchError."""
    address = Address.parse(source)
    if read_name(address.body.rpartition("/")[2]) or (address.scheme in PATHS and Path(address.body).is_file()):
        return source
    found = find(source, plan_key)
    if not found:
        raise MismatchError(
            f"{address.shown} holds no bundle of the plan {plan_key}, which this machine and these flags make",
            "tcdeploy warm --cache-to puts one there; tcdeploy cache why FILE compares one with this machine",
        )
    return found[0]


def _insist_on_fit(decided: Decided, cached: Manifest, name: str) -> None:
    if not decided.environment.compiler:
        decided = pipeline.with_compiler(decided, str(cached.environment["compiler"]))  # the bundle brings a stand-in
    found = forecast(cached, decided.plan, decided.environment, pipeline.origin_of(decided))
    if decided.plan.key != cached.plan["key"] or found.misses:
        names = [one.name for one in found.factors] or [one.reasons[0] for one in found.misses]
        raise OtherEnvironment(
            f"the bundle {name} is of another plan: {', '.join(names[:5]) or 'another version of tcdeploy'}",
            "tcdeploy cache why tells what it would miss here",
            found.factors,
        )


def send(cache_dir: str, plan_key: str, destination: str, key: Path | None = None) -> Pushed:
    """Pack the plan of a cache folder, sign it if a key is given, and push it."""
    with tempfile.TemporaryDirectory(prefix="tcdeploy-send-") as place:
        packed = pack_proven(Path(cache_dir), plan_key, Path(place, "bundle.tcb"), key)
        return push(packed.path, destination, plan_key)
