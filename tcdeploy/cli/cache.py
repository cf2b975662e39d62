"""`tcdeploy cache`: registers the commands on cache folders and bundles.

Only commands that start a model or plan one import torch: `pack`, `why` and `verify --run`.
"""

from __future__ import annotations

import typer

from tcdeploy.cli import cache_bundle, cache_inspect, remote_cache

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Pack, verify, list, clean up and share compile caches, and predict their hits.",
)
app.command("pack")(cache_bundle.pack)
app.command("unpack")(cache_bundle.unpack)
app.command("verify")(cache_bundle.verify)
app.command("why")(cache_inspect.why)
app.command("ls")(cache_inspect.list_cache)
app.command("du")(cache_inspect.disk_usage)
app.command("gc")(cache_inspect.collect_garbage)
app.command("diff")(cache_inspect.diff)
app.command("push")(remote_cache.push)
app.command("pull")(remote_cache.pull)
app.command("find")(remote_cache.find)
app.command("keygen")(cache_bundle.generate_key)
app.command("sign")(cache_bundle.sign)
app.command("trust")(cache_bundle.trust)
