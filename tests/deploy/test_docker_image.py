"""recipes/deploy/docker: the Dockerfile is well formed, and its own steps make an image that serves a signed bundle.

Without a container registry, base images cannot be pulled, so `docker build` is not run. Instead, the steps that
concern tcdeploy run in namespaces (containers.py), and so do those of the init container of the Kubernetes manifests.
The installation of packages is not run here; tests/test_locks.py checks the lock file that it uses.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.conftest import PACKAGE_FLAGS, ROOT, TINY, RunCLI
from tests.deploy.containers import UID, Container, child_of, skip_unless_supported
from tests.deploy.recipe_files import DEPLOY, KUBERNETES, check_settings, read_documents, read_variables
from tests.test_locks import pins
from tests.test_packaged_start import imported
from tests.test_workflows import run_tool

DOCKERFILE = DEPLOY / "docker/Dockerfile"
Stage = list[tuple[str, str]]  # (instruction, arguments) of the stage and of the stages that it is made from


def read_stages() -> dict[str, Stage]:
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line and not line.startswith("#")]
    stages: dict[str, Stage] = {}
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        instruction, _, arguments = line.partition(" ")
        if instruction == "FROM":
            parent, _, name = arguments.partition(" AS ")
            stages[name] = list(stages.get(parent, []))
        elif stages:
            list(stages.values())[-1].append((instruction, arguments))
    return stages


STAGES = read_stages()


def arguments_of(stage: str, instruction: str) -> list[str]:
    return [arguments for name, arguments in STAGES[stage] if name == instruction]


def variables_of(stage: str) -> dict[str, str]:
    pairs = [pair.partition("=") for arguments in arguments_of(stage, "ENV") for pair in arguments.split()]
    return {name: value for name, _, value in pairs}


def test_hadolint_accepts_the_dockerfile(tmp_path: Path) -> None:
    linted = run_tool("hadolint", str(DOCKERFILE))
    assert linted.returncode == 0, linted.stdout
    (tmp_path / "Dockerfile").write_text(DOCKERFILE.read_text().replace("--no-install-recommends ", ""))
    assert run_tool("hadolint", str(tmp_path / "Dockerfile")).returncode == 1


@pytest.mark.parametrize("stage", ["serve", "baked"])
def test_the_images_that_serve_have_no_compiler_and_no_root(stage: str) -> None:
    assert list(STAGES)[-1] == "serve", "the default target"
    assert not [command for command in arguments_of(stage, "RUN") if "apt-get" in command or "pip" in command]
    assert arguments_of(stage, "USER") == [f"{UID}:{UID}"]
    assert json.loads(arguments_of(stage, "ENTRYPOINT")[-1]) == ["tcdeploy", "serve"]
    installed = "\n".join(arguments_of("packages", "COPY"))
    assert "scripts/locks/serve.txt" in installed and "transformers" not in pins(ROOT / "scripts/locks/serve.txt")


@pytest.mark.parametrize("stage", ["serve", "baked", "pack"])
def test_the_settings_of_the_images_are_accepted(stage: str) -> None:
    variables = variables_of(stage)
    check_settings([TINY], variables)
    if stage != "pack":
        assert arguments_of(stage, "EXPOSE") == [variables["TCDEPLOY_PORT"]]


def test_every_copied_file_is_sent_to_the_builder() -> None:
    ignored = [
        line for line in Path(f"{DOCKERFILE}.dockerignore").read_text().splitlines() if line[:1] not in ("", "#")
    ]
    kept = [pattern.removeprefix("!") for pattern in ignored if pattern.startswith("!")]
    assert ignored[0] == "*"
    copies = {arguments for stage in STAGES for arguments in arguments_of(stage, "COPY")}
    sources = {source for item in copies if not item.startswith("--from=") for source in item.split()[:-1]}
    assert len(sources) >= 6
    for source in sources:
        assert (ROOT / source).exists()
        assert any(fnmatch.fnmatch(source, pattern) or source.startswith(f"{pattern}/") for pattern in kept), source


class Bundle(NamedTuple):
    context: Path  # the folder of --build-context bundle=
    url: str  # in a store


@pytest.fixture(scope="module")
def bundle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, run_cli_in: RunCLI
) -> Iterator[Bundle]:
    """A signed bundle of packages of the embedded model, in a folder that all users can read."""
    skip_unless_supported()
    home = tmp_path_factory.mktemp("packer")
    shutil.copytree(request.getfixturevalue("filled_packages"), home / "cache")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "trusted").mkdir()

        def run(*arguments: str) -> str:
            done = run_cli_in(home, *arguments, cwd=str(folder))
            assert done.returncode == 0, done.stderr
            return done.stdout

        run("cache", "keygen", str(home / "ci"))
        (home / "ci.pub").rename(folder / "trusted/ci.pub")
        out = ("--out", "model.tcb", "--sign", str(home / "ci.key"))
        run("cache", "pack", TINY, *PACKAGE_FLAGS, "--cache-dir", str(home / "cache"), *out)
        run("cache", "push", "model.tcb", str(folder / "store"))
        [stored] = (folder / "store").glob("*.tcb")
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield Bundle(folder, str(stored))


@pytest.fixture
def container() -> Iterator[Container]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Container(Path(folder))


def translate(container: Container, text: str) -> str:
    """Text with the volumes /tmp and /cache at their places in the test: the tests' own files may be below /tmp."""
    text = re.sub(r"(?<![\w/])/tmp(?![\w-])", str(container.tmp), text)
    return re.sub(r"(?<![\w/])/cache(?![\w-])", str(container.cache), text)


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


@contextmanager
def serving(container: Container, stage: str, **environ: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start the entry point of a stage with its variables. Yields the port once the server is ready."""
    port, entrypoint = free_port(), json.loads(arguments_of(stage, "ENTRYPOINT")[-1])
    variables = {name: translate(container, value) for name, value in {**variables_of(stage), **environ}.items()}
    variables |= {"TCDEPLOY_PORT": port, "TMPDIR": str(container.tmp), "PYTHONPROFILEIMPORTTIME": "1"}
    variables["PATH"] = variables["PATH"].replace("$PATH", "/no-compiler")
    program = f"/opt/tcdeploy/bin/{entrypoint[0]}"
    command = ["/usr/bin/env", f"PATH={variables.pop('PATH')}", program, *entrypoint[1:], TINY, *PACKAGE_FLAGS]
    server = container.start(*command, **variables)
    try:
        assert server.stdout is not None
        ready = next((line for line in server.stdout if line.startswith("ready: ")), None)
        assert ready is not None, errors_in(container)
        yield port, server
    finally:
        server.kill()
        server.wait()


def base_settings() -> dict[str, str]:
    """The variables of the Kubernetes base."""
    [base] = read_documents(KUBERNETES / "base/kustomization.yaml")
    [generator] = base["configMapGenerator"]
    return read_variables("\n".join(generator["literals"]))


def errors_in(container: Container) -> str:
    return "".join(line for line in container.log.open() if not line.startswith("import time:"))


def check_server(container: Container, port: str, server: subprocess.Popen[str]) -> None:
    """The health check of the image passes, a request succeeds, and SIGTERM to PID 1 ends the server."""
    [check] = arguments_of("serve", "HEALTHCHECK")
    program, *arguments = json.loads(check[check.index("[") :])
    assert program == "python"
    healthy, unhealthy = (
        subprocess.run([sys.executable, *arguments], env={"TCDEPLOY_PORT": number}, capture_output=True).returncode
        for number in (port, free_port())
    )
    assert (healthy, unhealthy) == (0, 1)
    body = {"prompt": [3, 4, 5], "max_tokens": 4}
    assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60).status_code == 200
    main = child_of(server)
    uids = re.search(r"^Uid:\s+(.+)$", Path(f"/proc/{main}/status").read_text(), re.MULTILINE)
    assert uids is not None and set(uids[1].split()) == {str(UID)}
    os.kill(main, signal.SIGTERM)
    server.communicate(timeout=30)
    assert server.returncode == 0, errors_in(container)
    modules = imported(container.log.read_text())
    assert "tcdeploy.packaged_start" in modules and "transformers" not in modules and "torch._inductor" not in modules


def test_the_image_with_a_bundle_serves_it_from_a_read_only_file_system(container: Container, bundle: Bundle) -> None:
    for name, arguments in STAGES["unpacked"][len(STAGES["packages"]) :]:
        if name == "COPY":
            origin, source, target = arguments.split()
            assert origin == "--from=bundle"
            target = translate(container, target)
            container.build(f"mkdir -p $(dirname {target}) && cp -r {bundle.context}/{source} {target}")
        elif name == "RUN":
            environ = variables_of("unpacked")
            path = environ.pop("PATH").replace("$PATH", "/usr/bin:/bin")
            container.build(f"PATH={path}\n{translate(container, arguments)}", HOME="/root", **environ)
    for command in arguments_of("runtime", "RUN"):
        container.build(f"PATH=/usr/sbin:/usr/bin:/bin\n{command}")
    for arguments in STAGES["baked"][len(STAGES["runtime"]) :]:
        if arguments[0] == "COPY":
            origin, source, target = arguments[1].split()
            assert (origin, source) == ("--from=unpacked", target), "the same path, so nothing is copied here"
    settings = base_settings()
    assert settings["TCDEPLOY_REQUIRE_SIGNED"] == variables_of("baked")["TCDEPLOY_REQUIRE_SIGNED"] == "true"
    with serving(container, "baked", TCDEPLOY_TRUST_CACHE_DIR=settings["TCDEPLOY_TRUST_CACHE_DIR"]) as (port, server):
        check_server(container, port, server)
    container.tmp.chmod(0o1777)  # a tmpfs of Docker, which needs no further setting
    with serving(container, "baked") as (port, server):
        check_server(container, port, server)


def test_the_init_container_unpacks_a_bundle_that_the_server_starts_from(container: Container, bundle: Bundle) -> None:
    container.build(f"mkdir -p /etc/tcdeploy && cp -r {bundle.context}/trusted /etc/tcdeploy/trusted")
    [patch] = read_documents(KUBERNETES / "components/bundle-from-store/init-container.yaml")
    pod = patch["spec"]["template"]["spec"]
    [init], [own] = pod["initContainers"], pod["containers"]
    *shell, script = init["command"]
    assert shell == ["sh", "-ec"]
    variables = variables_of("serve") | {item["name"]: item["value"] for item in init["env"] if "value" in item}
    environ = {name: translate(container, value) for name, value in variables.items()}
    environ |= {"TMPDIR": str(container.tmp), "BUNDLE_URL": bundle.url}
    path = environ.pop("PATH").replace("$PATH", "/usr/bin:/bin")
    command = ["/usr/bin/env", f"PATH={path}", *shell, translate(container, script)]
    unpacking = container.start(*command, **environ)
    unpacking.communicate(timeout=60)
    assert unpacking.returncode == 0, errors_in(container)
    assert not list(container.tmp.glob("*.tcb"))
    settings = {item["name"]: item["value"] for item in own["env"]}
    for name in ("TCDEPLOY_REQUIRE_SIGNED", "TCDEPLOY_TRUST_CACHE_DIR"):
        settings[name] = base_settings()[name]
    with serving(container, "serve", **settings) as (port, server):
        check_server(container, port, server)
