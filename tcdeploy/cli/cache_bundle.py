"""`tcdeploy cache pack`, `unpack`, `verify`, `keygen`, `sign` and `trust`: bundles and their signatures."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tcdeploy.cli import cache_target
from tcdeploy.cli.blind_build import build_for, check_target_options
from tcdeploy.cli.cache_target import BundleFile, Target, TrustCacheDir
from tcdeploy.cli.options import RecipeOptions, options_command
from tcdeploy.cli.remote_cache import AllowRollback, AllowUnsigned, TrustedKeys
from tcdeploy.cli.report_options import Json, TargetGPU, Winners
from tcdeploy.errors import IntegrityError, MismatchError, TcdeployError, ThresholdError, UsageError
from tcdeploy.host.temporary_files import temporary_folder
from tcdeploy.planning.environment import detect_environment, installed_versions
from tcdeploy.planning.recipe import Recipe

if TYPE_CHECKING:
    from tcdeploy.bundle.verify import BucketReplay
    from tcdeploy.cache.record.manifest import Manifest


@options_command
def pack(
    recipe: Recipe,
    out: Annotated[Path, typer.Option("--out", "-o", help="Bundle to write", metavar="FILE.tcb")],
    plan: Annotated[
        str | None,
        typer.Option("--plan", help="Plan to pack (see cache ls), if MODEL is a folder with several", metavar="KEY"),
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--sign", help="Sign the bundle with this key", metavar="NAME.key")
    ] = None,
    target_gpu: TargetGPU = None,
    winners: Winners = None,
    json: Json = False,
) -> None:
    """Pack everything that a warm start of MODEL needs into one file. MODEL may also be a cache folder.

    The bundle contains exactly the files that a start without compilation used. If the plan's last start compiled
    something, it is started once more, and packing fails if that start compiles too. The bundle of a MODEL has its jit
    programs and its packages, unless --programs is given. With --target-gpu, packages are compiled for a GPU that this
    machine does not have, and the bundle says that they have not run. If they have been started in a cache folder
    since, its bundle has the measurements of that start.
    """
    from tcdeploy.bundle import pack as packing
    from tcdeploy.cache.folder.access import check_folder
    from tcdeploy.cli import cache_display

    folder = Path(recipe.model)
    check_target_options(recipe, target_gpu, winners, {"--plan": plan})
    if cache_target.is_cache_folder(folder):
        check_folder(folder, recipe.trust_cache_dir, must_exist=True)
        is_given = recipe != RecipeOptions({"model": recipe.model, "trust_cache_dir": recipe.trust_cache_dir}).build()
        if is_given or target_gpu is not None:
            raise UsageError(f"{folder} is a cache folder: recipe flags do not apply", "--plan KEY selects a plan")
        plan_keys = [plan] if plan else packing.plans_to_pack(folder)
    else:
        if plan is not None:
            hint = "remove --plan: MODEL and flags are a plan"
            raise UsageError("--plan needs a cache folder instead of MODEL", hint)
        folder, plan_keys = _warm_model(recipe) if target_gpu is None else _build(recipe, target_gpu, winners)
    packed = packing.warm_start_and_pack(folder, plan_keys, out, key)
    cache_display.show_packed(packed, cache_target.read_manifests(out), json)


def _warm_model(recipe: Recipe) -> tuple[Path, list[str]]:
    """Warm the plan, and with `--programs auto` build its packages. Returns the cache folder and the plans' keys."""
    from tcdeploy.cli import display
    from tcdeploy.cli.warm import fill_cache, filled_plans

    with display.show_progress() as progress:
        report, packages = fill_cache(recipe, progress, is_packed=True)
    return Path(report.cache_dir), filled_plans(report, packages)


def _build(recipe: Recipe, target_gpu: str, winners: Path | None) -> tuple[Path, list[str]]:
    """Build the plan for a GPU that this machine does not have. Returns the cache folder and the plan's key."""
    from tcdeploy.cli import display

    with display.show_progress() as progress:
        built = build_for(recipe, target_gpu, winners, None, progress)
    return Path(built.cache_dir), [built.plan_key]


def unpack(
    file: BundleFile,
    folder: Annotated[Path, typer.Argument(help="Cache folder to unpack into", metavar="FOLDER", show_default=False)],
    allow_unsigned: AllowUnsigned = False,
    allow_rollback: AllowRollback = False,
    trust_cache_dir: TrustCacheDir = False,
    any_environment: Annotated[
        bool,
        typer.Option(
            "--any-environment", help="Unpack even if made for another GPU or versions, for example into an image"
        ),
    ] = False,
    trusted_keys: TrustedKeys = None,
    json: Json = False,
) -> None:
    """Check a bundle's signature and hashes, and unpack it into a cache folder."""
    from tcdeploy.bundle import unpack as unpacking
    from tcdeploy.bundle.why import version_differences
    from tcdeploy.cache.trust import signing
    from tcdeploy.cli import cache_display

    trusted = trusted_keys or signing.default_trusted_keys_folder()
    header = unpacking.open_bundle(file, trusted, allow_unsigned).header
    installed = installed_versions()
    # One plan that fits is enough: packages need fewer packages of Python than jit programs.
    differences = min((version_differences(plan, installed) for plan in header.manifests.values()), key=len)
    if differences and not any_environment:
        cache_display.show_differences(differences, sys.stderr)
        raise MismatchError(
            f"{file} was packed in another environment: {', '.join(difference.name for difference in differences)}",
            "pack it again in an environment like this one; "
            f"tcdeploy cache why {file} lists what would miss, and --any-environment unpacks it nevertheless",
        )
    unpacked = unpacking.unpack(file, folder, trusted, allow_unsigned, allow_rollback, trust_cache_dir)
    cache_display.show_unpacked(unpacked, folder, json)


def verify(
    target: Target,
    run: Annotated[
        bool, typer.Option("--run", help="Also start each plan, and compare its tokens with the packing machine's")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="With --run: model to load, if not at its recorded location")
    ] = None,
    allow_unsigned: AllowUnsigned = False,
    require_signed: Annotated[
        bool,
        typer.Option("--require-signed", help="Exit with code 4 for plans and files that are not from a signed bundle"),
    ] = False,
    trusted_keys: TrustedKeys = None,
    json: Json = False,
) -> None:
    """Check the hash of every file in a bundle or cache folder, and the bundle's signature.

    A plan that was unpacked from a bundle must have the files that the signed header lists.
    """
    from tcdeploy.bundle import verify as verifying
    from tcdeploy.cache.trust import signing
    from tcdeploy.cli import cache_display

    if model is not None and not run:
        raise UsageError("--model needs --run", "add --run, or remove --model")
    if allow_unsigned and require_signed:
        raise UsageError("--require-signed excludes --allow-unsigned", "remove one of them")
    trusted = trusted_keys or signing.default_trusted_keys_folder()
    if target.is_dir():
        verified = verifying.verify_folder(target, trusted, allow_unsigned, require_signed)
    else:
        verified = verifying.verify_bundle(target, trusted, allow_unsigned)
    replays: dict[str, list[BucketReplay]] = {}
    skipped: dict[str, str] = {}
    if run:
        with _temporary_copy(target, trusted, allow_unsigned) as folder:
            skipped = _plans_of_other_gpus(folder, [plan.plan_key for plan in verified], model)
            run_here = [plan.plan_key for plan in verified if plan.plan_key not in skipped]
            replays = {plan_key: _replay(folder, plan_key, model) for plan_key in run_here}
    cache_display.show_verified(target, verified, replays, skipped, json)
    cache_display.show_other_versions(target, "verified")
    failed = [f"{key} {replay.bucket}" for key, of_plan in replays.items() for replay in of_plan if not replay.passed]
    if failed:
        hint = "check that --model names the same weights"
        raise IntegrityError(f"outputs differ from the packed ones: {', '.join(failed)}", hint)


@contextlib.contextmanager
def _temporary_copy(target: Path, trusted: Path, allow_unsigned: bool) -> Iterator[Path]:
    """A temporary copy of a cache folder, or of a bundle's contents, because a start writes into its cache folder."""
    from tcdeploy.bundle.unpack import unpack as unpack_bundle

    with temporary_folder("verify") as folder:
        if target.is_dir():
            _copy_plans(target, folder)
        else:
            unpack_bundle(target, folder, trusted, allow_unsigned)
        yield folder


def _copy_plans(source: Path, folder: Path) -> None:
    """Copy what plans consist of. Raises TcdeployError, for example if another process removes a plan meanwhile.

    Staging folders (STAGING_PREFIX, UNPACKING_PREFIX), locks and temporary files all have hidden names. They belong to
    no plan, and other processes remove them at any time. Precompiled headers are only used by starts that compile.
    """
    from tcdeploy.cache.folder.layout import HEADERS_DIR
    from tcdeploy.host.durable import copy_regular

    try:
        ignored = shutil.ignore_patterns(".*", HEADERS_DIR)
        shutil.copytree(source, folder, ignore=ignored, copy_function=copy_regular, dirs_exist_ok=True)
    except shutil.Error as error:
        path, _, reason = error.args[0][0]
        raise TcdeployError(
            f"{path} cannot be copied to {folder}: {reason}",
            "run the command again while no other process changes the folder, or set TMPDIR to another disk",
        ) from error


def _plans_of_other_gpus(folder: Path, plan_keys: list[str], model: str | None) -> dict[str, str]:
    """Why plans cannot run on this machine, by key. Raises MismatchError if none can run."""
    errors: dict[str, MismatchError] = {}
    for plan_key in plan_keys:
        try:
            _replayed_recipe(folder, plan_key, model)
        except MismatchError as error:
            errors[plan_key] = error
    if len(errors) == len(plan_keys):
        raise errors[plan_keys[0]]
    return {plan_key: error.message for plan_key, error in errors.items()}


def _replayed_recipe(folder: Path, plan_key: str, model: str | None) -> tuple[Manifest, Recipe]:
    """The packed manifest of a plan, and the recipe that starts it. Raises MismatchError if it is for another GPU."""
    from tcdeploy.bundle.verify import check_same_gpu, packed_manifest

    packed = packed_manifest(folder, plan_key)
    flags = {"cache_dir": str(folder), **({"model": model} if model else {})}
    recipe = RecipeOptions(flags).build(bundle_recipe=cache_target.original_recipe(packed))
    check_same_gpu(packed, detect_environment(recipe.device))
    return packed, dataclasses.replace(recipe, compile=False)


def _replay(folder: Path, plan_key: str, model: str | None) -> list[BucketReplay]:
    """Start the plan and compare each bucket's outputs with the packed ones.

    Compiles nothing. Raises MismatchError for a plan for another GPU model, and ThresholdError on a miss.
    """
    from tcdeploy.bundle.verify import compare_top_tokens
    from tcdeploy.cli import display

    packed, recipe = _replayed_recipe(folder, plan_key, model)
    with display.show_progress() as progress:
        from tcdeploy.start.prepare import prepare

        try:
            deployment = prepare(recipe, progress)
        except ThresholdError as error:  # it names `folder`, a temporary copy
            message = f"on this machine, not all programs of plan {plan_key} are in the cache"
            raise ThresholdError(message, "tcdeploy cache why lists what differs") from error
    return compare_top_tokens(packed, deployment.records)


def generate_key(
    name: Annotated[Path, typer.Argument(help="NAME.key and NAME.pub are written", metavar="NAME")], json: Json = False
) -> None:
    """Generate a key pair for signing bundles. Keep NAME.key secret, and distribute NAME.pub."""
    from tcdeploy.cache.trust import signing
    from tcdeploy.cli.display import report

    secret, public, fingerprint = f"{name}.key", f"{name}.pub", signing.generate_key(name)
    text = f"{secret} {public} {fingerprint}"
    report("cache keygen", json, text, secret_key=secret, public_key=public, fingerprint=fingerprint)


def sign(
    file: BundleFile,
    key: Annotated[Path, typer.Option("--key", help="Secret key to sign with", metavar="NAME.key")],
    json: Json = False,
) -> None:
    """Sign a bundle in place."""
    from tcdeploy.bundle.pack import add_signature
    from tcdeploy.cli.display import report

    add_signature(file, key)
    report("cache sign", json, f"{file} is signed", path=file, secret_key=key)


def trust(
    name: Annotated[str, typer.Argument(help="Name for the signer, shown by verify", metavar="NAME")],
    file: Annotated[Path, typer.Argument(help="Public key", metavar="FILE.pub")],
    trusted_keys: TrustedKeys = None,
    json: Json = False,
) -> None:
    """Trust bundles that are signed with this key."""
    from tcdeploy.cache.trust import signing
    from tcdeploy.cli.display import report

    key = signing.trust(name, file, trusted_keys or signing.default_trusted_keys_folder())
    report("cache trust", json, f"{key.name} {key.fingerprint} is trusted", signer=key)
