"""`tcdeploy cache`: names the commands on cache folders and bundles.

Only commands that start a model or plan one import torch: `pack`, `why` and `verify --run`.
"""

from __future__ import annotations

import typer

from tcdeploy.cli.commands import LazyGroup


class _Commands(LazyGroup):
    sources = {
        "pack": "tcdeploy.cli.cache_bundle:pack",
        "unpack": "tcdeploy.cli.cache_bundle:unpack",
        "verify": "tcdeploy.cli.cache_bundle:verify",
        "why": "tcdeploy.cli.cache_inspect:why",
        "ls": "tcdeploy.cli.cache_inspect:list_cache",
        "du": "tcdeploy.cli.cache_inspect:disk_usage",
        "gc": "tcdeploy.cli.cache_inspect:collect_garbage",
        "diff": "tcdeploy.cli.cache_inspect:diff",
        "push": "tcdeploy.cli.remote_cache:push",
        "pull": "tcdeploy.cli.remote_cache:pull",
        "find": "tcdeploy.cli.remote_cache:find",
        "keygen": "tcdeploy.cli.cache_bundle:generate_key",
        "sign": "tcdeploy.cli.cache_bundle:sign",
        "trust": "tcdeploy.cli.cache_bundle:trust",
    }


app = typer.Typer(
    cls=_Commands,
    name="cache",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Pack, verify, list, clean up and share compile caches, and predict their hits.",
)
