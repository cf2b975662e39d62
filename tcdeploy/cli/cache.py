"""`tcdeploy cache`: pack, unpack, verify, explain, list, clear and sign caches.

Only what starts a model imports torch: `pack`, `why` and `verify --run`.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tcdeploy.cli.options import RecipeOptions, recipe_command, recipe_options_command
from tcdeploy.cli.remote_cache import AllowUnsigned, TrustedKeys
from tcdeploy.errors import IntegrityError, MismatchError, ThresholdError, UsageError
from tcdeploy.planning.recipe import Recipe, build_recipe

if TYPE_CHECKING:
    from tcdeploy.cache.manifest import Manifest

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, help=__doc__)

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout")]
Folder = Annotated[Path, typer.Argument(help="A cache folder", show_default=False)]
Target = Annotated[Path, typer.Argument(help="A bundle, or a cache folder", show_default=False)]
PlanKey = Annotated[str | None, typer.Option("--plan", help="Which plan of the folder", metavar="KEY")]
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "s": 1, "min": 60, "h": 3600, "d": 86400}


@app.command("pack")
@recipe_command
def pack(
    recipe: Recipe,
    out: Annotated[Path, typer.Option("--out", "-o", help="The bundle to write", metavar="FILE.tcb")],
    plan: PlanKey = None,
    key: Annotated[Path | None, typer.Option("--sign", help="Sign it with this key", metavar="NAME.key")] = None,
    json: Json = False,
) -> None:
    """Pack what MODEL, or a cache folder in its place, needs for a warm start into one file.

    A start that compiles nothing goes before it: its list of files is what is packed.
    """
    from tcdeploy.bundle import pack as packing
    from tcdeploy.cli import cache_display

    folder = Path(recipe.model)
    if _is_cache_folder(folder):
        if recipe != build_recipe({"model": recipe.model}):
            raise UsageError(f"{folder} was filled already: flags of a model change nothing", "--plan KEY names a plan")
        plan_key = plan or packing.single_plan_key(folder)
    else:
        if plan is not None:
            raise UsageError("--plan is for a cache folder", "leave it out: MODEL and its flags are one plan")
        folder, plan_key = _warm_model(recipe)
    packed = packing.warm_start_and_pack(folder, plan_key, out, key)
    cache_display.show_packed(packed, _read_plan_manifest(folder, plan_key), json)


def _warm_model(recipe: Recipe) -> tuple[Path, str]:
    from tcdeploy.cli import display

    with display.show_progress() as progress:
        from tcdeploy import pipeline

        deployment = pipeline.prepare(recipe, progress)
        place, key = Path(deployment.cache_dir), deployment.plan.key
        del deployment
        pipeline.release_memory()  # the start that proves it needs the memory
    return place, key


@app.command("unpack")
def unpack(
    file: Annotated[Path, typer.Argument(help="A bundle", show_default=False)],
    folder: Annotated[Path, typer.Argument(help="The cache folder to put it into", show_default=False)],
    allow_unsigned: AllowUnsigned = False,
    any_environment: Annotated[
        bool, typer.Option("--any-environment", help="Also where its programs cannot run, as in building an image")
    ] = False,
    trusted_keys: TrustedKeys = None,
    json: Json = False,
) -> None:
    """Put a bundle into a cache folder, after its signature and every byte were checked."""
    from tcdeploy.bundle import signing
    from tcdeploy.bundle.unpack import open_bundle
    from tcdeploy.bundle.unpack import unpack as put
    from tcdeploy.bundle.why import version_differences
    from tcdeploy.cli import cache_display
    from tcdeploy.planning.environment import installed_versions

    trusted = trusted_keys or signing.default_trusted_keys_folder()
    manifest = open_bundle(file, trusted, allow_unsigned).header.manifest
    differences = version_differences(manifest, installed_versions())
    if differences and not any_environment:
        cache_display.show_differences(differences, sys.stderr)
        raise MismatchError(
            f"{file} was made for another environment: {', '.join(one.name for one in differences)}",
            "tcdeploy cache why tells what it would miss; --any-environment unpacks it all the same",
        )
    cache_display.show_unpacked(put(file, folder, trusted, allow_unsigned), folder, json)


@app.command("verify")
def verify(
    target: Target,
    run: Annotated[bool, typer.Option("--run", help="Start it, and compare its answers with the packer's")] = False,
    model: Annotated[str | None, typer.Option(help="With --run: the model's place here, if it is another")] = None,
    allow_unsigned: AllowUnsigned = False,
    trusted_keys: TrustedKeys = None,
    json: Json = False,
) -> None:
    """Check every byte of a bundle or a cache folder, and who signed it."""
    from tcdeploy.bundle import signing
    from tcdeploy.bundle import verify as verifying
    from tcdeploy.cli import cache_display

    if model is not None and not run:
        raise UsageError("--model is for --run", "add --run, or leave it out")
    trusted = trusted_keys or signing.default_trusted_keys_folder()
    if target.is_dir():
        verified = verifying.verify_folder(target, trusted, allow_unsigned)
    else:
        verified = [verifying.verify_bundle(target, trusted, allow_unsigned)]
    replayed = {}
    if run:
        with _temporary_copy(target, trusted, allow_unsigned) as folder:
            replayed = {one.plan_key: _replay(folder, one.plan_key, model) for one in verified}
    cache_display.show_verified(target, verified, replayed, json)
    wrong = [f"{key} {one.bucket}" for key, found in replayed.items() for one in found if not one.passed]
    if wrong:
        raise IntegrityError(f"answers differ from the packer's: {', '.join(wrong)}", "the same weights? --model")


@contextlib.contextmanager
def _temporary_copy(target: Path, trusted: Path, allow_unsigned: bool) -> Iterator[Path]:
    """A copy of a cache folder, or a bundle unpacked, for the time being: a start writes into what it starts from."""
    from tcdeploy.bundle.unpack import unpack as put

    with tempfile.TemporaryDirectory(prefix="tcdeploy-verify-") as place:
        if target.is_dir():
            shutil.copytree(target, place, dirs_exist_ok=True)
        else:
            put(target, Path(place), trusted, allow_unsigned)
        yield Path(place)


def _replay(folder: Path, plan_key: str, model: str | None) -> list[Any]:
    from tcdeploy.bundle.verify import compare_top_tokens, packed_manifest
    from tcdeploy.cli import display

    packed = packed_manifest(folder, plan_key)
    flags = {"cache_dir": str(folder), **({"model": model} if model else {})}
    with display.show_progress() as progress:
        from tcdeploy import pipeline

        deployment = pipeline.prepare(build_recipe(flags, defaults=_origin_recipe(packed)), progress)
    missed = [record.bucket for record in deployment.records if record.outcome not in ("hit", "reused")]
    if missed:
        raise ThresholdError(f"here {', '.join(missed)} had to compile", "tcdeploy cache why tells what differs")
    return compare_top_tokens(packed, deployment.records)


@app.command("why")
@recipe_options_command
def why(options: RecipeOptions, target: Target, json: Json = False) -> None:
    """Say before any start whether it will be a hit here, which factor differs, and what a miss costs; 3: a miss.

    Without MODEL and flags: for the recipe that the cache was made with.
    """
    from tcdeploy.bundle.why import forecast, merge_forecasts
    from tcdeploy.cli import cache_display

    manifests = _read_manifests(target)
    recipe = options.build(defaults=_origin_recipe(manifests[0]) if len(manifests) == 1 else None)
    from tcdeploy import pipeline

    planned = pipeline.decide(recipe)
    forecasts = []
    for manifest in manifests:
        seen = planned
        if not planned.environment.compiler and any(file.path.startswith("toolchain/") for file in manifest.files):
            seen = pipeline.with_cxx_compiler(planned, str(manifest.environment["compiler"]))  # it brings a stand-in
        forecasts.append(forecast(manifest, seen.plan, seen.environment, pipeline.origin_of(seen)))
    found = merge_forecasts(forecasts)
    cache_display.show_forecast(found, json)
    if found.misses:
        raise MismatchError(
            f"{len(found.misses)} of {len(found.buckets)} buckets would miss, for some {found.miss_seconds:.0f} s",
            "tcdeploy warm with the same flags fills the cache",
        )


@app.command("ls")
def list_cache(folder: Folder, json: Json = False) -> None:
    """List the plans of a cache folder."""
    from tcdeploy.cache.inventory import list_plans
    from tcdeploy.cli import cache_display

    cache_display.show_plans(list_plans(_require_cache_folder(folder)), json)


@app.command("du")
def disk_usage(folder: Folder, json: Json = False) -> None:
    """Say what a cache folder holds, by kind."""
    from tcdeploy.cache.inventory import usage_by_kind
    from tcdeploy.cli import cache_display

    cache_display.show_usage(usage_by_kind(_require_cache_folder(folder)), json)


@app.command("gc")
def collect_garbage(
    folder: Folder,
    older_than: Annotated[str | None, typer.Option(help="Plans that nobody started for this long: 30d, 12h")] = None,
    max_size: Annotated[str | None, typer.Option(help="Keep at most this, those used last first: 5g, 500m")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go")] = False,
    json: Json = False,
) -> None:
    """Remove plans by age and size, and what no plan names; never what a process runs from or a bundle put there."""
    from tcdeploy.cache.inventory import collect_garbage as remove
    from tcdeploy.cli import cache_display

    seconds = _parse_quantity(older_than, ("s", "min", "h", "d"), "--older-than 30d")
    size = _parse_quantity(max_size, ("", "k", "m", "g"), "--max-size 5g")
    removed = remove(_require_cache_folder(folder), seconds, None if size is None else int(size), dry_run)
    cache_display.show_removed(removed, dry_run, json)


@app.command("diff")
def diff(
    first: Target,
    second: Annotated[Path, typer.Argument(help="Another one", show_default=False)],
    json: Json = False,
) -> None:
    """Compare what two bundles or cache folders of one plan each were made from, and their files."""
    from tcdeploy.bundle.compare import compare_manifests
    from tcdeploy.cli import cache_display

    cache_display.show_comparison(compare_manifests(_read_single_manifest(first), _read_single_manifest(second)), json)


@app.command("push")
def push(
    file: Annotated[Path, typer.Argument(help="A bundle", show_default=False)],
    url: Annotated[str, typer.Argument(help="A folder: a path, s3://, gs://, hf://, oci://", show_default=False)],
    json: Json = False,
) -> None:
    """Store a bundle under the digest of its bytes; one that is there already is left alone."""
    from tcdeploy.cli import cache_display
    from tcdeploy.remote.transfer import push as store

    if file.is_dir():
        raise UsageError(f"{file} is a folder", "pack a bundle first: tcdeploy cache pack -o FILE.tcb")
    (manifest,) = _read_manifests(file)
    cache_display.show_pushed(store(file, url, str(manifest.plan["key"])), json)


@app.command("pull")
def pull(
    url: Annotated[str, typer.Argument(help="A bundle's URL, as push or find told it", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write", metavar="FILE.tcb")],
) -> None:
    """Fetch a bundle, whole and with the digest that its name says."""
    from tcdeploy.remote.transfer import pull as fetch

    fetch(url, out)
    print(f"{out}: {out.stat().st_size} bytes, as its name says")


@app.command("find")
def find(
    url: Annotated[str, typer.Argument(help="A folder of bundles", show_default=False)],
    plan: Annotated[str, typer.Option("--plan", help="The plan's key", metavar="KEY")],
) -> None:
    """List the bundles of a plan, the newest first. URLs are shown without the secrets that URL holds."""
    from tcdeploy.remote.transfer import find as search
    from tcdeploy.remote.transfer import redacted

    for one in search(url, plan):
        print(redacted(one))


@app.command("keygen")
def generate_key(name: Annotated[Path, typer.Argument(help="NAME.key and NAME.pub are written")]) -> None:
    """Make a key pair to sign bundles with. NAME.key is the secret: give it to nobody."""
    from tcdeploy.bundle.signing import generate_key as generate

    print(f"{name}.key {name}.pub {generate(name)}")


@app.command("sign")
def sign(
    file: Annotated[Path, typer.Argument(help="A bundle", show_default=False)],
    key: Annotated[Path, typer.Option("--key", help="The secret key", metavar="NAME.key")],
) -> None:
    """Sign a bundle in its place."""
    from tcdeploy.bundle.pack import add_signature

    add_signature(file, key)
    print(f"{file} is signed")


@app.command("trust")
def trust(
    name: Annotated[str, typer.Argument(help="What to call the signer")],
    file: Annotated[Path, typer.Argument(help="The public key", metavar="FILE.pub")],
    trusted_keys: TrustedKeys = None,
) -> None:
    """Believe bundles that this key signed."""
    from tcdeploy.bundle import signing

    key = signing.trust(name, file, trusted_keys or signing.default_trusted_keys_folder())
    print(f"{key.name} {key.fingerprint} is trusted")


def _is_cache_folder(path: Path) -> bool:
    return (path / "manifests").is_dir()


def _require_cache_folder(folder: Path) -> Path:
    if not _is_cache_folder(folder):
        raise UsageError(f"{folder} is no cache folder", "name one that tcdeploy filled, such as ~/.cache/tcdeploy")
    return folder


def _read_manifests(target: Path) -> list[Manifest]:
    """Of a bundle (its signature is not judged: nothing of it runs) or of all plans of a folder."""
    from tcdeploy.bundle.container import read_signed_header
    from tcdeploy.bundle.header import parse_header
    from tcdeploy.cache.manifest import read_manifests

    if target.is_dir():
        found = list(read_manifests(target).values())
        if not found:
            raise UsageError(f"the folder {target} holds no plan that finished warming", "tcdeploy warm --cache-dir")
        return found
    try:
        with open(target, "rb") as file:
            return [parse_header(read_signed_header(file, str(target)), str(target)).manifest]
    except OSError as error:
        raise UsageError(f"{target} cannot be read: {error.strerror}", "name a bundle or a cache folder") from error


def _read_single_manifest(target: Path) -> Manifest:
    manifests = _read_manifests(target)
    if len(manifests) > 1:
        raise UsageError(f"{target} holds {len(manifests)} plans", "compare bundles, or folders of one plan")
    return manifests[0]


def _read_plan_manifest(folder: Path, plan_key: str) -> Manifest:
    from tcdeploy.cache.manifest import manifest_path, read_manifest

    manifest = read_manifest(manifest_path(folder, plan_key))
    if manifest is None:
        raise UsageError(f"the folder {folder} knows no plan {plan_key}", "tcdeploy cache ls shows what is there")
    return manifest


def _origin_recipe(manifest: Manifest) -> dict[str, Any]:
    """The recipe that a cache was made with, but for the place it was made in."""
    return {key: value for key, value in manifest.origin.recipe.items() if value is not None and key != "cache_dir"}


def _parse_quantity(text: str | None, units: tuple[str, ...], example: str) -> float | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]*)", text.lower())
    if match is None or match[2] not in units:
        raise UsageError(f"{text!r} is no such quantity", example)
    return float(match[1]) * UNITS[match[2]]
