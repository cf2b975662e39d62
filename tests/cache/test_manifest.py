"""A manifest survives a round trip, is replaced atomically, and any damage to it is an error."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import random
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.cache.files.records import FileRecord
from tcdeploy.cache.folder.layout import manifest_path
from tcdeploy.cache.record.manifest import (
    SCHEMA_VERSION,
    Manifest,
    Origin,
    diff_sources,
    manifest_text,
    no_plan_error,
    read_manifest,
    read_other_versions,
    write_manifest,
)
from tcdeploy.errors import IntegrityError, MismatchError, SpaceError, UsageError
from tcdeploy.host.regular_file import open_regular
from tcdeploy.planning.bucket_record import BucketRecord, GreedyTokens, Parity, Trial
from tcdeploy.planning.keys import CACHE_EPOCH
from tcdeploy.planning.plan import make_plan
from tests.machines import H100, LLAMA_8B, make_recipe

REPOSITORY = Path(__file__).resolve().parents[2]
EAGER_GREEDY_TOKENS = GreedyTokens(hashlib.sha256(b"[[1, 2]]").hexdigest(), (7, 3), (-0.25, -1.5))
RECORD = BucketRecord(
    bucket="prefill:512",
    outcome="miss",
    compile_seconds=12.5,
    capture_seconds=0.25,
    check_seconds=1.0,
    compiles=2,
    programs=1,
    cache_hits=0,
    cache_misses=2,
    graph_breaks=0,
    cudagraph_skips=0,
    captured=True,
    parity=Parity(512, "float32", 0.03, 1.5e-3, 2e-6, 1e-6, 0.02, 1e-6, 0.04, 4e-6, 4e-6, 0, 1, False, True),
    eager_greedy_tokens=EAGER_GREEDY_TOKENS,
    greedy_tokens=replace(EAGER_GREEDY_TOKENS, logprobs=(-0.2500001, -1.5)),
    peak_memory_bytes=17 << 30,
    variant="coordinate-descent",
    trials=(Trial("coordinate-descent", 5.5, 8.0), Trial("default", None, 2.0, "it does not compile")),
    graph_memory_bytes=1 << 20,
    cold_seconds=12.5,
)
WARM = replace(RECORD, bucket="decode:1", outcome="hit", compile_seconds=0.5, cold_seconds=None, compiled_ms=5.5)
RECIPE = make_recipe(context=4096)
PLAN = make_plan(RECIPE, H100, LLAMA_8B)
ORIGIN = Origin(
    asdict(RECIPE),
    {"model_type": "llama", "rope_theta": 500000.0},
    {"kernels/linear/ops.py": hashlib.sha256(b"sources").hexdigest()},
    {"epilogue_fusion": "True"},
    {"transformers.models.llama.modeling_llama": hashlib.sha256(b"model").hexdigest()},
)
FILES = (
    FileRecord("fxgraph/ab/fabc/def", 1234, hashlib.sha256(b"one").hexdigest()),
    FileRecord("xy/cxyz.main.so", 15_000, hashlib.sha256(b"two").hexdigest()),
)
MANIFEST = Manifest(
    asdict(PLAN), asdict(H100), ORIGIN, {"import": 3.0, "compile": 14.0}, (RECORD, WARM), FILES, 1 << 30
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return manifest_path(tmp_path, PLAN.key)


@pytest.fixture
def written(path: Path) -> Path:
    write_manifest(path, MANIFEST)
    return path


def names_beside(path: Path) -> list[str]:
    return sorted(item.name for item in path.parent.iterdir())


def as_read(manifest: Manifest) -> dict[str, Any]:
    """A manifest after a JSON round trip: tuples become lists."""
    return json.loads(json.dumps(asdict(manifest)))


def corruption(path: Path) -> IntegrityError:
    """The error that reading must raise; it names the file and the next command."""
    with pytest.raises(IntegrityError) as caught:
        read_manifest(path)
    assert caught.value.exit_code == 5
    assert str(path) in caught.value.message
    assert "--on-bad-cache rebuild" in caught.value.hint
    return caught.value


def change(path: Path, edit: Any) -> None:
    """Rewrite the manifest after `edit` has changed its document in place, with a matching sha256, so that a check of
    the field itself must find the change."""
    document = json.loads(path.read_text())
    del document["sha256"]
    edit(document)
    digest = hashlib.sha256(json.dumps(document).encode()).hexdigest()
    path.write_text(json.dumps({**document, "sha256": digest}, indent=1))


def test_a_manifest_survives_a_round_trip(written: Path) -> None:
    manifest = read_manifest(written)
    assert manifest is not None
    assert manifest.buckets == (RECORD, WARM)
    assert (manifest.origin, manifest.files) == (ORIGIN, FILES)
    assert manifest.origin.recipe["context"] == 4096
    assert as_read(manifest) == as_read(MANIFEST)
    assert manifest.schema == SCHEMA_VERSION
    assert manifest.plan["key"] == PLAN.key and manifest.environment["gpus"][0]["name"] == H100.gpu


def test_equal_manifests_are_equal_bytes(written: Path) -> None:
    manifest = read_manifest(written)
    assert manifest is not None and manifest_text(manifest) == manifest_text(MANIFEST) == written.read_text()


def test_the_file_is_named_after_the_plan_below_manifests(tmp_path: Path) -> None:
    write_manifest(manifest_path(str(tmp_path / "new" / "cache"), "abc"), MANIFEST)
    assert [item.relative_to(tmp_path) for item in tmp_path.rglob("*.json")] == [Path("new/cache/manifests/abc.json")]


def test_cold_seconds_are_those_of_the_buckets_that_have_them() -> None:
    assert MANIFEST.cold_seconds() == {"prefill:512": 12.5}


def test_a_bucket_s_seconds_are_those_of_its_three_steps() -> None:
    assert RECORD.seconds == 13.75


@pytest.mark.parametrize(
    ("outcomes", "is_warm"), [(("hit", "hit"), True), (("hit", "reused"), True), (("miss", "hit"), False)]
)
def test_a_start_was_warm_if_no_bucket_had_to_compile(outcomes: tuple[str, str], is_warm: bool) -> None:
    buckets = tuple(replace(RECORD, outcome=outcome) for outcome in outcomes)
    assert replace(MANIFEST, buckets=buckets).was_warm is is_warm


def test_infinite_figures_survive_a_round_trip(path: Path) -> None:
    odd = replace(RECORD, parity=replace(RECORD.parity, kl=float("inf"), relative_difference=float("-inf")))
    write_manifest(path, replace(MANIFEST, buckets=(odd,)))
    manifest = read_manifest(path)
    assert manifest is not None and manifest.buckets == (odd,)


def test_a_missing_manifest_is_none(path: Path) -> None:
    assert read_manifest(path) is None
    path.parent.mkdir(parents=True)
    assert read_manifest(path) is None


@pytest.mark.parametrize("seed", range(50))
def test_a_manifest_cut_short_anywhere_is_an_integrity_error(written: Path, seed: int) -> None:
    whole = written.read_bytes()
    written.write_bytes(whole[: random.Random(seed).randrange(len(whole))])
    corruption(written)


def test_an_empty_manifest_and_one_without_its_last_byte_are_corrupt(written: Path) -> None:
    whole = written.read_bytes()
    for content in (b"", whole[:1], whole[:-1]):
        written.write_bytes(content)
        corruption(written)


@pytest.mark.parametrize("seed", range(50))
def test_a_changed_byte_is_an_integrity_error(written: Path, seed: int) -> None:
    source = random.Random(seed)
    damaged = bytearray(written.read_bytes())
    damaged[source.randrange(len(damaged))] ^= source.randrange(1, 256)
    written.write_bytes(damaged)
    corruption(written)


def test_every_flipped_bit_is_found(path: Path) -> None:
    """Every bit of a small manifest, those of white space and of the checksum included."""
    tokens = GreedyTokens("0f", (7,), (-1e-07,))
    record = replace(RECORD, eager_greedy_tokens=tokens, greedy_tokens=tokens, trials=RECORD.trials[1:])
    files = (FileRecord("ab/x", 1234, "2c"),)
    plan = {"key": "k", "model": "m", "compute_dtype": "d", "mode": "default"}
    small = Manifest(plan, {}, Origin({}, {}, {"a.py": "s"}, {}, {}), {"load": 0.5}, (record,), files)
    write_manifest(path, small)
    whole = path.read_bytes()
    with open(path, "r+b", buffering=0) as file:  # written in place: to truncate the file takes longer than to read it
        for bit in range(8 * len(whole)):
            os.pwrite(file.fileno(), bytes([whole[bit // 8] ^ 1 << bit % 8]), bit // 8)
            corruption(path)
            os.pwrite(file.fileno(), whole[bit // 8 : bit // 8 + 1], bit // 8)
    assert read_manifest(path) == small


@pytest.mark.parametrize(
    "content",
    [
        b"not json",
        b'{"schema": 1,}',
        b"{'schema': 1}",
        b"[]",
        b"[1, 2]",
        b'"text"',
        b"1",
        b"null",
        b"true",
        b"{}",
        b"\xff\xfe\x00\x01",
        b'{"schema": 1, "plan": "\xe9"}',
    ],
)
def test_other_content_is_corrupt(written: Path, content: bytes) -> None:
    written.write_bytes(content)
    corruption(written)


def test_a_change_with_a_matching_checksum_is_read(written: Path) -> None:
    """The checksum detects accidents only. Otherwise the tests of single fields below would prove nothing."""
    change(written, lambda document: document.update(workspace_bytes=1))
    assert read_manifest(written) == replace(MANIFEST, workspace_bytes=1, **as_read_parts(written))


def as_read_parts(path: Path) -> dict[str, Any]:
    """Plan and environment after a JSON round trip."""
    document = json.loads(path.read_text())
    return {"plan": document["plan"], "environment": document["environment"]}


@pytest.mark.parametrize("schema", ["1", None, [1]])
def test_an_invalid_schema_is_named_beside_the_supported_one(written: Path, schema: Any) -> None:
    change(written, lambda document: document.update(schema=schema))
    assert f"schema {schema}, and this version reads {SCHEMA_VERSION}" in corruption(written).message


@pytest.mark.parametrize("schema", [0, 1, SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_a_manifest_of_another_schema_is_none(written: Path, schema: int) -> None:
    """After an upgrade the plan is cold, and its folder can still be used."""
    change(written, lambda document: document.update(schema=schema))
    assert read_manifest(written) is None
    document = json.loads(written.read_text())
    del document["sha256"]  # the first version wrote none
    written.write_text(json.dumps(document, indent=1))
    assert read_manifest(written) is None


def test_a_plan_of_another_version_is_named_with_the_files_that_it_lists(written: Path) -> None:
    folder = written.parents[1]
    assert read_other_versions(folder) == {}
    assert isinstance(no_plan_error(folder, "other"), UsageError)
    change(written, lambda document: document.update(schema=SCHEMA_VERSION - 1))
    written.with_name("first.json").write_text('{"schema": 1, "plan": {}}')
    written.with_name("damaged.json").write_text(written.read_text().replace('"schema"', '"scheme"'))
    write_manifest(written.with_name("own.json"), MANIFEST)
    write_manifest(written.with_name("epoch.json"), replace(MANIFEST, origin=replace(ORIGIN, epoch=CACHE_EPOCH - 1)))
    assert read_manifest(written.with_name("epoch.json")) is None
    assert read_other_versions(folder) == {PLAN.key: FILES, "first": (), "epoch": FILES}
    for key in ("", PLAN.key, "first"):
        error = no_plan_error(folder, key)
        assert isinstance(error, MismatchError) and "another version of tcdeploy" in error.message
        assert f"tcdeploy warm MODEL --cache-dir {folder}" in error.hint
    assert "has not finished warming" in no_plan_error(folder, "missing").message


def test_a_flipped_schema_is_damage(written: Path) -> None:
    flipped = written.read_text().replace(f'"schema": {SCHEMA_VERSION}', f'"schema": {SCHEMA_VERSION ^ 1}')
    written.write_text(flipped)
    corruption(written)


@pytest.mark.parametrize("date", ["1", 1.5, -1, True, 1 << 62, [1]])
def test_an_invalid_date_is_corrupt(path: Path, date: Any) -> None:
    write_manifest(path, replace(MANIFEST, compiled_at=date))
    assert "compiled_at" in corruption(path).message


@pytest.mark.parametrize("name", [*(item.name for item in fields(Manifest)), "sha256"])
def test_a_missing_field_of_the_manifest_is_named(written: Path, name: str) -> None:
    if name == "sha256":
        document = json.loads(written.read_text())
        del document[name]
        written.write_text(json.dumps(document, indent=1))
    else:
        change(written, lambda document: document.pop(name))
    assert re.search(rf"['.]{name}\b", corruption(written).message)


@pytest.mark.parametrize("name", [item.name for item in fields(BucketRecord)])
def test_a_missing_field_of_a_bucket_is_named_even_with_a_default(written: Path, name: str) -> None:
    change(written, lambda document: document["buckets"][1].pop(name))
    assert name in corruption(written).message


@pytest.mark.parametrize("name", [item.name for item in fields(Parity)])
def test_a_missing_field_of_the_parity_is_named(written: Path, name: str) -> None:
    change(written, lambda document: document["buckets"][0]["parity"].pop(name))
    assert name in corruption(written).message


SECTIONS: dict[str, Any] = {
    "manifest": lambda document: document,
    "origin": lambda document: document["origin"],
    "file": lambda document: document["files"][0],
    "bucket": lambda document: document["buckets"][0],
    "parity": lambda document: document["buckets"][0]["parity"],
    "trial": lambda document: document["buckets"][0]["trials"][0],
}


@pytest.mark.parametrize("section", SECTIONS)
def test_an_unknown_field_is_named(written: Path, section: str) -> None:
    def add(document: dict[str, Any]) -> None:
        SECTIONS[section](document)["novelty"] = 1

    change(written, add)
    assert "novelty" in corruption(written).message


@pytest.mark.parametrize("section", ["eager_greedy_tokens", "greedy_tokens"])
@pytest.mark.parametrize("name", [item.name for item in fields(GreedyTokens)])
def test_a_missing_field_of_the_greedy_tokens_is_named(written: Path, section: str, name: str) -> None:
    change(written, lambda document: document["buckets"][0][section].pop(name))
    assert name in corruption(written).message


def test_the_differences_of_two_origins_are_named() -> None:
    assert diff_sources(ORIGIN, ORIGIN) == []
    edited = replace(ORIGIN, model_sources={"transformers.models.llama.modeling_llama": "0" * 64})
    assert [item.name for item in diff_sources(ORIGIN, edited)] == ["transformers.models.llama.modeling_llama"]


@pytest.mark.parametrize(
    ("section", "name"),
    [("origin", item.name) for item in fields(Origin)] + [("file", item.name) for item in fields(FileRecord)],
)
def test_a_missing_field_of_the_origin_and_of_a_file_is_named(written: Path, section: str, name: str) -> None:
    change(written, lambda document: SECTIONS[section](document).pop(name))
    assert re.search(rf"['.]{name}\b", corruption(written).message)


@pytest.mark.parametrize("files", [None, 3, "text", [1], ["path"], [None], [[]], {"a": 1}])
def test_files_of_another_shape_are_corrupt(written: Path, files: Any) -> None:
    change(written, lambda document: document.update(files=files))
    corruption(written)


@pytest.mark.parametrize("buckets", [None, 3, "text", [1], ["bucket"], [None], [[]], {"a": 1}])
def test_buckets_of_another_shape_are_corrupt(written: Path, buckets: Any) -> None:
    change(written, lambda document: document.update(buckets=buckets))
    corruption(written)


@pytest.mark.parametrize("sources", [None, 3, "text", ["path"], {"ops.py": 1}, {"ops.py": None}])
def test_sources_of_another_shape_are_corrupt(written: Path, sources: Any) -> None:
    change(written, lambda document: document["origin"].update(sources=sources))
    corruption(written)


@pytest.mark.parametrize("parity", [None, 3, "text", [], [1]])
def test_a_parity_of_another_shape_is_corrupt(written: Path, parity: Any) -> None:
    change(written, lambda document: document["buckets"][0].update(parity=parity))
    corruption(written)


# Writing


def test_a_second_manifest_replaces_the_first(written: Path) -> None:
    write_manifest(written, replace(MANIFEST, stage_seconds={"compile": 1.0}))
    manifest = read_manifest(written)
    assert manifest is not None and manifest.stage_seconds == {"compile": 1.0}
    assert names_beside(written) == [written.name]


WRITE_STEPS = {"folder": "Path.mkdir", "write": "open_regular", "sync": "os.fsync", "rename": "os.replace"}


def fail_at(step: str, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one step of writing fail; a write fails only after half of the text is on the disk."""

    def fail(*arguments: Any, **options: Any) -> None:
        raise error

    def opened(*arguments: Any, **options: Any) -> Any:
        file = open_regular(*arguments, **options)
        write = file.write

        def write_half(content: bytes) -> None:
            write(content[: len(content) // 2])
            file.flush()
            raise error

        file.write = write_half  # type: ignore[method-assign, assignment]
        return file

    target = f"tcdeploy.host.durable.{WRITE_STEPS[step]}"
    monkeypatch.setattr(target, opened if step == "write" else fail)


@pytest.mark.parametrize("step", WRITE_STEPS)
def test_a_full_disk_is_a_space_error_and_leaves_the_old_manifest(
    written: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = written.read_bytes()
    with monkeypatch.context() as patch, pytest.raises(SpaceError) as caught:
        fail_at(step, OSError(errno.ENOSPC, "No space left on device"), patch)
        write_manifest(written, replace(MANIFEST, stage_seconds={}))
    assert caught.value.exit_code == 7
    assert str(written) in caught.value.message
    assert written.read_bytes() == before
    assert names_beside(written) == [written.name]


@pytest.mark.parametrize("step", WRITE_STEPS)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "I/O error"), RuntimeError("any")])
def test_any_other_exception_is_raised_and_leaves_the_old_manifest(
    written: Path, step: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = written.read_bytes()
    with monkeypatch.context() as patch, pytest.raises(type(error)) as caught:
        fail_at(step, error, patch)
        write_manifest(written, replace(MANIFEST, stage_seconds={}))
    assert caught.value is error
    assert written.read_bytes() == before
    assert names_beside(written) == [written.name]


def test_a_value_that_json_cannot_hold_leaves_no_file(path: Path) -> None:
    with pytest.raises(TypeError):
        write_manifest(path, replace(MANIFEST, plan={"key": object()}))
    assert names_beside(path) == []


def test_the_file_is_synced_before_it_is_renamed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, real=real: (steps.append(name), real(*a))[1])
    write_manifest(path, MANIFEST)
    assert steps == ["fsync", "replace", "fsync"], "the file, then its folder"


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[None]:
    """A tmpfs of that size on `folder`; skips the test if mounting is not allowed."""
    options = f"size={kilobytes}k"
    mount = shutil.which("mount")
    if (
        not mount
        or subprocess.run([mount, "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True).returncode
    ):
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_tmpfs_leaves_the_old_manifest(tmp_path: Path) -> None:
    with small_disk(tmp_path, kilobytes=64):
        path = manifest_path(tmp_path, "key")
        write_manifest(path, MANIFEST)
        before = path.read_bytes()
        with contextlib.suppress(OSError), open(tmp_path / "filler", "wb", buffering=0) as filler:
            while True:
                filler.write(b"x" * 4096)
        with pytest.raises(SpaceError):
            write_manifest(path, replace(MANIFEST, stage_seconds={}))
        assert path.read_bytes() == before
        assert names_beside(path) == [path.name]
        (tmp_path / "filler").unlink()
        write_manifest(path, replace(MANIFEST, stage_seconds={}))
        manifest = read_manifest(path)
        assert manifest is not None and manifest.stage_seconds == {}


def test_other_users_may_read_the_manifest(path: Path) -> None:
    """An image warms its cache as root and serves as another user, so mkstemp's 0600 must not stay."""
    before = os.umask(0o022)
    try:
        write_manifest(path, MANIFEST)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


WRITER = """
import sys
from dataclasses import replace
from pathlib import Path
from tests.cache.test_manifest import MANIFEST, RECORD
from tcdeploy.cache.record.manifest import write_manifest
path, name = Path(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
for number in range(100):
    buckets = tuple(replace(RECORD, bucket=f"{name}:{number}") for _ in range(1 + 20 * (name == "long")))
    write_manifest(path, replace(MANIFEST, buckets=buckets))
"""


def test_concurrent_writers_never_leave_a_torn_manifest(path: Path) -> None:
    """One writes 100 long manifests, the other 100 short ones; every read returns one of these."""
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, path, name], env=environ, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for name in ("long", "short")
    ]  # fmt: skip
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    seen: set[str] = set()
    while any(writer.poll() is None for writer in writers) or not seen:
        manifest = read_manifest(path)
        if manifest is not None:
            [bucket] = {record.bucket for record in manifest.buckets}
            assert len(manifest.buckets) == (21 if bucket.startswith("long") else 1)
            seen.add(bucket)
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    assert len(seen) > 2
    assert names_beside(path) == [path.name]
