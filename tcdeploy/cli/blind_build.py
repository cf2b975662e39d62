"""The part of `warm` and `cache pack` that builds for a GPU which this machine does not have (`--target-gpu`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tcdeploy.cache.files.records import FileRecord, is_winner, stored_path
from tcdeploy.cache.record.manifest import Manifest, read_manifests
from tcdeploy.errors import MismatchError, UsageError
from tcdeploy.host.regular_file import read_regular
from tcdeploy.host.temporary_files import temporary_folder
from tcdeploy.planning.environment import GPU, is_same_model, parse_environment
from tcdeploy.planning.recipe import Recipe
from tcdeploy.start.blind.winners import measured_winners

if TYPE_CHECKING:
    from tcdeploy.host.progress import Progress
    from tcdeploy.start.blind.process import BlindResult


def build_for(
    recipe: Recipe, target: str, winners: Path | None, trusted_keys: Path | None, progress: Progress
) -> BlindResult:
    """Build packages, or with `--programs jit` jit programs, of a recipe for a GPU. Raises TcdeployError."""
    from tcdeploy.planning.gpu_description import read_gpu_description
    from tcdeploy.start.blind.process import build_blind

    gpu = read_gpu_description(target).gpu
    with winners_folder(winners, trusted_keys, gpu) as folder:
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
def winners_folder(winners: Path | None, trusted_keys: Path | None, gpu: GPU) -> Iterator[Path | None]:
    """A temporary folder with the autotuner results in a cache folder or bundle, of the plans for the same GPU model.

    A bundle need not be signed: its results are numbers, and no code of it is used. Raises as `open_bundle`,
    `read_manifests` and `measured_winners`, and MismatchError if all plans are for other GPUs.
    """
    if winners is None:
        yield None
        return
    results = _results_of_folder(winners, gpu) if winners.is_dir() else _results_of_bundle(winners, trusted_keys, gpu)
    with temporary_folder("winners") as folder:
        for name, content in results:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        measured_winners(folder)  # the build checks them too, but only after several seconds
        yield folder


def _results_of_folder(winners: Path, gpu: GPU) -> Iterator[tuple[str, bytes]]:
    for file in _measured_files(winners, read_manifests(winners).values(), gpu):
        with contextlib.suppress(FileNotFoundError):
            yield file.path, read_regular(winners / stored_path(winners, file))


def _results_of_bundle(winners: Path, trusted_keys: Path | None, gpu: GPU) -> Iterator[tuple[str, bytes]]:
    from tcdeploy.bundle.container import read_files
    from tcdeploy.bundle.unpack import open_bundle
    from tcdeploy.cache.trust.signing import default_trusted_keys_folder

    opened = open_bundle(winners, trusted_keys or default_trusted_keys_folder(), allow_unsigned=True)
    wanted = _measured_files(winners, opened.header.manifests.values(), gpu)
    for file, chunks in read_files(winners, opened.signed_header, opened.header.payload_files):
        content = b"".join(chunks)
        if file in wanted:
            yield file.path, content


def _measured_files(winners: Path, manifests: Iterable[Manifest], target: GPU) -> set[FileRecord]:
    """The autotuner results of the plans for the same GPU model. Raises MismatchError if there is no such plan.

    The file name of a result depends on the compute capability and the number of multiprocessors, but not on the GPU's
    name. Without this check, results of an H200 would be used for an H100.
    """
    plans = [(parse_environment(manifest.environment).gpus[:1], manifest.files) for manifest in manifests]
    fitting = [files for gpus, files in plans if any(is_same_model(gpu, target) for gpu in gpus)]
    if not fitting:
        measured = sorted({f"{gpu.name} ({gpu.multiprocessors} multiprocessors)" for gpus, _ in plans for gpu in gpus})
        raise MismatchError(
            f"{winners} has measurements of {', '.join(measured) or 'no GPU'}, and the build is for {target.name} "
            f"({target.multiprocessors} multiprocessors)",
            "pass a bundle or a cache folder that was warmed on such a GPU, or remove --winners",
        )
    return {file for files in fitting for file in files if is_winner(file.path)}
