"""What `warm` and `serve` share: a cache that comes from elsewhere, and one that goes there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tcdeploy.errors import UsageError
from tcdeploy.planning.recipe import Recipe

CacheFrom = Annotated[
    str | None,
    typer.Option("--cache-from", help="Bundle, or folder of bundles, to start from", metavar="URL"),
]
AllowUnsigned = Annotated[bool, typer.Option("--allow-unsigned", help="Run code that nobody you trust vouches for")]
TrustedKeys = Annotated[
    Path | None,
    typer.Option(help="Folder of trusted keys; default: ~/.config/tcdeploy/trusted", envvar="TCDEPLOY_TRUSTED_KEYS"),
]


def fetch_cache(recipe: Recipe, source: str, trusted_keys: Path | None, allow_unsigned: bool) -> float:
    """Before a start; the seconds that it took. What differs is shown as a table on stderr."""
    from tcdeploy.bundle import signing
    from tcdeploy.bundle.fetch import EnvironmentMismatchError, fetch
    from tcdeploy.cli import cache_display

    try:
        fetched = fetch(recipe, source, trusted_keys or signing.default_trusted_keys_folder(), allow_unsigned)
    except EnvironmentMismatchError as error:
        cache_display.show_differences(error.differences, sys.stderr)
        raise
    cache_display.show_fetched(fetched)
    return fetched.seconds


def push_cache(cache_dir: str, plan_key: str, destination: str, key: Path | None) -> None:
    """After a start, when its deployment was let go."""
    from tcdeploy.bundle.fetch import pack_and_push
    from tcdeploy.cli import cache_display

    cache_display.show_cache_pushed(pack_and_push(cache_dir, plan_key, destination, key))


def parse_seconds(text: str) -> float:
    """`6s` or `6`. Raises UsageError."""
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"{text!r} is no number of seconds", "--budget 6s")
    return seconds
