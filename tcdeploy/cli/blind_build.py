"""The part of `warm` and `cache pack` that builds for a GPU which this machine does not have (`--target-gpu`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tcdeploy.errors import UsageError
from tcdeploy.host.temporary_files import temporary_folder
from tcdeploy.planning.recipe import Recipe

if TYPE_CHECKING:
    from tcdeploy.host.progress import Progress
    from tcdeploy.start.blind.process import BlindResult


def build_for(
    recipe: Recipe, target: str, winners: Path | None, trusted_keys: Path | None, progress: Progress
) -> BlindResult:
    """Build packages, or with `--programs jit` jit programs, of a recipe for a GPU. Raises TcdeployError."""
    from tcdeploy.start.blind.process import build_blind

    with _winners_folder(winners, trusted_keys) as folder:
        return build_blind(recipe, target, progress, folder)


def check_target_options(
    recipe: Recipe, target: str | None, winners: Path | None, excluded: Mapping[str, object]
) -> None:
    """Raise UsageError for options that a build for another GPU does not take. `excluded`: their values by name."""
    excluded = {**excluded, "--tune-seconds": recipe.tune_seconds}
    if winners is not None and target is None:
        raise UsageError("--winners needs --target-gpu", "add --target-gpu NAME, or remove --winners")
    if target is not None and (given := [name for name, value in excluded.items() if value]):
        raise UsageError(
            f"--target-gpu excludes {given[0]}, which needs the GPU", f"remove {given[0]}, or add --dry-run"
        )


@contextlib.contextmanager
def _winners_folder(winners: Path | None, trusted_keys: Path | None) -> Iterator[Path | None]:
    """The autotuner results of a bundle in a temporary folder; a cache folder itself. Raises as `open_bundle`.

    The bundle need not be signed: its results are numbers, and no code of it is used.
    """
    if winners is None or winners.is_dir():
        yield winners
        return
    from tcdeploy.bundle.container import read_files
    from tcdeploy.bundle.unpack import open_bundle
    from tcdeploy.cache.files.records import is_winner
    from tcdeploy.cache.trust.signing import default_trusted_keys_folder

    opened = open_bundle(winners, trusted_keys or default_trusted_keys_folder(), allow_unsigned=True)
    with temporary_folder("winners") as folder:
        for file, chunks in read_files(winners, opened.signed_header, opened.header.payload_files):
            content = b"".join(chunks)
            if is_winner(file.path):
                path = folder / file.path
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        yield folder
