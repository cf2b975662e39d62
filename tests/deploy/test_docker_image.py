"""recipes/deploy/docker: the Dockerfile is well formed, and its own steps make an image that serves a signed bundle.

Without a container registry, base images cannot be pulled, so `docker build` is not run. Instead, the steps that
concern tcdeploy run in namespaces (containers.py), and so do those of the init container of the Kubernetes manifests.
The installation of packages is not run here; tests/test_locks.py checks the lock file that it uses.
"""

from __future__ import annotations

import fnmatch
import functools
import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.conftest import PACKAGE_FLAGS, ROOT, TINY, RunCLI
from tests.deploy.containers import UID, Container, child_of, skip_unless_supported
from tests.deploy.recipe_files import DEPLOY, KUBERNETES, Document, check_settings, of_kind, render
from tests.deploy.refused_bundles import damage, move_to_another_environment, sign_with_another_key
from tests.ports import free_port
from tests.start.test_packaged_start import imported
from tests.test_locks import pins
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


@pytest.mark.parametrize(
    ("image", "is_accepted"),
    [
        (f"docker.io/library/python:3.12-slim@sha256:{'0a' * 32}", True), ("docker.io/library/python:3.12-slim", False),
        ("python@sha256:0a", False), (f"python@sha256:{'0a' * 32} --x", False), ("", False),
    ],
)  # fmt: skip
def test_a_base_image_without_a_digest_ends_the_build(image: str, is_accepted: bool) -> None:
    """All stages have this base, and every target contains the stage `wheel`."""
    first, text = arguments_of("wheel", "RUN")[0], DOCKERFILE.read_text()
    done = subprocess.run(["sh", "-c", first], env={"PYTHON_IMAGE": image, "PATH": os.environ["PATH"]})
    assert (done.returncode == 0) is is_accepted
    assert "\nARG PYTHON_IMAGE\n\nFROM" in text and "PYTHON_IMAGE=" not in text.partition("FROM")[0], "no default"
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) - STAGES.keys() == {"${PYTHON_IMAGE}"}


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
    stored: Path  # in a store below that folder
    address: str  # of a web server for that folder
    cache: Path  # that the bundle was packed from
    secret: Path

    def url(self, stored: Path | str) -> str:
        return f"{self.address}/{Path(stored).relative_to(self.context)}"

    def refused(self, case: str) -> str:
        """The URL of a bundle that must be refused."""
        store, name = self.context / case.replace(" ", "-"), self.stored.name
        if case == "unreachable":
            return f"http://127.0.0.1:{free_port()}/{name}"
        makers: dict[str, Callable[[], str]] = {
            "missing": lambda: str(store / name),
            "damaged": lambda: damage(self.stored, store),
            "signed by an unknown key": lambda: sign_with_another_key(self.stored, store, self.secret.parent),
            "of another version": lambda: self._moved(store, torch="1.13.1"),
            "of another GPU": lambda: self._moved(store, gpu="NVIDIA H100 80GB HBM3", gpu_capability=(9, 0)),
        }
        stored = makers[case]()
        make_readable(self.context)
        return self.url(stored)

    def _moved(self, store: Path, **changes: Any) -> str:
        return move_to_another_environment(store, self.cache, self.secret, **changes)


def make_readable(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


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
        make_readable(folder)
        with web_server(folder) as address:
            yield Bundle(folder, stored, address, home / "cache", home / "ci.key")


@contextmanager
def web_server(folder: Path) -> Iterator[str]:
    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def container() -> Iterator[Container]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Container(Path(folder))


def translate(container: Container, text: str) -> str:
    """Text with the volumes /tmp and /cache at their places in the test: the tests' own files may be below /tmp."""
    text = re.sub(r"(?<![\w/])/tmp(?![\w-])", str(container.tmp), text)
    return re.sub(r"(?<![\w/])/cache(?![\w-])", str(container.cache), text)


def start_server(container: Container, stage: str, port: str, **environ: str) -> subprocess.Popen[str]:
    """Start the entry point of a stage with its variables."""
    entrypoint = json.loads(arguments_of(stage, "ENTRYPOINT")[-1])
    variables = {name: translate(container, value) for name, value in {**variables_of(stage), **environ}.items()}
    variables |= {"TCDEPLOY_PORT": port, "TMPDIR": str(container.tmp), "PYTHONPROFILEIMPORTTIME": "1"}
    variables["PATH"] = variables["PATH"].replace("$PATH", "/no-compiler")
    program = f"/opt/tcdeploy/bin/{entrypoint[0]}"
    command = ["/usr/bin/env", f"PATH={variables.pop('PATH')}", program, *entrypoint[1:], TINY, *PACKAGE_FLAGS]
    return container.start(*command, **variables)


@contextmanager
def serving(container: Container, stage: str, **environ: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start the server of a stage. Yields the port once it is ready."""
    port = str(free_port())
    server = start_server(container, stage, port, **environ)
    try:
        assert server.stdout is not None
        ready = next((line for line in server.stdout if line.startswith("ready: ")), None)
        assert ready is not None, errors_in(container)
        yield port, server
    finally:
        server.kill()
        server.wait()


def settings_of(container: Document, documents: tuple[Document, ...], *names: str) -> dict[str, str]:
    """The variables that the manifest sets on a container, and those named `names` from the ConfigMap."""
    settings: dict[str, str] = of_kind(documents, "ConfigMap")["data"]
    own = {item["name"]: item["value"] for item in container["env"] if "value" in item}
    return {name: settings[name] for name in names} | own


def errors_in(container: Container) -> str:
    return "".join(line for line in container.log.open() if not line.startswith("import time:"))


def check_server(container: Container, port: str, server: subprocess.Popen[str]) -> None:
    """The health check of the image passes, a request succeeds, and SIGTERM to PID 1 ends the server."""
    [check] = arguments_of("serve", "HEALTHCHECK")
    program, *arguments = json.loads(check[check.index("[") :])
    assert program == "python"
    healthy, unhealthy = (
        subprocess.run([sys.executable, *arguments], env={"TCDEPLOY_PORT": number}, capture_output=True).returncode
        for number in (port, str(free_port()))
    )
    assert (healthy, unhealthy) == (0, 1)
    body = {"prompt": [3, 4, 5], "max_tokens": 4}
    assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60).status_code == 200
    main = child_of(server)
    assert set(main.uids()) == {UID}
    main.send_signal(signal.SIGTERM)
    server.communicate(timeout=30)
    assert server.returncode == 0, errors_in(container)
    modules = imported(container.log.read_text())
    assert "tcdeploy.start.packages" in modules and "transformers" not in modules and "torch._inductor" not in modules


def unpack_into_image(container: Container, context: Path) -> None:
    """Run the steps of the stage `unpacked` that concern the bundle."""
    for name, arguments in STAGES["unpacked"][len(STAGES["packages"]) :]:
        if name == "COPY":
            origin, source, target = arguments.split()
            assert origin == "--from=bundle"
            target = translate(container, target)
            container.build(f"mkdir -p $(dirname {target}) && cp -r {context}/{source} {target}")
        elif name == "RUN":
            environ = variables_of("unpacked")
            path = environ.pop("PATH").replace("$PATH", "/usr/bin:/bin")
            container.build(f"PATH={path}\n{translate(container, arguments)}", HOME="/root", **environ)


def test_an_image_with_a_bundle_of_another_version_is_not_built(
    container: Container, bundle: Bundle, tmp_path: Path
) -> None:
    bundle.refused("of another version")
    [stored] = (bundle.context / "of-another-version").iterdir()
    shutil.copytree(bundle.context / "trusted", tmp_path / "trusted")
    shutil.copy(stored, tmp_path / "model.tcb")
    with pytest.raises(AssertionError, match="was packed in another environment: torch"):
        unpack_into_image(container, tmp_path)


def test_the_image_with_a_bundle_serves_it_from_a_read_only_file_system(container: Container, bundle: Bundle) -> None:
    unpack_into_image(container, bundle.context)
    for command in arguments_of("runtime", "RUN"):
        container.build(f"PATH=/usr/sbin:/usr/bin:/bin\n{command}")
    for arguments in STAGES["baked"][len(STAGES["runtime"]) :]:
        if arguments[0] == "COPY":
            origin, source, target = arguments[1].split()
            assert (origin, source) == ("--from=unpacked", target), "the same path, so nothing is copied here"
    settings = of_kind(render(KUBERNETES / "base"), "ConfigMap")["data"]
    assert settings["TCDEPLOY_REQUIRE_SIGNED"] == variables_of("baked")["TCDEPLOY_REQUIRE_SIGNED"] == "true"
    with serving(container, "baked", TCDEPLOY_TRUST_CACHE_DIR=settings["TCDEPLOY_TRUST_CACHE_DIR"]) as (port, server):
        check_server(container, port, server)
    container.tmp.chmod(0o1777)  # a tmpfs of Docker, which needs no further setting
    with serving(container, "baked") as (port, server):
        check_server(container, port, server)


class Pod:
    """The containers of the rendered manifests that get the bundle from a store."""

    def __init__(self, container: Container, bundle: Bundle) -> None:
        self.container, self.documents = container, render(KUBERNETES / "overlays/production")
        pod = of_kind(self.documents, "Deployment")["spec"]["template"]["spec"]
        [self.init], [self.server] = pod["initContainers"], pod["containers"]
        container.build(f"mkdir -p /etc/tcdeploy && cp -r {bundle.context}/trusted /etc/tcdeploy/trusted")

    def run_init_container(self, bundle_url: str) -> int:
        variables = variables_of("serve") | settings_of(self.init, self.documents)
        environ = {name: translate(self.container, value) for name, value in variables.items()}
        environ |= {"TMPDIR": str(self.container.tmp), "BUNDLE_URL": bundle_url}
        path = environ.pop("PATH").replace("$PATH", "/usr/bin:/bin")
        command = [translate(self.container, argument) for argument in self.init["command"]]
        running = self.container.start("/usr/bin/env", f"PATH={path}", *command, **environ)
        running.communicate(timeout=60)
        return int(running.returncode)

    @property
    def server_settings(self) -> dict[str, str]:
        names = ("TCDEPLOY_PROGRAMS", "TCDEPLOY_REQUIRE_SIGNED", "TCDEPLOY_TRUST_CACHE_DIR")
        return settings_of(self.server, self.documents, *names)

    def termination_message(self) -> list[str]:
        """What `kubectl describe pod` shows of a container that failed: the last 2 KiB, or 80 lines, of its log."""
        assert self.init["terminationMessagePolicy"] == self.server["terminationMessagePolicy"]
        assert self.server["terminationMessagePolicy"] == "FallbackToLogsOnError"
        return errors_in(self.container)[-2048:].splitlines()[-80:]


@pytest.fixture
def pod(container: Container, bundle: Bundle) -> Pod:
    return Pod(container, bundle)


def test_the_init_container_unpacks_a_bundle_that_the_server_starts_from(pod: Pod, bundle: Bundle) -> None:
    assert pod.run_init_container(bundle.url(bundle.stored)) == 0, errors_in(pod.container)
    assert not list(pod.container.tmp.iterdir())
    with serving(pod.container, "serve", **pod.server_settings) as (port, server):
        check_server(pod.container, port, server)


@pytest.mark.parametrize(
    ("case", "code", "message", "cure"),
    [
        ("missing", 8, "does not exist", "check the URL"),
        ("unreachable", 8, "failed after 4 attempts: ", "check that the store is reachable"),
        ("damaged", 5, "does not match its name", "delete it from the store and push it again"),
        ("signed by an unknown key", 4, "no trusted key signed the bundle", "trust a key whose owner you know"),
        ("of another version", 3, "was packed in another environment: torch", "pack it again"),
    ],
)
def test_the_init_container_refuses_a_bundle(
    pod: Pod, bundle: Bundle, case: str, code: int, message: str, cure: str
) -> None:
    """Nothing is left in the volumes, and the last lines of the log say what is wrong and how to cure it."""
    assert pod.run_init_container(bundle.refused(case)) == code, errors_in(pod.container)
    *_, error, hint = pod.termination_message()
    assert error.startswith("error: ") and message in error
    assert hint.startswith("hint: ") and cure in hint
    assert not [*pod.container.tmp.iterdir(), *pod.container.cache.iterdir()]


def test_the_server_refuses_a_bundle_of_another_gpu(pod: Pod, bundle: Bundle) -> None:
    """The init container has no GPU to compare."""
    assert pod.run_init_container(bundle.refused("of another GPU")) == 0, errors_in(pod.container)
    server = start_server(pod.container, "serve", str(free_port()), **pod.server_settings)
    server.communicate(timeout=60)
    print(errors_in(pod.container))
    *_, error, hint = pod.termination_message()
    assert server.returncode == 3, errors_in(pod.container)
    assert "were made in another environment: gpu NVIDIA H100 80GB HBM3 (here none)" in error
    assert "tcdeploy cache pack" in hint
