"""Makes a folder with config.json and the tokenizer of a GGUF model from the metadata of its file.

The rest of a start reads that folder as it reads the folder of any other model, so plans, records, packages and
`cache why` need no case for GGUF. Folders lie in $XDG_CACHE_HOME/tcdeploy-gguf, outside of the cache folder, whose
garbage collection would delete them. The name of a folder is a digest of what it was made from, so a start finds the
folder of an earlier one. Imports no torch, because starts from packages need the folder too.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from tcdeploy.errors import ModelError
from tcdeploy.host.temporary_files import temporary_folder
from tcdeploy.models.gguf.config import config_from_metadata
from tcdeploy.models.gguf.tokenizer import tokenizer_from_metadata
from tcdeploy.models.weights.gguf_file import read_gguf, read_gguf_metadata
from tcdeploy.models.weights.weight_paths import gguf_paths
from tcdeploy.planning.environment import user_cache_dir

VERSION = 1  # increased with every change of the files' content
FOLDERS = "tcdeploy-gguf"
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
WRITE_HINT = "set XDG_CACHE_HOME to a writable folder, or put config.json and the tokenizer's files beside the model"


def folder_from_metadata(model: str, folder: Path) -> Path | None:
    """The folder for a model without config.json; None if its weights are not GGUF.

    Raises ModelError if the metadata does not describe a supported model, or the folder cannot be written.
    """
    try:
        paths = gguf_paths(model, folder)
    except OSError:  # unreadable; reported as a folder without config.json
        return None
    if not paths:
        return None
    for path in paths:
        if not path.is_file():
            raise ModelError(f"{model} lacks {path.name}, a part of its weights", "download all parts of the model")
    try:
        folder = Path(user_cache_dir(), FOLDERS, _digest(tuple((path, path.stat().st_mtime_ns) for path in paths)))
        if not _is_complete(folder):
            _write(folder, paths)
        return folder
    except OSError as error:
        raise ModelError(f"cannot read {paths[0]}, or store its config: {error}", WRITE_HINT) from error


@functools.lru_cache(maxsize=8)
def _digest(files: tuple[tuple[Path, int], ...]) -> str:
    """Of all that a folder is made from: headers, and the tensors whose values are part of a config. Raises OSError.

    files: the path and time of change of each, so that another file with the same path is read.
    """
    digest = hashlib.sha256(f"{VERSION}".encode())
    for path, _ in files:
        header = read_gguf(path)
        with path.open("rb") as file:
            digest.update(file.read(header.header_bytes))
            for tensor in header.tensors:
                if tensor.name.startswith("rope_"):
                    file.seek(tensor.begin)
                    digest.update(file.read(tensor.end - tensor.begin))
    return digest.hexdigest()[:32]


def _write(folder: Path, paths: Sequence[Path]) -> None:
    """paths: of the model's files. The first has the metadata."""
    path, tensors = paths[0], {tensor.name: (path, tensor) for path in paths for tensor in read_gguf(path).tensors}
    metadata = read_gguf_metadata(path)
    contents = (config_from_metadata(path, metadata, tensors), *tokenizer_from_metadata(path, metadata))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder("gguf", folder.parent) as temporary:
        for name, content in zip(FILES, contents, strict=True):
            (temporary / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        if folder.exists() and not _is_complete(folder):
            shutil.rmtree(folder)
        try:
            temporary.rename(folder)
        except OSError:
            if not _is_complete(folder):  # otherwise another process was faster
                raise


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)
