"""Precompiled C++ headers in the cache folder: hard links in the staging folders of starts that compile.

    ROOT/precompiled_headers/NAME           the source
    ROOT/precompiled_headers/NAME.gch       the compiled form, 156 MB: an image of the compiler's memory
    ROOT/precompiled_headers/NAME.gch.json  the size and sha256 of both

Does not import torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from dataclasses import asdict
from pathlib import Path

from tcdeploy.cache.files.records import FileRecord, find_damage, hash_files, is_plain_record
from tcdeploy.cache.folder.layout import HEADERS_DIR
from tcdeploy.cache.trust.ownership import FOLDER_MODE
from tcdeploy.host.durable import sync, write_durably
from tcdeploy.host.regular_file import read_regular

log = logging.getLogger("tcdeploy.cache")


def link_headers(root: Path, staging: Path) -> None:
    """Hard-link the undamaged headers of the cache folder into a staging folder. Damaged ones are deleted."""
    for compiled in (root / HEADERS_DIR).glob("*.gch"):
        files = _read_records(compiled)
        if files is None or find_damage(root / HEADERS_DIR, files) or not _is_own(root / HEADERS_DIR, files):
            log.warning("the precompiled header %s is damaged, and is compiled again", compiled)
            for path in (compiled, compiled.with_suffix(""), _record_path(compiled)):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
        else:
            _link(files, root / HEADERS_DIR, staging / HEADERS_DIR)


def _is_own(folder: Path, files: tuple[FileRecord, ...]) -> bool:
    """Whether no other user owns a file: a link shares the file, which its owner could change after the comparison."""
    with contextlib.suppress(OSError):
        return all((folder / file.path).lstat().st_uid in (0, os.geteuid()) for file in files)
    return False


def publish_headers(staging: Path, root: Path) -> None:
    """Hard-link the headers that a successful start compiled into the cache folder, unless it has them."""
    for compiled in (staging / HEADERS_DIR).glob("*.gch"):
        target = root / HEADERS_DIR / compiled.name
        if all(path.exists() for path in (target, target.with_suffix(""), _record_path(target))):
            continue
        with contextlib.suppress(OSError):  # the next start precompiles again
            files = hash_files(compiled.parent, [compiled.with_suffix("").name, compiled.name])
            for path in (compiled.with_suffix(""), compiled):
                (target.parent / path.name).unlink(missing_ok=True)
                sync(path)
            if _link(files, compiled.parent, target.parent):
                write_durably(_record_path(target), json.dumps([asdict(file) for file in files]).encode())


def _link(files: tuple[FileRecord, ...], source: Path, target: Path) -> bool:
    """Hard-link files into another folder. Returns whether they are there: some file systems have no hard links."""
    try:
        target.mkdir(mode=FOLDER_MODE, exist_ok=True)
        for file in files:
            with contextlib.suppress(FileExistsError):
                os.link(source / file.path, target / file.path)
    except OSError:
        return False
    return True


def _record_path(compiled: Path) -> Path:
    return compiled.with_name(f"{compiled.name}.json")


def _read_records(compiled: Path) -> tuple[FileRecord, ...] | None:
    """The records of a header's two files; None if they are missing or damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        files = tuple(FileRecord(**record) for record in json.loads(read_regular(_record_path(compiled), 1 << 20)))
        names = {compiled.name, compiled.with_suffix("").name}
        if all(map(is_plain_record, files)) and {file.path for file in files} == names:
            return files
    return None
