"""Replaces files of a cache folder by links, FIFOs, devices, sockets and huge or foreign files, and edits documents.

Each attack changes a copy of a folder with a plan from a signed bundle, and then every command that reads such a folder
runs. An attack succeeds if a command waits for the file, raises anything but TcdeployError, uses bytes that the bundle
does not list, or changes a private file that a link leads to. Half of the attacks edit the content of a document:
random bytes, values of another type, deep nesting. Most edits keep the checksums valid, so that the edited content is
parsed.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import stat
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tcdeploy.bundle.pack import pack
from tcdeploy.bundle.unpack import unpack
from tcdeploy.bundle.verify import verify_folder
from tcdeploy.bundle.why import forecast
from tcdeploy.cache.files.records import FileRecord, hash_files
from tcdeploy.cache.folder.access import check_folder
from tcdeploy.cache.folder.layout import manifest_path, stored_header_path
from tcdeploy.cache.folder.leases import is_leased, shared_folder_lock
from tcdeploy.cache.inventory import collect_garbage, list_plans, usage_by_kind
from tcdeploy.cache.record import manifest as manifests
from tcdeploy.cache.record.manifest import Manifest, read_manifest, write_manifest
from tcdeploy.cache.record.provenance import ListedFile, SigningPolicy
from tcdeploy.cache.staging.folder import create_staging_folder
from tcdeploy.cache.staging.restore import restore_plan
from tcdeploy.cache.trust.signing import generate_key, sign, signed_header_bytes, trust
from tcdeploy.doctor import cache_folder as doctor
from tcdeploy.engine.generation_defaults import GenerationDefaults
from tcdeploy.errors import TcdeployError
from tcdeploy.planning.decision import Decision
from tcdeploy.planning.plan import make_plan
from tcdeploy.server.observe.missed_shapes import MissedShapes, read_missed_shapes
from tcdeploy.start.planned import StartRequest
from tcdeploy.start.record.factors import StartFactors
from tcdeploy.start.record.lookup import DoesNotFit, _factor_mismatch, _parse, _plan, environment_mismatch
from tcdeploy.start.record.record import WITHOUT_TOKENIZER, StartRecord, find_records, to_json
from tests.bundle.fake_caches import as_installed, key_of, make_small
from tests.bundle.forging import sealed
from tests.machines import LLAMA_8B, make_recipe

DEFAULT_COUNT = 6000
COMMANDS_PER_ATTACK = 4
TIME_LIMIT_S = 20.0  # a command takes milliseconds; a FIFO or /dev/zero never ends
OTHER_USER = 12003
HUGE_BYTES = 1 << 37  # sparse
SECRET = b"root:$6$secret:19000::::::\n"
RECIPE = make_recipe(context=4096, buckets=(32,), batch_sizes=(1,))
FACTORS = StartFactors({"model": RECIPE.model}, {"torch": "2.13"}, "a" * 64, {"config.json": "b" * 64})
FORMS = ("link", "link to /dev/zero", "hard link", "fifo", "device", "socket", "foreign owner", "huge", "folder")
ROOT_FORMS = ("device", "foreign owner")  # only root can make these
JSON_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 10**30, -(2**40), 0.0, 0.5, -1.5, 1e300, float("inf"), "", "x", "\ud800",
    "../../etc/passwd", "a" * 5000, [], [1], ["x"], [None] * 9, {}, {"x": 1}, {"": []}, [[[]]], [{}], [["x", 1]],
]  # fmt: skip


class NeverEndedError(BaseException):
    """Not a TimeoutError, which handlers of OSError and Exception would catch."""


class Target:
    """A folder with a plan from a signed bundle and every kind of document that tcdeploy writes into such a folder."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder, self.work, self.secret = root, root / "folder", root / "work", root / "secret"
        self.secret.write_bytes(SECRET)
        generate_key(root / "ci")
        trust("ci", root / "ci.pub", root / "trusted")
        self.policy = SigningPolicy(root / "trusted")
        source = root / "source"
        manifest = make_small(source, seed=3)
        self.key = key_of(manifest)
        self.record = f"aot/start-{FACTORS.key}-{'0' * 16}.json"
        (source / "aot").mkdir()
        (source / self.record).write_text(to_json(start_record(self.key)))
        files = hash_files(source, [*(file.path for file in manifest.files), self.record])
        write_manifest(manifest_path(source, self.key), replace(manifest, files=files))
        pack(source, self.key, root / "plan.tcb", root / "ci.key", root / "trusted")
        unpack(root / "plan.tcb", self.folder, root / "trusted")
        self.signed = {(file.path, file.sha256) for file in files}
        self._add_documents(hash_files(source, [manifest.files[0].path]))

    def _add_documents(self, files: tuple[FileRecord, ...]) -> None:
        (self.folder / "leases").mkdir()
        (self.folder / "leases" / self.key).touch()
        (self.folder / ".lock").touch()
        (self.folder / "missed_shapes.jsonl").write_text('{"phase": "prefill", "size": 256}\n')
        headers = self.folder / "precompiled_headers"
        headers.mkdir()
        (headers / "x.h").write_text("int x;")
        (headers / "x.h.gch").write_bytes(b"image")
        records = [asdict(file) for file in hash_files(headers, ["x.h", "x.h.gch"])]
        (headers / "x.h.gch.json").write_text(json.dumps(records))
        killed = self.folder / ".start-killed"
        killed.mkdir()
        (killed / "lock").touch()
        line = {"plan": self.key, "files": [asdict(file) for file in files]}
        (killed / "finished.jsonl").write_text(json.dumps(line) + "\n")


def start_record(key: str) -> StartRecord:
    decisions = (Decision("sampling defaults", "none", "the model has none"),)
    return StartRecord(
        factors=FACTORS, plan_key=key, package_folder="aot/x", reference="references/x.safetensors",
        buffers="aot/x.safetensors", kernels="",
        sources={"models/llama/modeling_llama.py": "0" * 64}, variables={},
        architecture=LLAMA_8B, config={"model_type": "llama"}, defaults={WITHOUT_TOKENIZER: GenerationDefaults()},
        decisions={WITHOUT_TOKENIZER: decisions}, supports_logits_to_keep=True,
        weights={"lm_head.weight": ["float32", [2, 2], ["tensor", "lm_head.weight"]]}, tokenizer=None,
        tokenizer_problem="",
    )  # fmt: skip


# The commands


def commands(folder: Path, target: Target) -> dict[str, Callable[[], object]]:
    """What starts, servers and `tcdeploy cache` do with a folder, without torch."""
    request: Any = SimpleNamespace(
        cache_folder=str(folder), is_trusted=False,
        probe=SimpleNamespace(environment=None, sections={}, reason=lambda section: ""),
    )  # fmt: skip
    return {
        "start": lambda: start(folder, target),
        "start from packages": lambda: find_start(folder, target),
        "server": lambda: miss_shape(folder),
        "warm --from": lambda: read_missed_shapes(str(folder / "missed_shapes.jsonl")),
        "verify": lambda: verify_folder(folder, target.policy.trusted_keys),
        "ls": lambda: (list_plans(folder), usage_by_kind(folder)),
        "why": lambda: predict(folder),
        "gc": lambda: collect_garbage(folder, 1e9, 1 << 40, is_dry_run=True),
        "doctor": lambda: [check(request) for check in (doctor.check_plans, doctor.check_leftovers)],
        "lock": lambda: lock(folder, target),
        "pack": lambda: pack(folder, target.key, target.work / "packed.tcb"),
        "unpack": lambda: unpack(target.root / "plan.tcb", folder, target.policy.trusted_keys),
    }


def start(folder: Path, target: Target) -> None:
    """Raise AssertionError if the start would load a file that is not from the bundle."""
    check_folder(folder)
    staging = create_staging_folder(str(folder))
    try:
        restore_plan(staging, target.key, False, SigningPolicy(target.policy.trusted_keys, require_signed=True))
        staging.link_headers()
        for path in Path(staging.path).rglob("*"):
            name = path.relative_to(staging.path).as_posix()
            if path.is_file() and name != "lock" and not name.startswith("precompiled_headers/"):
                assert (name, hashlib.sha256(path.read_bytes()).hexdigest()) in target.signed, f"used {name}"
    finally:
        staging.remove()


def find_start(folder: Path, target: Target) -> None:
    """What `find_record` does after it has described the machine."""
    environment = as_installed()
    check_folder(folder)
    found = find_records(folder, target.policy, FACTORS.key)
    for listed in found.files:
        use_record(listed)
    if not found.files:
        environment_mismatch(str(folder), [target.key], environment, RECIPE.model)
        _factor_mismatch(str(folder), FACTORS, environment, RECIPE.model)
    for problem in found.problems:
        raise problem


def use_record(listed: ListedFile) -> None:
    record = _parse(listed, FACTORS.key)
    with suppress(DoesNotFit):
        _plan(listed, record, StartRequest(RECIPE), as_installed(), WITHOUT_TOKENIZER)


def predict(folder: Path) -> None:
    environment = as_installed()
    plan = make_plan(RECIPE, environment, LLAMA_8B)
    origin = manifests.Origin(asdict(RECIPE), {"model_type": "llama"}, {}, {}, {})
    for manifest in manifests.read_manifests(folder).values():
        forecast(manifest, plan, environment, origin)


def miss_shape(folder: Path) -> None:
    plan: Any = SimpleNamespace(
        cache_dir=str(folder), prefill_buckets=[SimpleNamespace(size=32)], decode_buckets=[SimpleNamespace(size=1)]
    )
    others = set(threading.enumerate())
    MissedShapes(plan).observe_shape("prefill", 200)
    for thread in set(threading.enumerate()) - others:  # those that write the shapes
        thread.join(TIME_LIMIT_S)
        assert not thread.is_alive(), "the thread waits"


def lock(folder: Path, target: Target) -> None:
    is_leased(folder, target.key)
    with shared_folder_lock(folder):
        pass


# Forms of a file


def give_form(path: Path, form: str, target: Target, source: random.Random) -> None:
    content = path.read_bytes()
    if form == "foreign owner":
        os.chown(path, OTHER_USER, OTHER_USER)
        path.chmod(0o600)
        return
    path.unlink()
    if form == "link":
        link = target.work / "outside"
        link.write_bytes(content if source.random() < 0.5 else SECRET)
        path.symlink_to(target.secret if source.random() < 0.5 else link)
    elif form == "link to /dev/zero":
        path.symlink_to("/dev/zero")
    elif form == "hard link":
        path.hardlink_to(target.secret)
    elif form == "fifo":
        os.mkfifo(path)
    elif form == "device":
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # as /dev/zero
    elif form == "socket":
        with socket.socket(socket.AF_UNIX) as listener, working_in(path.parent):
            listener.bind(path.name[-100:])
            os.replace(path.name[-100:], path.name)
    elif form == "huge":
        path.write_bytes(content)
        os.truncate(path, HUGE_BYTES)
    else:
        path.mkdir()


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """The path of a socket may have 107 bytes at most."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


# Edits of a document


def nested_parts(value: Any) -> list[Any]:
    """The lists and objects in a document that have elements."""
    parts, pending = [], [value]
    while pending:
        part = pending.pop()
        if isinstance(part, dict | list) and part:
            parts.append(part)
            pending += part.values() if isinstance(part, dict) else part
    return parts


def edited(document: Any, source: random.Random) -> Any:
    """The document with one to three values changed, removed or added."""
    document = copy.deepcopy(document)
    for _ in range(source.randint(1, 3)):
        parts = nested_parts(document)
        if not parts:
            return document
        part = source.choice(parts)
        key = source.choice(list(part) if isinstance(part, dict) else range(len(part)))
        if source.random() < 0.2:
            part.pop(key)
        elif isinstance(part, dict) and source.random() < 0.1:
            part["added"] = source.choice(JSON_VALUES)
        else:
            part[key] = copy.deepcopy(source.choice(JSON_VALUES))
    return document


def damaged_text(content: bytes, source: random.Random) -> bytes:
    """Content that is not a document, or a document that is hard to parse."""
    position = source.randrange(len(content) + 1)
    return source.choice([
        b"[" * 200_000, b'{"a":' * 200_000, b"", b"\xff" * 100, b"null", b"[]", b"0" * 100_000, b"1e999", b"NaN",
        content[:position], content[:position] + source.randbytes(9) + content[position:], content + b"[" * 100_000,
        content[:position] + b"\0" + content[position + 1 :],
    ])  # fmt: skip


def new_content(content: bytes, source: random.Random) -> bytes:
    if source.random() < 0.25:
        return damaged_text(content, source)
    return json.dumps(edited(json.loads(content), source)).encode() + b"\n"


def edit_document(folder: Path, kind: str, target: Target, source: random.Random) -> None:
    """Edit a document. In three of four cases, the manifest or signature that covers it is made valid again."""
    path = folder / document_paths(target)[kind]
    is_consistent = source.random() < 0.75
    if kind == "manifest":
        path.write_bytes(edited_manifest(path.read_bytes(), source, is_consistent))
    elif kind == "header":
        header = read_header(path)
        changed = new_content(header, source) if source.random() < 0.3 else edited_header(header, source)
        signatures = (sign(changed, target.root / "ci.key"),)
        path.write_bytes(signed_header_bytes(changed, signatures) if is_consistent else new_frames(path, source))
    else:
        path.write_bytes(new_content(path.read_bytes(), source))
        if kind == "record" and is_consistent:
            list_again(folder, target)


def document_paths(target: Target) -> dict[str, str]:
    return {
        "manifest": f"manifests/{target.key}.json",
        "header": f"bundles/{target.key}.head",
        "record": target.record,
        "journal": ".start-killed/finished.jsonl",
        "header records": "precompiled_headers/x.h.gch.json",
        "missed shapes": "missed_shapes.jsonl",
    }


def edited_manifest(content: bytes, source: random.Random, is_consistent: bool) -> bytes:
    if not is_consistent:
        return new_content(content, source)
    document = json.loads(content)
    document.pop("sha256")
    changed = edited(document, source)
    with suppress(TypeError, ValueError, RecursionError):
        return sealed(changed).encode()
    return json.dumps(changed).encode()


def read_header(path: Path) -> bytes:
    from tcdeploy.cache.trust.signing import read_signed_header

    with open(path, "rb") as file:
        return read_signed_header(file, str(path)).header


def edited_header(header: bytes, source: random.Random) -> bytes:
    """With an edited manifest whose checksum is valid."""
    document = json.loads(header)
    document["manifest"] = edited_manifest(document["manifest"].encode(), source, True).decode()
    return json.dumps(document).encode()


def new_frames(path: Path, source: random.Random) -> bytes:
    content = bytearray(path.read_bytes())
    for _ in range(source.randint(1, 4)):
        content[source.randrange(min(len(content), 200))] = source.randrange(256)
    return bytes(content)


def list_again(folder: Path, target: Target) -> None:
    """List the files of the folder as they are now, and forget the bundle: a plan that was compiled here."""
    manifest = read_manifest(manifest_path(folder, target.key))
    assert isinstance(manifest, Manifest)
    files = hash_files(folder, [file.path for file in manifest.files])
    write_manifest(manifest_path(folder, target.key), replace(manifest, files=files))
    stored_header_path(folder, target.key).unlink()


# The campaign


@contextmanager
def time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise NeverEndedError(f"it did not end within {TIME_LIMIT_S} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def effect_of(command: Callable[[], object]) -> str:
    """What an attack reached with this command; empty if nothing."""
    try:
        with time_limit():
            command()
    except TcdeployError as error:
        return "" if error.message else "an error without a message"
    except BaseException as error:  # noqa: BLE001 - any other exception is a traceback for the user
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def attack_once(number: int, source: random.Random, target: Target) -> tuple[str, list[str]]:
    """Returns the name of the attack, and its effects."""
    shutil.rmtree(target.work, ignore_errors=True)
    target.work.mkdir(mode=0o700)
    folder = target.work / "folder"
    shutil.copytree(target.folder, folder)
    documents = document_paths(target)
    if number % 2:
        kind = list(documents)[number // 2 % len(documents)]
        edit_document(folder, kind, target, source)
        name = f"edited {kind}"
    else:
        forms = [form for form in FORMS if os.geteuid() == 0 or form not in ROOT_FORMS]
        form = forms[number // 2 % len(forms)]
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        chosen = folder / source.choice(list(documents.values())) if source.random() < 0.5 else source.choice(files)
        give_form(chosen, form, target, source)
        name = f"{form}: {chosen.relative_to(folder).as_posix()[:60]}"
    effects = []
    for command, run_command in source.sample(list(commands(folder, target).items()), k=COMMANDS_PER_ATTACK):
        if effect := effect_of(run_command):
            effects.append(f"{command}: {effect}")
        if target.secret.read_bytes() != SECRET:
            effects.append(f"{command}: changed a private file")
            target.secret.write_bytes(SECRET)
    return name, effects


def run(source: random.Random, count: int) -> dict[str, Any]:
    attacks: Counter[str] = Counter()
    succeeded = []
    with tempfile.TemporaryDirectory(prefix="tcdeploy-files-") as root:
        target = Target(Path(root))
        target.work.mkdir(mode=0o700)
        intact = shutil.copytree(target.folder, target.work / "folder")
        effects = {name: effect_of(command) for name, command in commands(intact, target).items()}
        assert not any(effects.values()), effects
        for number in range(count):
            name, effects = attack_once(number, source, target)
            attacks[name.split(":")[0]] += 1
            succeeded += [f"{name}, number {number}: {effect}" for effect in effects]
    return {"attacks": count, "kinds": dict(sorted(attacks.items())), "succeeded": succeeded}
