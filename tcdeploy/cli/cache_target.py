"""Arguments that name a cache folder or a bundle, and the manifests read from them. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tcdeploy.errors import UsageError
from tcdeploy.planning.environment import find_cache_dir

if TYPE_CHECKING:
    from tcdeploy.cache.record.manifest import Manifest

Folder = Annotated[Path, typer.Argument(help="Cache folder", metavar="FOLDER", show_default=False)]
OptionalFolder = Annotated[
    Path | None, typer.Argument(help="Cache folder; default: that of --cache-dir", metavar="FOLDER", show_default=False)
]
CacheDir = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir",
        help="Cache folder, as in `warm` and `serve`; default: the folder that they use",
        envvar="TCDEPLOY_CACHE_DIR",
        show_default=False,
    ),
]
TrustCacheDir = Annotated[
    bool,
    typer.Option(
        "--trust-cache-dir",
        help="Use the cache folder even if other users can change it",
        envvar="TCDEPLOY_TRUST_CACHE_DIR",
    ),
]
BundleFile = Annotated[Path, typer.Argument(help="Bundle", metavar="FILE.tcb", show_default=False)]
Target = Annotated[Path, typer.Argument(help="Bundle or cache folder", metavar="TARGET", show_default=False)]


def is_cache_folder(path: Path) -> bool:
    return (path / "manifests").is_dir()


def find_cache_folder(folder: Path | None, cache_dir: Path | None = None) -> Path:
    """FOLDER, else --cache-dir, else the default folder. Raises UsageError if it is not a cache folder."""
    found = folder or (cache_dir or Path(find_cache_dir(None)[0])).expanduser()
    if not is_cache_folder(found):
        raise UsageError(f"{found} is not a cache folder", "name one that tcdeploy filled, such as ~/.cache/tcdeploy")
    return found


def read_manifests(target: Path) -> list[Manifest]:
    """The manifests of all plans in a bundle or a folder. Raises UsageError and MismatchError.

    A bundle's signature is not checked, since nothing from the bundle is executed.
    """
    from tcdeploy.cache.record import manifest
    from tcdeploy.cache.record.bundle_header import parse_header
    from tcdeploy.cache.trust.signing import read_bundle_header

    if target.is_dir():
        manifests = list(manifest.read_manifests(target).values())
        if not manifests:
            raise manifest.no_plan_error(target)
        return manifests
    try:
        return list(parse_header(read_bundle_header(target), str(target)).manifests.values())
    except OSError as error:
        raise UsageError(f"{target} cannot be read: {error.strerror}", "name a bundle or a cache folder") from error


def read_plan_manifests(target: Path) -> list[Manifest]:
    """As `read_manifests`, for a target that must hold one plan, or one with jit programs and one with packages."""
    manifests = read_manifests(target)
    if shared_recipe(manifests) is None:
        hint = "compare bundles, or folders that one `tcdeploy warm` has filled"
        raise UsageError(f"{target} holds {len(manifests)} plans, of more than one recipe", hint)
    return manifests


def shared_recipe(manifests: Sequence[Manifest]) -> dict[str, Any] | None:
    """The recipe that filled a cache with one plan, or with jit programs and packages; None for other plans."""
    from tcdeploy.bundle.pack import jit_and_packages

    if len(manifests) == 1:
        return original_recipe(manifests[0])
    pair = jit_and_packages(manifests)
    return None if pair is None else {**original_recipe(pair[0]), "programs": "auto"}


def original_recipe(manifest: Manifest) -> dict[str, Any]:
    """The recipe that filled a cache, without the keys for that cache's location and use."""
    excluded = ("cache_dir", "trust_cache_dir", "require_signed", "compile")
    return {key: value for key, value in manifest.origin.recipe.items() if value is not None and key not in excluded}
