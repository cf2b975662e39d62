"""Another local user attacks the Ray of a running `tcdeploy deploy --ray`: its files, sockets, ports and token.

The deployment runs as root, and the attacks in a child process with the user id of the attacker. An attack succeeds if
it reads or changes a file of the session, connects to a unix socket, calls a procedure, or runs a command as root.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - the attacker cannot read the folder of Python's library
import http.client
import json
import os
import random
import re
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
from grpc import _channel  # type: ignore[attr-defined]  # noqa: F401 - as above

from tests.scale.ray_deployment import RayDeployment, descendants, model_entry, processes_of_home, ray_deployment

ATTACKER = 12002
DEFAULT_COUNT = 2000
JOB_DELAY_S = 5  # until a job that Ray has accepted has run
TOKEN_PATTERN = re.compile("[0-9a-f]{64}")
JOB_AGENT_PORT = 52365
JOB_PATHS = ("/api/job_agent/jobs/", "/api/jobs/", "/get_or_create_runtime_env")
PROCEDURES = (
    "InternalKVGcsService/InternalKVKeys", "InternalKVGcsService/InternalKVPut", "JobInfoGcsService/AddJob",
    "ActorInfoGcsService/CreateActor", "NodeManagerService/GetNodeStats", "NodeManagerService/RequestWorkerLease",
    "ObjectManagerService/Push", "ObjectManagerService/FreeObjects", "CoreWorkerService/PushTask",
    "CoreWorkerService/GetCoreWorkerStats", "ReporterService/GetTraceback", "RayletDriver/Init",
)  # fmt: skip
DENIED = {"UNAUTHENTICATED", "UNIMPLEMENTED", "UNAVAILABLE", "UNKNOWN", "INTERNAL", "DEADLINE_EXCEEDED"}


@dataclass
class Target:
    """What any user finds out about the processes of a deployment, and `evidence`, a folder that all can write."""

    files: list[Path]
    folders: list[Path]
    sockets: list[Path]
    ports: list[tuple[str, int]]
    evidence: Path
    tokens: list[str] = field(default_factory=lambda: [""])


def find_target(deployment: RayDeployment) -> Target:
    """`deployment`: with a HOME of `make_folders`."""
    home, evidence = deployment.home, deployment.home.with_name("evidence")
    processes = {*descendants(deployment.process.pid), *processes_of_home(home)}
    connections: list[Any] = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            connections += process.net_connections("all")
    sockets = {Path(item.laddr) for item in connections if isinstance(item.laddr, str) and item.laddr[:1] == "/"}
    listening = {tuple(item.laddr) for item in connections if item.status == psutil.CONN_LISTEN}
    ports = {("127.0.0.1" if ip in ("0.0.0.0", "::", "127.0.0.1") else ip, port) for ip, port in listening}
    roots = {socket.parents[1] for socket in sockets} | {home / ".ray"}
    below = {path for root in roots for path in root.rglob("*")} | roots
    return Target(
        sorted(path for path in below if path.is_file()), sorted(path for path in below if path.is_dir()),
        sorted(sockets | {path for path in below if path.is_socket()}), sorted(ports), evidence,
    )  # fmt: skip


def read_file(rng: random.Random, target: Target) -> str:
    return read(rng.choice(target.files), target)


def read(path: Path, target: Target) -> str:
    """Adds tokens in the file to those of the target."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    target.tokens += TOKEN_PATTERN.findall(text)
    return f"read {path}"


def replace_folder(rng: random.Random, target: Target) -> str:
    path = rng.choice(target.folders)
    try:
        path.rename(f"{path}-moved")
    except OSError:
        return ""
    Path(f"{path}-moved").rename(path)
    return f"renamed {path}"


def create_file(rng: random.Random, target: Target) -> str:
    path = rng.choice(target.folders) / f"attacker-{rng.randrange(1 << 32)}"
    try:
        path.symlink_to("/etc/passwd")
        path.unlink()
    except OSError:
        return ""
    return f"created {path}"


def connect_to_socket(rng: random.Random, target: Target) -> str:
    path = rng.choice(target.sockets)
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_UNIX, kind) as connection:
            try:
                connection.connect(str(path))
            except OSError:
                continue
            return f"connected to {path}"
    return ""


def post_job(rng: random.Random, target: Target) -> str:
    """Half of the jobs go to the job agent. A job that runs creates a file in `evidence`."""
    address = rng.choice([*target.ports, *[("127.0.0.1", JOB_AGENT_PORT)] * len(target.ports)])
    token = rng.choice([*target.tokens, f"{rng.randrange(1 << 256):064x}"])
    name = rng.choice(("authorization", "authorization", "x-ray-authorization", "cookie"))
    value = f"ray-authentication-token={token}" if name == "cookie" else f"Bearer {token}"
    body = json.dumps({"entrypoint": f"touch {target.evidence}/{rng.randrange(1 << 32)}"})
    connection = http.client.HTTPConnection(*address, timeout=3)
    try:
        connection.request(
            "POST", rng.choice((JOB_PATHS[0], *JOB_PATHS)), body, {"content-type": "application/json", name: value}
        )
        text = connection.getresponse().read().decode(errors="replace")
        return f"posted a job to {address}" if "job_id" in text else ""
    except (OSError, http.client.HTTPException):
        return ""
    finally:
        connection.close()


def call_procedure(rng: random.Random, target: Target) -> str:
    host, port = rng.choice(target.ports)
    procedure = rng.choice(PROCEDURES)
    metadata = [("authorization", f"Bearer {rng.choice(target.tokens)}")]
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        try:
            channel.unary_unary(f"/ray.rpc.{procedure}")(b"", timeout=2, metadata=metadata)
        except grpc.RpcError as error:
            if error.code().name in DENIED:
                return ""
    return f"called {procedure} at {host}:{port}"


ATTACKS = (read_file, replace_folder, create_file, connect_to_socket, post_job, call_procedure)


def as_user(uid: int, function: Callable[[], Any]) -> Any:
    """The JSON value that `function` returns in a child process with this user id."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            os.write(writer, json.dumps(function()).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    return json.loads(text)


def attack(rng: random.Random, count: int, target: Target) -> list[str]:
    """Read all files, and run `count` attacks, as the attacker; returns those that succeeded, without repetitions."""

    def run_all() -> list[str]:
        results = {read(path, target) for path in target.files}
        results |= {ATTACKS[number % len(ATTACKS)](rng, target) for number in range(count)}
        return sorted(results - {""})

    succeeded: list[str] = as_user(ATTACKER, run_all)
    time.sleep(JOB_DELAY_S)
    return succeeded + [f"ran a command as the user id {path.stat().st_uid}" for path in target.evidence.iterdir()]


def run(rng: random.Random, count: int) -> dict[str, Any]:
    """Attack a deployment of one model, whose proxy is HAProxy."""
    with tempfile.TemporaryDirectory() as name:
        home = make_folders(Path(name))
        with ray_deployment(home, model_entry(home / "cache", "tiny")) as deployment:
            target = find_target(deployment)
            results = attack(rng, count, target)
    numbers = {"files": len(target.files), "sockets": len(target.sockets), "ports": len(target.ports)}
    return {"attacks": count, **numbers, "succeeded": len(results), "examples": results[:20]}


def make_folders(folder: Path) -> Path:
    """The deployer's HOME, which all users can enter; beside it, a folder `evidence` that all users can write."""
    folder.chmod(0o755)
    home, evidence = folder / "home", folder / "evidence"
    for path, mode in ((home, 0o755), (evidence, 0o777)):
        path.mkdir()
        path.chmod(mode)
    return home
