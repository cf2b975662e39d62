"""Remote caches: `tcdeploy cache push`, `pull` and `find`, and what `warm` and `serve` share to fetch and push."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tcdeploy.cli.cache_target import BundleFile, read_manifests
from tcdeploy.cli.help_panels import ADVANCED
from tcdeploy.cli.report_options import Json
from tcdeploy.errors import UsageError
from tcdeploy.planning.recipe import Recipe
from tcdeploy.remote.address import Address, CacheSource

if TYPE_CHECKING:
    from tcdeploy.host.progress import Progress

CacheFrom = Annotated[
    str | None, typer.Option(help="Fetch the cache from this bundle, or from a remote folder of bundles", metavar="URL")
]
AllowUnsigned = Annotated[
    bool,
    typer.Option("--allow-unsigned", help="Accept a bundle without a trusted signature; its code runs on this machine"),
]
AllowRollback = Annotated[
    bool, typer.Option("--allow-rollback", help="Accept a bundle that is older than the one it replaces"), ADVANCED
]
TrustedKeys = Annotated[
    Path | None,
    typer.Option(
        help="Folder of trusted public keys [default: ~/.config/tcdeploy/trusted]",
        envvar="TCDEPLOY_TRUSTED_KEYS",
        show_default=False,
    ),
]


def cache_source(cache_from: str | None, allow_unsigned: bool, allow_rollback: bool) -> CacheSource | None:
    """Where the cache is fetched from. Raises UsageError for options that have no effect without --cache-from."""
    if cache_from is not None:
        return CacheSource(cache_from, allow_unsigned, allow_rollback)
    for name, is_set in (("--allow-unsigned", allow_unsigned), ("--allow-rollback", allow_rollback)):
        if is_set:
            raise UsageError(f"{name} needs --cache-from", f"add --cache-from URL, or remove {name}")
    return None


def fetch_cache(recipe: Recipe, cache: CacheSource, trusted_keys: Path | None, progress: Progress) -> float:
    """Fetch the plan's bundle into the cache folder, and return the seconds it took.

    A bundle from another environment is refused; the differences are printed to stderr as a table.
    """
    from tcdeploy.start.prepare import begin_start

    begin_start(recipe)  # the next line imports torch
    from tcdeploy.bundle.fetch import EnvironmentMismatchError, fetch
    from tcdeploy.cli import cache_display

    progress.stage("fetch")
    try:
        fetched = fetch(recipe, cache, trusted_keys, progress)
    except EnvironmentMismatchError as error:
        cache_display.show_differences(error.differences, sys.stderr)
        raise
    cache_display.show_fetched(fetched)
    return fetched.seconds


def push(
    file: BundleFile,
    url: Annotated[
        str,
        typer.Argument(help="Remote folder: a path, s3://, gs://, hf:// or oci://", metavar="URL", show_default=False),
    ],
    json: Json = False,
) -> None:
    """Push a bundle, named by the digest of its bytes. A bundle that is already there is not uploaded again."""
    from tcdeploy.cli import cache_display, display
    from tcdeploy.remote import transfer

    if file.is_dir():
        raise UsageError(f"{file} is a folder", f"pack a bundle first: tcdeploy cache pack {file} -o FILE.tcb")
    pushed = transfer.push(file, url, str(read_manifests(file)[0].plan["key"]))
    display.report("cache push", json, cache_display.format_pushed(pushed), **vars(pushed))


def pull(
    url: Annotated[
        str, typer.Argument(help="URL of a bundle, as printed by push or find", metavar="URL", show_default=False)
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write", metavar="FILE.tcb")],
    allow_rollback: AllowRollback = False,
    json: Json = False,
) -> None:
    """Pull a bundle, and check it against the digest in its name.

    If FILE.tcb is a bundle of the same plan, it is replaced only by one that is not older.
    """
    from tcdeploy.bundle.unpack import check_not_older
    from tcdeploy.cli.display import report
    from tcdeploy.remote import transfer

    transfer.pull(url, out, None if allow_rollback else lambda pulled: check_not_older(pulled, out))
    size, shown_url = out.stat().st_size, Address.parse(url).redacted
    report("cache pull", json, f"{out}: {size} bytes, digest verified", url=shown_url, path=out, bytes=size)


def find(
    url: Annotated[str, typer.Argument(help="Remote folder of bundles", metavar="URL", show_default=False)],
    plan: Annotated[
        str, typer.Option("--plan", help="Key of the plan, as cache ls and --json reports print it", metavar="KEY")
    ],
    json: Json = False,
) -> None:
    """List the bundles of a plan, newest first. Printed URLs do not contain the secrets of URL."""
    from tcdeploy.cli.display import report
    from tcdeploy.remote import transfer

    urls = [Address.parse(bundle_url).redacted for bundle_url in transfer.find(url, plan)]
    if urls or json:
        report("cache find", json, "\n".join(urls), plan_key=plan, bundles=[{"url": url} for url in urls])
