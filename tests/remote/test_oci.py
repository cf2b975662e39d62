"""Bundles in a real container registry on loopback: healthy, tampered with, with authentication, and failing."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.errors import IntegrityError, NetworkError, SpaceError, UsageError
from tcdeploy.remote import oci, retry
from tcdeploy.remote.transfer import exists, find, pull, push
from tests.conftest import mounted_tmpfs
from tests.remote.conftest import OTHER_PLAN, PLAN, ConcurrentRun, Registry
from tests.remote.faulty import Cut, Drip, FakeResponse, Fault, Proxy, Request, Stall, Wait, proxy

pytest.importorskip("requests")
Make = Callable[..., Path]


@pytest.fixture
def front(registry: Registry) -> Iterator[Proxy]:
    """The registry behind a proxy that counts requests and injects faults."""
    with proxy(registry.port) as server:
        yield server


@pytest.fixture
def repository_url(front: Proxy, tmp_path: Path) -> str:
    """The URL of a repository that does not exist yet, different for each test."""
    return f"oci://{front.host}/bundles/{hashlib.sha256(str(tmp_path).encode()).hexdigest()[:12]}"


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def put_manifest(repository_url: str, tag: str, document: dict[str, Any]) -> None:
    host, _, repository = repository_url.removeprefix("oci://").partition("/")
    request = urllib.request.Request(
        f"http://{host}/v2/{repository}/manifests/{tag}", json.dumps(document).encode(), method="PUT"
    )
    request.add_header("Content-Type", document["mediaType"])
    urllib.request.urlopen(request).close()


def get_manifest(repository_url: str, tag: str) -> dict[str, Any]:
    host, _, repository = repository_url.removeprefix("oci://").partition("/")
    request = urllib.request.Request(f"http://{host}/v2/{repository}/manifests/{tag}")
    request.add_header("Accept", oci.MANIFEST_TYPE)
    with urllib.request.urlopen(request) as response:
        document: dict[str, Any] = json.load(response)
    return document


def test_a_pushed_bundle_can_be_pulled(repository_url: str, make_bundle: Make, inbox: Path) -> None:
    file = make_bundle(3_000_000)
    pushed = push(file, repository_url, PLAN)
    assert (pushed.url, pushed.already_present) == (f"{repository_url}/{PLAN}-{sha256(file)}.tcb", False)
    assert pull(pushed.url, inbox / "got.tcb").read_bytes() == file.read_bytes()
    assert [path.name for path in inbox.iterdir()] == ["got.tcb"]


def test_a_second_push_uploads_nothing(repository_url: str, front: Proxy, make_bundle: Make) -> None:
    file = make_bundle()
    push(file, repository_url, PLAN)
    front.requests.clear()
    assert push(file, repository_url, PLAN).already_present
    assert {request.method for request in front.requests} == {"GET", "HEAD"}
    front.requests.clear()
    assert push(file, repository_url, OTHER_PLAN).already_present is False, "another plan's tag"
    assert sum(request.body_bytes for request in front.requests) < 2000, "its blob already exists"


def test_two_pushes_that_both_find_the_tag_free_both_succeed(
    repository_url: str, front: Proxy, make_bundle: Make, inbox: Path
) -> None:
    file = make_bundle()
    barrier = threading.Barrier(2)
    front.choose = lambda request: (
        Wait(barrier) if (request.method, "manifests" in request.path) == ("PUT", True) else None
    )
    results = ConcurrentRun.run(lambda: push(file, repository_url, PLAN), 2).results
    assert [result.already_present for result in results] == [False, False], results
    assert find(repository_url, PLAN) == [results[0].url]
    assert pull(results[0].url, inbox / "got.tcb").read_bytes() == file.read_bytes()


def test_find_lists_the_bundles_of_a_plan_newest_first(repository_url: str, make_bundle: Make) -> None:
    assert find(repository_url, PLAN) == [], "a repository that does not exist has no bundles"
    assert not exists(repository_url)
    urls = []
    for _ in range(5):
        urls.append(push(make_bundle(100), repository_url, PLAN).url)
        time.sleep(0.005)  # timestamps have millisecond resolution
    push(make_bundle(100), repository_url, OTHER_PLAN)
    assert find(repository_url, PLAN) == urls[::-1] and exists(repository_url)


def test_paginated_tags_are_all_read(repository_url: str, front: Proxy, make_bundle: Make) -> None:
    """Debian's registry does not paginate, so the proxy does."""
    urls = [push(make_bundle(10), repository_url, PLAN).url for _ in range(5)]
    tags = [Path(url).stem for url in urls]

    def choose(request: Request) -> Fault | None:
        if "/tags/list" not in request.path:
            return None
        first = int(request.path.partition("last=")[2] or 0)
        next_link = (("Link", f'<{request.path.partition("?")[0]}?n=2&last={first + 2}>; rel="next"'),)
        return FakeResponse(200, json.dumps({"tags": tags[first : first + 2]}).encode(), next_link if first < 4 else ())

    front.choose = choose
    assert set(find(repository_url, PLAN)) == set(urls) and len(find(repository_url, PLAN)) == 5


def test_the_manifest_has_media_types_that_container_runtimes_reject(repository_url: str, make_bundle: Make) -> None:
    file = make_bundle()
    tag = Path(push(file, repository_url, PLAN).url).stem
    document = get_manifest(repository_url, tag)
    assert document["artifactType"] == "application/vnd.tcdeploy.bundle.v1"
    assert document["config"]["mediaType"] == "application/vnd.tcdeploy.config.v1+json"
    assert [layer["mediaType"] for layer in document["layers"]] == ["application/vnd.tcdeploy.bundle.v1+zstd"]
    assert document["layers"][0]["digest"] == f"sha256:{sha256(file)}"


def test_a_tag_moved_to_other_bytes_is_an_integrity_error(repository_url: str, make_bundle: Make, inbox: Path) -> None:
    file, other = make_bundle(), make_bundle(name="other.tcb")
    url, other_tag = push(file, repository_url, PLAN).url, Path(push(other, repository_url, PLAN).url).stem
    put_manifest(repository_url, Path(url).stem, get_manifest(repository_url, other_tag))
    with pytest.raises(IntegrityError, match="holds other bytes than"):
        push(file, repository_url, PLAN)
    with pytest.raises(IntegrityError, match="its manifest refers to sha256:"):
        pull(url, inbox / "got.tcb")
    assert list(inbox.iterdir()) == []


def test_a_tag_of_a_container_image_is_an_integrity_error(repository_url: str, make_bundle: Make, inbox: Path) -> None:
    url = push(make_bundle(), repository_url, PLAN).url
    document = get_manifest(repository_url, Path(url).stem)
    document["layers"][0]["mediaType"] = "application/vnd.oci.image.layer.v1.tar+gzip"
    put_manifest(repository_url, Path(url).stem, document)
    with pytest.raises(IntegrityError, match="its layer has media type application/vnd.oci.image.layer"):
        pull(url, inbox / "got.tcb")


@pytest.mark.parametrize("damage", ["flipped", "longer", "shorter"])
def test_a_blob_changed_on_the_registrys_disk_is_detected(
    repository_url: str, registry: Registry, make_bundle: Make, inbox: Path, damage: str
) -> None:
    file = make_bundle()
    url, original = push(file, repository_url, PLAN).url, file.read_bytes()
    damaged = {"flipped": b"x" * len(original), "longer": original + b"x", "shorter": original[:-1]}[damage]
    registry.blob(sha256(file)).write_bytes(damaged)
    with pytest.raises((IntegrityError, NetworkError)) as caught:
        pull(url, inbox / "got.tcb")
    assert caught.value.exit_code == (8 if damage == "shorter" else 5), (
        "a short body is reported as an interrupted transfer"
    )
    assert list(inbox.iterdir()) == []


def test_a_lost_blob_is_pushed_again(repository_url: str, registry: Registry, make_bundle: Make, inbox: Path) -> None:
    """A tag without its blob does not count as present."""
    file = make_bundle()
    url = push(file, repository_url, PLAN).url
    registry.blob(sha256(file)).unlink()
    with pytest.raises(NetworkError, match="does not exist"):
        pull(url, inbox / "got.tcb")
    assert push(file, repository_url, PLAN).already_present is False
    assert pull(url, inbox / "got.tcb").read_bytes() == file.read_bytes()


def test_without_free_space_a_pull_fails_before_the_download(
    repository_url: str, make_bundle: Make, tmp_path: Path
) -> None:
    url = push(make_bundle(2_000_000), repository_url, PLAN).url
    with mounted_tmpfs(tmp_path / "small", "-o", "size=1m") as folder:
        with pytest.raises(SpaceError, match="needs 2000000 bytes"):
            pull(url, folder / "got.tcb")
        assert list(folder.iterdir()) == []


@pytest.mark.parametrize("path", ["/blobs/", "/manifests/"])
@pytest.mark.parametrize("fault", [FakeResponse(500), FakeResponse(429), Cut(100)], ids=str)
def test_a_failing_registry_is_retried_a_bounded_number_of_times(
    repository_url: str, front: Proxy, make_bundle: Make, inbox: Path, fault: Fault, path: str
) -> None:
    file = make_bundle()
    url = push(file, repository_url, PLAN).url
    front.fail(fault, times=3, method="GET", path=path)
    assert pull(url, inbox / "got.tcb").read_bytes() == file.read_bytes()
    (inbox / "got.tcb").unlink()
    front.fail(fault, method="GET", path=path)
    with pytest.raises(NetworkError, match="failed after 4 attempts") as caught:
        pull(url, inbox / "got.tcb")
    assert caught.value.exit_code == 8 and url in caught.value.message
    assert front.count("GET", path) == retry.MAX_ATTEMPTS
    assert list(inbox.iterdir()) == []


@pytest.mark.parametrize("fault", [FakeResponse(500), Cut(0)], ids=str)
@pytest.mark.parametrize("path", ["/uploads/", "/manifests/"])
def test_a_push_succeeds_after_transient_errors(
    repository_url: str, front: Proxy, make_bundle: Make, inbox: Path, fault: Fault, path: str
) -> None:
    file = make_bundle()
    front.fail(fault, times=2, method="PUT", path=path)
    url = push(file, repository_url, PLAN).url
    assert pull(url, inbox / "got.tcb").read_bytes() == file.read_bytes()


@pytest.mark.parametrize("fault", [Stall(), Drip(0.05)], ids=["silent", "a byte at a time"])
def test_a_slow_registry_times_out(
    repository_url: str, front: Proxy, make_bundle: Make, inbox: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    url = push(make_bundle(5000), repository_url, PLAN).url
    monkeypatch.setattr(retry, "READ_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(retry, "TOTAL_TIMEOUT_SECONDS", 0.8)
    front.fail(fault, method="GET", path="/blobs/")
    start = time.monotonic()
    with pytest.raises(NetworkError, match="failed after [1-4] attempt"):
        pull(url, inbox / "got.tcb")
    assert time.monotonic() - start < 10
    assert list(inbox.iterdir()) == []


# Logins


def log_in(monkeypatch: pytest.MonkeyPatch, folder: Path, host: str, login: str) -> None:
    """Write the file that `docker login` writes."""
    folder.mkdir(exist_ok=True)
    document = {"auths": {host: {"auth": base64.b64encode(login.encode()).decode()}}}
    (folder / "config.json").write_text(json.dumps(document))
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))


def test_dockers_stored_login_is_used(
    guarded_registry: Registry, make_bundle: Make, inbox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with proxy(guarded_registry.port) as front:
        log_in(monkeypatch, tmp_path / "docker", front.host, "user:secret")
        file = make_bundle()
        pushed = push(file, f"oci://{front.host}/guarded", PLAN)
        assert pull(pushed.url, inbox / "got.tcb").read_bytes() == file.read_bytes()
        assert find(f"oci://{front.host}/guarded", PLAN) == [pushed.url]


@pytest.mark.parametrize("login", ["", "user:wrong"])
def test_a_wrong_login_fails_without_retries(
    guarded_registry: Registry,
    make_bundle: Make,
    inbox: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    login: str,
) -> None:
    with proxy(guarded_registry.port) as front:
        if login:
            log_in(monkeypatch, tmp_path / "docker", front.host, login)
        repository_url = f"oci://{front.host}/guarded"
        for operation in (
            lambda: push(make_bundle(), repository_url, PLAN),
            lambda: pull(f"{repository_url}/{PLAN}-{'0' * 64}.tcb", inbox / "got.tcb"),
            lambda: find(repository_url, PLAN),
        ):
            front.requests.clear()
            with pytest.raises(NetworkError, match="was denied .wrong or expired login") as caught:
                operation()
            assert "docker login" in caught.value.hint and "wrong" not in caught.value.hint
            assert len(front.requests) == (2 if login else 1), "one request without the login, one with it"
    assert list(inbox.iterdir()) == []


class TokenGate:
    """A registry that requires a Bearer token, and its token service."""

    def __init__(self, front: Proxy) -> None:
        self.front, self.scope = front, "repository:guarded:pull,push"

    def __call__(self, request: Request) -> Fault | None:
        if request.path.startswith("/token"):
            expected = "Basic " + base64.b64encode(b"user:secret").decode()
            has_scope = "scope=repository%3Aguarded%3Apull%2Cpush" in request.path and "service=here" in request.path
            return (
                FakeResponse(200, b'{"token": "t0ken"}')
                if request.authorization == expected and has_scope
                else FakeResponse(401)
            )
        if request.authorization == "Bearer t0ken":
            return None
        challenge = f'Bearer realm="http://{self.front.host}/token",service="here",scope="{self.scope}"'
        return FakeResponse(401, headers=(("WWW-Authenticate", challenge),))


@pytest.mark.parametrize("login", ["user:secret", "user:wrong"])
def test_a_bearer_challenge_is_answered_with_a_token(
    registry: Registry,
    make_bundle: Make,
    inbox: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    login: str,
) -> None:
    with proxy(registry.port) as front:
        front.choose = TokenGate(front)
        log_in(monkeypatch, tmp_path / "docker", front.host, login)
        file = make_bundle()
        if login == "user:secret":
            url = push(file, f"oci://{front.host}/guarded", PLAN).url
            assert pull(url, inbox / "got.tcb").read_bytes() == file.read_bytes()
            assert front.count("GET", "/token") == 2, "one token for a whole push, one for a whole pull"
        else:
            with pytest.raises(NetworkError, match="was denied .wrong or expired login"):
                push(file, f"oci://{front.host}/guarded", PLAN)
            assert front.count("GET", "/token") == 1


def test_the_login_is_not_sent_to_another_host(
    guarded_registry: Registry, registry: Registry, make_bundle: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload that the registry redirects to another host carries no login."""
    with proxy(guarded_registry.port) as front, proxy(registry.port) as other_host:
        log_in(monkeypatch, tmp_path / "docker", front.host, "user:secret")
        redirect = FakeResponse(202, headers=(("Location", f"http://{other_host.host}/v2/guarded/blobs/uploads/1"),))
        front.fail(redirect, method="POST")
        with pytest.raises(NetworkError):
            push(make_bundle(), f"oci://{front.host}/guarded", PLAN)
        assert other_host.count("PUT") > 0
        assert {request.authorization for request in other_host.requests} == {""}


# Addresses


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("oci://user:hunter2@host/repository", "credentials are not allowed in an oci:// URL"),
        ("oci://host", "has no valid repository name"),
        ("oci://host/Repository", "has no valid repository name"),
        ("oci://host/../repository", "has no valid repository name"),
        ("oci://host/repository?token=hunter2", r"accepts no query except \?insecure"),
    ],
)
def test_an_invalid_url_is_refused(url: str, message: str, make_bundle: Make) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        push(make_bundle(), url, PLAN)
    assert "hunter2" not in caught.value.message + caught.value.hint


def test_plain_http_requires_loopback_or_insecure(front: Proxy, make_bundle: Make, inbox: Path) -> None:
    """0.0.0.0 reaches this machine but is not a loopback address, so it needs ?insecure for plain http."""
    repository_url = f"oci://0.0.0.0:{front.server_address[1]}/repository"
    with pytest.raises(NetworkError):
        push(make_bundle(), repository_url, PLAN)
    assert front.requests == [], "no request was sent over plain http"
    file = make_bundle()
    pushed = push(file, f"{repository_url}?insecure", PLAN)
    assert pushed.url.endswith(".tcb?insecure")
    assert pull(pushed.url, inbox / "got.tcb").read_bytes() == file.read_bytes()
    assert find(f"{repository_url}?insecure", PLAN) == [pushed.url]
