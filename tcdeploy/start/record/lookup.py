"""Looks for the start record of a recipe (start/record/record.py), and says why none fits.

Records with the key of this start (start/record/factors.py) are compared with the machine, the installed packages and
the variables. Where transformers is not installed, a start without such a record fails. Its error names what the plans
and the other records of the cache folder were made with. Does not import torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tcdeploy.cache.folder.access import check_folder
from tcdeploy.cache.folder.layout import manifest_path, plan_keys
from tcdeploy.cache.record.manifest import no_plan_error, read_manifest, read_other_versions
from tcdeploy.cache.record.provenance import DAMAGE_HINT, ListedFile, SigningPolicy
from tcdeploy.cache.trust.signing import default_trusted_keys_folder
from tcdeploy.errors import IntegrityError, MismatchError, TcdeployError
from tcdeploy.host.typed_json import from_json
from tcdeploy.models.location import local_folder
from tcdeploy.models.sources import changed_sources
from tcdeploy.planning.environment import (
    Difference,
    Environment,
    detect_environment,
    diff_environments,
    find_cache_dir,
    parse_environment,
)
from tcdeploy.planning.extras import is_installed
from tcdeploy.planning.plan import Plan, make_plan
from tcdeploy.start.auto_programs import PACKAGES_FOUND
from tcdeploy.start.planned import Planned, StartRequest
from tcdeploy.start.record.factors import (
    NoStartRecordError,
    StartDifferences,
    StartFactors,
    compare_factors,
    require_start_factors,
)
from tcdeploy.start.record.record import (
    WITH_TOKENIZER,
    WITHOUT_TOKENIZER,
    StartRecord,
    compiler_variables,
    find_records,
    parse_factors,
)

MAX_NAMED = 5
MISMATCH_HINT = (
    "pack the model again in this environment with these flags (tcdeploy cache pack), or start with the hardware, the "
    "versions and the flags that the packages were made with"
)


@dataclass(frozen=True, kw_only=True)
class FoundRecord(Planned):
    """A record that fits this machine and model, and what is planned from it."""

    record: StartRecord
    path: str  # in the cache folder
    content: bytes  # as the plan's manifest lists it
    folder: Path  # of the model's files


class NoRecord(Exception):  # noqa: N818 - not an error: another start follows
    """The cache folder has no record of this model."""


class DoesNotFit(Exception):  # noqa: N818 - not an error: another start follows
    """Why the packages cannot be used."""


def find_record(request: StartRequest) -> FoundRecord:
    """The newest record of the recipe that can be used on this machine.

    Raises NoRecord if the cache folder has none, DoesNotFit if records exist but cannot be used, MismatchError if the
    hardware, versions or tcdeploy's source files are the reason, and TrustError or IntegrityError if the folder, the
    record or its plan is not trusted or damaged.
    """
    recipe = dataclasses.replace(request.recipe, programs="aot")
    folder = local_folder(recipe.model, recipe.revision)
    try:
        factors = require_start_factors(recipe, folder)
    except NoStartRecordError as error:
        if is_installed("transformers"):  # a start with transformers says what is wrong
            raise NoRecord(str(error)) from error
        raise DoesNotFit(str(error)) from error
    assert folder is not None
    environment = detect_environment(recipe.device)
    cache_dir, _ = find_cache_dir(recipe.cache_dir, environment)
    check_folder(cache_dir, recipe.trust_cache_dir)
    records = find_records(cache_dir, request.signing_policy, factors.key)
    defaults = WITH_TOKENIZER if request.needs_tokenizer else WITHOUT_TOKENIZER
    reasons: list[DoesNotFit | TcdeployError] = []
    for listed in records.files:
        try:
            record, recorded = _parse(listed, factors.key), _environment_of(listed)
            assumed = _assume_recorded(environment, recorded)
            plan = _plan(listed, record, request, assumed, defaults)
            if mismatch := _mismatch(record, assumed, recorded, plan, cache_dir):
                raise mismatch
        except (DoesNotFit, MismatchError, IntegrityError) as reason:
            reasons.append(reason)
        else:
            return FoundRecord(
                recipe=recipe, environment=assumed, architecture=record.architecture, plan=plan,
                generation_defaults=record.defaults[defaults], record=record, path=listed.path, content=listed.content,
                folder=folder,
            )  # fmt: skip
    reasons += records.problems
    if not reasons and not is_installed("transformers"):  # with transformers, the model is loaded and a record written
        difference: DoesNotFit | TcdeployError | None = (
            environment_mismatch(cache_dir, plan_keys(cache_dir), environment, recipe.model)
            or _factor_mismatch(cache_dir, factors, environment, recipe.model)
            or (no_plan_error(cache_dir) if read_other_versions(cache_dir) else None)
        )
        reasons += [difference] if difference is not None else []
    if reasons:
        if isinstance(reasons[0], IntegrityError) and recipe.on_bad_cache == "rebuild" and not recipe.require_signed:
            raise DoesNotFit(reasons[0].message)  # the other start discards the plan
        raise reasons[0]
    raise NoRecord("the cache folder has no start record of this model")


def _parse(listed: ListedFile, key: str) -> StartRecord:
    """Raises IntegrityError if the content is not a record that a start with this key and plan wrote."""
    try:
        record = from_json(StartRecord, json.loads(listed.content), "the record")
    except (ValueError, RecursionError) as error:
        raise _invalid(listed, str(error)) from error
    if record.factors.key != key or record.plan_key != listed.plan_key:
        raise _invalid(listed, "it belongs to another start")
    return record


def _environment_of(listed: ListedFile) -> Environment:
    """In which the packages were made. Raises IntegrityError."""
    try:
        return parse_environment(listed.manifest.environment)
    except (LookupError, TypeError, AttributeError) as error:
        raise _invalid(listed, f"its plan has no valid environment: {error}") from error


def _assume_recorded(environment: Environment, recorded: Environment) -> Environment:
    """`environment`, with the recorded values for packages that are missing here and for facts that starts ignore.

    A C++ compiler and transformers are never needed, Triton only on a GPU. `install_paths` and `torch_settings` affect
    only compilation.
    """
    return dataclasses.replace(
        environment,
        compiler=environment.compiler or recorded.compiler,
        transformers=environment.transformers or recorded.transformers,
        triton=environment.triton or ("" if environment.gpus else recorded.triton),
        install_paths=recorded.install_paths,
        missing_internals=recorded.missing_internals,
        torch_settings=recorded.torch_settings,
    )


def _plan(listed: ListedFile, record: StartRecord, request: StartRequest, environment: Environment, name: str) -> Plan:
    """`name`: the entry of the record's decisions. Raises DoesNotFit, and IntegrityError if no plan can be made."""
    recipe = dataclasses.replace(request.recipe, programs="aot")
    reason = PACKAGES_FOUND if request.recipe.programs == "auto" else ""
    if name not in record.decisions or name not in record.defaults:
        raise DoesNotFit(f"{listed.path} has no tokenizer, because none could be loaded when it was written")
    try:
        return make_plan(recipe, environment, record.architecture, record.decisions[name], reason)
    except (ArithmeticError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise _invalid(listed, f"no plan can be made from it: {type(error).__name__}: {error}") from error


def _invalid(listed: ListedFile, reason: str) -> IntegrityError:
    return IntegrityError(f"the start record {listed.path} of plan {listed.plan_key} is invalid: {reason}", DAMAGE_HINT)


def _factor_mismatch(
    cache_dir: str, here: StartFactors, environment: Environment, model: str
) -> DoesNotFit | MismatchError | None:
    """An error that names how this start differs from the most similar record; None if no record can be compared.

    A record is compared if its plan has a manifest and was made for this hardware, and if the model's name or one of
    its files is equal. MismatchError if a version or a source file of tcdeploy differs, otherwise DoesNotFit.
    """
    compared: list[StartDifferences] = []
    path_of_other_version = ""
    for listed in find_records(cache_dir, SigningPolicy(default_trusted_keys_folder())).files:
        with contextlib.suppress(IntegrityError, ValueError, RecursionError):
            recorded = parse_factors(listed.content)
            if _differences(environment, _environment_of(listed)):
                continue
            has_name = listed.manifest.plan["model"] == model
            if recorded is None and has_name:
                path_of_other_version = listed.path
            elif recorded is not None and (has_name or recorded.files.items() & here.files.items()):
                compared.append(compare_factors(here, recorded))
    # Versions first: a start can have other flags, but not other versions than those that are installed.
    by_similarity = sorted(compared, key=lambda found: (len(found.environment), len(found.flags_and_files)))
    for found in by_similarity:
        if texts := found.texts():
            text = f"the packages in {cache_dir} were made with {_join(texts)}"
            return MismatchError(text, MISMATCH_HINT) if found.environment else DoesNotFit(text)
    if path_of_other_version:
        text = f"{path_of_other_version} in {cache_dir} was written by another version of tcdeploy"
        return MismatchError(text, MISMATCH_HINT)
    return None


def _mismatch(
    record: StartRecord, environment: Environment, recorded: Environment, plan: Plan, cache_dir: str
) -> DoesNotFit | MismatchError | None:
    """Why the record does not fit; None if it does."""
    if (installed := environment.transformers) != recorded.transformers:
        return DoesNotFit(
            f"the packages were made with transformers {recorded.transformers}, and {installed} is installed"
        )
    if changed := changed_sources(record.sources):
        return DoesNotFit(f"{changed[0]} of transformers has changed since the packages were made")
    for name, value in compiler_variables().items():  # one that is unset now had its effect on the packages
        if record.variables.get(name) != value:
            return DoesNotFit(f"the packages were made with another value of {name}")
    if plan.key != record.plan_key:
        return environment_mismatch(cache_dir, [record.plan_key], environment) or DoesNotFit(
            "the packages belong to another plan; `tcdeploy cache why` names what differs on this machine"
        )
    return None


def environment_mismatch(
    cache_dir: str, plan_keys: Iterable[str], environment: Environment, model: str | None = None
) -> MismatchError | None:
    """A MismatchError that names what differs between this environment and that of the packages of these plans.

    `model`: leave out plans of other models, by the name or path that they were packed with. The plan with the fewest
    differences is reported. None if one plan has no differences, or if no plan has packages.
    """
    differences_by_plan = [_differences(environment, there) for there in _environments(cache_dir, plan_keys, model)]
    nearest = min(differences_by_plan, key=len, default=[])
    if not nearest:
        return None
    named = _join([f"{item.name} {item.there or 'none'} (here {item.here or 'none'})" for item in nearest])
    return MismatchError(f"the packages in {cache_dir} were made in another environment: {named}", MISMATCH_HINT)


def _environments(cache_dir: str, plan_keys: Iterable[str], model: str | None) -> Iterator[Environment]:
    """The environments of the plans that have packages, without plans whose manifest cannot be read."""
    for key in plan_keys:
        with contextlib.suppress(IntegrityError, OSError, KeyError, TypeError, AttributeError):
            manifest = read_manifest(manifest_path(cache_dir, key))
            plan = manifest.plan if manifest is not None else {}
            if manifest is not None and plan.get("programs") == "aot" and model in (None, plan.get("model")):
                yield parse_environment(manifest.environment)


def _differences(here: Environment, there: Environment) -> list[Difference]:
    """Cache factors that differ, and Python's patch version, which must be equal too (start/record/factors.py)."""
    differences = diff_environments(_assume_recorded(here, there), there)
    if here.python != there.python and "python" not in {item.name for item in differences}:
        differences.append(Difference("python", here.python, there.python))
    return differences


def _join(texts: Sequence[str]) -> str:
    rest = [f"{len(texts) - MAX_NAMED} more"] if len(texts) > MAX_NAMED else []
    return ", ".join([*texts[:MAX_NAMED], *rest])
