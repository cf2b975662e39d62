"""Modules that touch a cache folder open its files with `open_regular`, and the exceptions are listed with a reason."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from tcdeploy.host.durable import write_durably
from tcdeploy.host.regular_file import UnsafeFileError, open_regular, read_regular
from tests.test_import_graph import ROOT, modules_of

# Modules whose files lie in a cache folder, a staging folder, a bundle, a remote folder or the folder of trusted keys.
PREFIXES = (
    "cache.", "bundle.", "remote.", "host.durable", "start.record.record", "start.record.recorder",
    "start.record.lookup", "start.packages", "server.observe.missed_shapes", "engine.check.stored_reference",
    "programs.packages", "programs.aot", "text.stored_tokenizer", "doctor.cache_folder", "cli.cache",
    "cli.remote_cache", "torch_compat.triton.cache", "start.loaded_start", "start.model_code", "start.workers.process",
    "start.workers.worker", "start.package_build",
)  # fmt: skip
OPENING = {
    "open", "fdopen", "read_text", "read_bytes", "write_text", "write_bytes", "copy", "copy2", "copyfile", "copytree",
    "mmap", "safe_open", "load_file", "save_file", "from_file", "touch", "FileIO", "mkstemp", "NamedTemporaryFile",
    "TemporaryFile",
}  # fmt: skip
STAGING = "in the private staging folder, whose files were compared during the copy"
SOURCES = "source files of this package"
ALLOWED = {
    ("cache.folder.access", "TemporaryFile"): "a new file with a random name",
    ("cache.trust.signing", "read_bytes"): "keys that the user names, which may come from a pipe",
    ("cache.trust.signing", "fdopen"): "a new secret key, opened with O_EXCL",
    ("cache.trust.signing", "open"): "a new secret key, opened with O_EXCL",
    ("cache.trust.signing", "write_bytes"): "a new public key beside it, in a folder that the user names",
    ("cache.staging.folder", "open"): "the lock of a new staging folder, opened with O_EXCL",
    ("cli.cache_bundle", "copytree"): "copies with `copy_regular`",
    ("start.package_build", "write_text"): "the recipe of a subprocess, in a temporary folder",
    ("start.package_build", "TemporaryFile"): "the report of a subprocess, a new file with a random name",
    ("start.workers.process", "write_text"): "config.json for a worker, in a temporary folder",
    ("start.workers.process", "open"): "a pipe",
    ("start.workers.worker", "open"): "a pipe",
    ("programs.aot", "write_text"): STAGING,
    ("programs.packages", "open"): STAGING,
    ("programs.packages", "read_text"): STAGING,
    ("start.loaded_start", "read_bytes"): SOURCES,
    ("host.durable", "open"): "flushes a file that was written, or a folder; does not wait",
    ("engine.check.stored_reference", "read_bytes"): SOURCES,
    ("engine.check.stored_reference", "safe_open"): STAGING,
    ("engine.check.stored_reference", "save_file"): STAGING,
    ("text.stored_tokenizer", "from_file"): f"of the model, or {STAGING}",
    ("start.packages", "load_file"): STAGING,
    ("remote.fsspec_folder", "open"): "of a remote file system",
    ("remote.oci", "open"): "the bundle that is pushed",
    ("remote.registry_login", "read_text"): "the login of docker, in the user's folder",
    ("remote.transfer", "FileIO"): "a new file of `temporary_file`",
    ("start.record.record", "write_text"): STAGING,
    ("start.record.record", "write_bytes"): STAGING,
    ("torch_compat.triton.cache", "read_text"): STAGING,
}


def opened_by(tree: ast.Module) -> set[str]:
    """The functions in OPENING that a module calls or passes on."""
    names = (
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
    )
    return OPENING.intersection(names)


def uses(root: Path) -> set[tuple[str, str]]:
    """(module, function) for all modules that touch a cache folder."""
    modules = {
        name: tree
        for name, tree in modules_of(root).items()
        if f"{name}.".startswith(PREFIXES) or name.startswith(PREFIXES)
    }
    return {(name, function) for name, tree in modules.items() for function in opened_by(tree)}


def test_every_file_of_a_cache_folder_is_opened_by_one_function() -> None:
    assert uses(ROOT) == set(ALLOWED), "use open_regular, or list the exception here with its reason"


@pytest.mark.parametrize("call", ["open('x')", "path.read_text()", "shutil.copytree(a, b)", "reader = Path.read_bytes"])
def test_another_way_to_open_a_file_is_found(tmp_path: Path, call: str) -> None:
    package = tmp_path / "tcdeploy" / "cache"
    package.mkdir(parents=True)
    (package / "new.py").write_text(call)
    assert {module for module, _ in uses(tmp_path)} == {"cache.new"}


def test_a_path_that_is_not_a_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo", "."):
        for mode in ("rb", "r+b", "ab"):
            with pytest.raises(UnsafeFileError, match="symbolic link|not a regular file"):
                open_regular(tmp_path / name, mode)  # type: ignore[arg-type]
    with pytest.raises(UnsafeFileError, match="not a regular file"):
        read_regular("/dev/zero", follows_links=True)
    assert read_regular(tmp_path / "link", follows_links=True) == b"content"


def test_a_file_over_the_limit_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    assert read_regular(tmp_path / "file", max_bytes=7) == b"content"
    with pytest.raises(UnsafeFileError, match="it has 7 bytes, and the limit is 6"):
        read_regular(tmp_path / "file", max_bytes=6)


def test_a_high_limit_takes_no_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    assert read_regular(tmp_path / "file", max_bytes=1 << 60) == b"content"


def test_a_hard_link_to_another_file_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "private").write_bytes(b"secret")
    (tmp_path / "link").hardlink_to(tmp_path / "private")
    with pytest.raises(UnsafeFileError, match="it has 2 hard links"):
        open_regular(tmp_path / "link", "ab", must_own=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change owners")
def test_a_file_of_another_user_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.chown(tmp_path / "file", 12003, 12003)
    with pytest.raises(UnsafeFileError, match="belongs to another user, with the id 12003"):
        open_regular(tmp_path / "file", "ab", must_own=True)


def test_a_written_file_replaces_a_link_of_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "private").write_bytes(b"secret")
    (tmp_path / "new").symlink_to("private")
    write_durably(tmp_path / "new", b"content")
    assert (tmp_path / "private").read_bytes() == b"secret" and (tmp_path / "new").read_bytes() == b"content"
