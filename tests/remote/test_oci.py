"""Bundles in a real container registry on loopback, in good health, tampered with, guarded and in trouble."""

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
from tcdeploy.remote import oci
from tcdeploy.remote import retry as retry
from tcdeploy.remote.transfer import find, pull, push
from tests.conftest import mounted_tmpfs
from tests.remote.conftest import OTHER_PLAN, PLAN, ConcurrentRun, Registry
from tests.remote.faulty import Cut, Drip, FakeResponse, Fault, Proxy, Request, Stall, Wait, proxy

pytest.importorskip("requests")
Make = Callable[..., Path]


@pytest.fixture
def front(registry: Registry) -> Iterator[Proxy]:
    """The registry behind the proxy that counts and fails."""
    with proxy(registry.port) as server:
        yield server


@pytest.fixture
def place(front: Proxy, tmp_path: Path) -> str:
    """A repository of the test's own, which does not exist yet."""
    return f"oci://{front.host}/bundles/{hashlib.sha256(str(tmp_path).encode()).hexdigest()[:12]}"


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def put_manifest(place: str, tag: str, document: dict[str, Any]) -> None:
    host, _, repository = place.removeprefix("oci://").partition("/")
    request = urllib.request.Request(
        f"http://{host}/v2/{repository}/manifests/{tag}", json.dumps(document).encode(), method="PUT"
    )
    request.add_header("Content-Type", document["mediaType"])
    urllib.request.urlopen(request).close()


def get_manifest(place: str, tag: str) -> dict[str, Any]:
    host, _, repository = place.removeprefix("oci://").partition("/")
    request = urllib.request.Request(f"http://{host}/v2/{repository}/manifests/{tag}")
    request.add_header("Accept", oci.MANIFEST_TYPE)
    with urllib.request.urlopen(request) as answer:
        document: dict[str, Any] = json.load(answer)
    return document


def test_what_was_pushed_is_what_is_pulled(place: str, make_bundle: Make, inbox: Path) -> None:
    file = make_bundle(3_000_000)
    pushed = push(file, place, PLAN)
    assert (pushed.url, pushed.already_present) == (f"{place}/{PLAN}-{sha256(file)}.tcb", False)
    assert pull(pushed.url, inbox / "got.tcb").read_bytes() == file.read_bytes()
    assert [path.name for path in inbox.iterdir()] == ["got.tcb"]


def test_the_second_push_sends_nothing(place: str, front: Proxy, make_bundle: Make) -> None:
    file = make_bundle()
    push(file, place, PLAN)
    front.requests.clear()
    assert push(file, place, PLAN).already_present
    assert {request.method for request in front.requests} == {"GET", "HEAD"}
    front.requests.clear()
    assert push(file, place, OTHER_PLAN).already_present is False, "another plan's tag"
    assert sum(request.body_bytes for request in front.requests) < 2000, "its blob is there already"


def test_two_that_both_saw_a_free_tag_both_succeed(place: str, front: Proxy, make_bundle: Make, inbox: Path) -> None:
    file = make_bundle()
    barrier = threading.Barrier(2)
    front.choose = lambda request: (
        Wait(barrier) if (request.method, "manifests" in request.path) == ("PUT", True) else None
    )
    results = ConcurrentRun.run(lambda: push(file, place, PLAN), 2).results
    assert [result.already_present for result in results] == [False, False], results
    assert find(place, PLAN) == [results[0].url]
    assert pull(results[0].url, inbox / "got.tcb").read_bytes() == file.read_bytes()


def test_a_plan_finds_its_own_bundles_the_newest_first(place: str, make_bundle: Make) -> None:
    assert find(place, PLAN) == [], "a repository that is not there yet has none"
    urls = []
    for _ in range(5):
        urls.append(push(make_bundle(100), place, PLAN).url)
        time.sleep(0.005)  # the tag's time has milliseconds
    push(make_bundle(100), place, OTHER_PLAN)
    assert find(place, PLAN) == urls[::-1]


def test_many_tags_come_in_pages(place: str, front: Proxy, make_bundle: Make) -> None:
    """Debian's registry gives all tags at once, so the pages are the proxy's."""
    urls = [push(make_bundle(10), place, PLAN).url for _ in range(5)]
    tags = [Path(url).stem for url in urls]

    def choose(request: Request) -> Fault | None:
        if "/tags/list" not in request.path:
            return None
        first = int(request.path.partition("last=")[2] or 0)
        following = (("Link", f'<{request.path.partition("?")[0]}?n=2&last={first + 2}>; rel="next"'),)
        return FakeResponse(200, json.dumps({"tags": tags[first : first + 2]}).encode(), following if first < 4 else ())

    front.choose = choose
    assert set(find(place, PLAN)) == set(urls) and len(find(place, PLAN)) == 5


def test_a_container_runtime_sees_that_it_is_no_image(place: str, make_bundle: Make) -> None:
    file = make_bundle()
    tag = Path(push(file, place, PLAN).url).stem
    document = get_manifest(place, tag)
    assert document["artifactType"] == "application/vnd.tcdeploy.bundle.v1"
    assert document["config"]["mediaType"] == "application/vnd.tcdeploy.config.v1+json"
    assert [layer["mediaType"] for layer in document["layers"]] == ["application/vnd.tcdeploy.bundle.v1+zstd"]
    assert document["layers"][0]["digest"] == f"sha256:{sha256(file)}"


def test_a_tag_that_was_moved_to_other_bytes_is_told(place: str, make_bundle: Make, inbox: Path) -> None:
    file, other = make_bundle(), make_bundle(name="other.tcb")
    url, other_tag = push(file, place, PLAN).url, Path(push(other, place, PLAN).url).stem
    put_manifest(place, Path(url).stem, get_manifest(place, other_tag))
    with pytest.raises(IntegrityError, match="other bytes stand at"):
        push(file, place, PLAN)
    with pytest.raises(IntegrityError, match="its manifest names sha256:"):
        pull(url, inbox / "got.tcb")
    assert list(inbox.iterdir()) == []


def test_a_tag_of_somebody_elses_image_is_told(place: str, make_bundle: Make, inbox: Path) -> None:
    url = push(make_bundle(), place, PLAN).url
    document = get_manifest(place, Path(url).stem)
    document["layers"][0]["mediaType"] = "application/vnd.oci.image.layer.v1.tar+gzip"
    put_manifest(place, Path(url).stem, document)
    with pytest.raises(IntegrityError, match="it holds application/vnd.oci.image.layer"):
        pull(url, inbox / "got.tcb")


@pytest.mark.parametrize("damage", ["flipped", "longer", "shorter"])
def test_a_blob_that_changed_on_the_registrys_disk_is_told(
    place: str, registry: Registry, make_bundle: Make, inbox: Path, damage: str
) -> None:
    file = make_bundle()
    url, right = push(file, place, PLAN).url, file.read_bytes()
    wrong = {"flipped": b"x" * len(right), "longer": right + b"x", "shorter": right[:-1]}[damage]
    registry.blob(sha256(file)).write_bytes(wrong)
    with pytest.raises((IntegrityError, NetworkError)) as caught:
        pull(url, inbox / "got.tcb")
    assert caught.value.exit_code == (8 if damage == "shorter" else 5), "what is too short was cut on the way"
    assert list(inbox.iterdir()) == []


def test_a_blob_that_is_lost_is_pushed_again(place: str, registry: Registry, make_bundle: Make, inbox: Path) -> None:
    """A tag without its blob is not a bundle that was there."""
    file = make_bundle()
    url = push(file, place, PLAN).url
    registry.blob(sha256(file)).unlink()
    with pytest.raises(NetworkError, match="nothing is there"):
        pull(url, inbox / "got.tcb")
    assert push(file, place, PLAN).already_present is False
    assert pull(url, inbox / "got.tcb").read_bytes() == file.read_bytes()


def test_a_disk_without_room_refuses_before_the_first_byte(place: str, make_bundle: Make, tmp_path: Path) -> None:
    url = push(make_bundle(2_000_000), place, PLAN).url
    with mounted_tmpfs(tmp_path / "small", "-o", "size=1m") as folder:
        with pytest.raises(SpaceError, match="needs 2000000 bytes"):
            pull(url, folder / "got.tcb")
        assert list(folder.iterdir()) == []


@pytest.mark.parametrize("path", ["/blobs/", "/manifests/"])
@pytest.mark.parametrize("fault", [FakeResponse(500), FakeResponse(429), Cut(100)], ids=str)
def test_a_registry_in_trouble_is_asked_again_but_not_for_ever(
    place: str, front: Proxy, make_bundle: Make, inbox: Path, fault: Fault, path: str
) -> None:
    file = make_bundle()
    url = push(file, place, PLAN).url
    front.fail(fault, times=3, method="GET", path=path)
    assert pull(url, inbox / "got.tcb").read_bytes() == file.read_bytes()
    (inbox / "got.tcb").unlink()
    front.fail(fault, method="GET", path=path)
    with pytest.raises(NetworkError, match="tried 4 times") as caught:
        pull(url, inbox / "got.tcb")
    assert caught.value.exit_code == 8 and url in caught.value.message
    assert front.count("GET", path) == retry.MAX_ATTEMPTS
    assert list(inbox.iterdir()) == []


@pytest.mark.parametrize("fault", [FakeResponse(500), Cut(0)], ids=str)
@pytest.mark.parametrize("path", ["/uploads/", "/manifests/"])
def test_a_push_through_errors_arrives(
    place: str, front: Proxy, make_bundle: Make, inbox: Path, fault: Fault, path: str
) -> None:
    file = make_bundle()
    front.fail(fault, times=2, method="PUT", path=path)
    url = push(file, place, PLAN).url
    assert pull(url, inbox / "got.tcb").read_bytes() == file.read_bytes()


@pytest.mark.parametrize("fault", [Stall(), Drip(0.05)], ids=["silent", "a byte at a time"])
def test_a_slow_registry_is_given_up_on(
    place: str, front: Proxy, make_bundle: Make, inbox: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    url = push(make_bundle(5000), place, PLAN).url
    monkeypatch.setattr(retry, "READ_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(retry, "TOTAL_TIMEOUT_SECONDS", 1.5)
    front.fail(fault, method="GET", path="/blobs/")
    start = time.monotonic()
    with pytest.raises(NetworkError, match="did not answer as it should"):
        pull(url, inbox / "got.tcb")
    assert time.monotonic() - start < 10
    assert list(inbox.iterdir()) == []


# Logins


def log_in(monkeypatch: pytest.MonkeyPatch, folder: Path, host: str, login: str) -> None:
    """What docker login writes."""
    folder.mkdir(exist_ok=True)
    document = {"auths": {host: {"auth": base64.b64encode(login.encode()).decode()}}}
    (folder / "config.json").write_text(json.dumps(document))
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))


def test_a_guarded_registry_takes_dockers_login(
    guarded_registry: Registry, make_bundle: Make, inbox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with proxy(guarded_registry.port) as front:
        log_in(monkeypatch, tmp_path / "docker", front.host, "user:secret")
        file = make_bundle()
        pushed = push(file, f"oci://{front.host}/guarded", PLAN)
        assert pull(pushed.url, inbox / "got.tcb").read_bytes() == file.read_bytes()
        assert find(f"oci://{front.host}/guarded", PLAN) == [pushed.url]


@pytest.mark.parametrize("login", ["", "user:wrong"])
def test_a_wrong_login_is_said_at_once(
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
        place = f"oci://{front.host}/guarded"
        for work in (
            lambda: push(make_bundle(), place, PLAN),
            lambda: pull(f"{place}/{PLAN}-{'0' * 64}.tcb", inbox / "got.tcb"),
            lambda: find(place, PLAN),
        ):
            front.requests.clear()
            with pytest.raises(NetworkError, match="lets nobody in with this login, wrong or expired") as caught:
                work()
            assert "docker login" in caught.value.hint and "wrong" not in caught.value.hint
            assert len(front.requests) == (2 if login else 1), "once without, once with the login"
    assert list(inbox.iterdir()) == []


class TokenGate:
    """A registry's front that wants a token, and the service that gives it for user and password."""

    def __init__(self, front: Proxy) -> None:
        self.front, self.scope = front, "repository:guarded:pull,push"

    def __call__(self, request: Request) -> Fault | None:
        if request.path.startswith("/token"):
            right = "Basic " + base64.b64encode(b"user:secret").decode()
            asked = "scope=repository%3Aguarded%3Apull%2Cpush" in request.path and "service=here" in request.path
            return (
                FakeResponse(200, b'{"token": "given"}')
                if request.authorization == right and asked
                else FakeResponse(401)
            )
        if request.authorization == "Bearer given":
            return None
        wants = f'Bearer realm="http://{self.front.host}/token",service="here",scope="{self.scope}"'
        return FakeResponse(401, headers=(("WWW-Authenticate", wants),))


@pytest.mark.parametrize("login", ["user:secret", "user:wrong"])
def test_a_registry_that_wants_a_token_is_given_one(
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
            with pytest.raises(NetworkError, match="lets nobody in"):
                push(file, f"oci://{front.host}/guarded", PLAN)
            assert front.count("GET", "/token") == 1


def test_a_login_is_not_carried_to_another_host(
    guarded_registry: Registry, registry: Registry, make_bundle: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registry that sends the upload elsewhere sends it without the password."""
    with proxy(guarded_registry.port) as front, proxy(registry.port) as stranger:
        log_in(monkeypatch, tmp_path / "docker", front.host, "user:secret")
        elsewhere = FakeResponse(202, headers=(("Location", f"http://{stranger.host}/v2/guarded/blobs/uploads/1"),))
        front.fail(elsewhere, method="POST")
        with pytest.raises(NetworkError):
            push(make_bundle(), f"oci://{front.host}/guarded", PLAN)
        assert stranger.count("PUT") > 0
        assert {request.authorization for request in stranger.requests} == {""}


# Addresses


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("oci://user:hunter2@host/repository", "a login does not belong in a URL"),
        ("oci://host", "names no repository"),
        ("oci://host/Repository", "names no repository"),
        ("oci://host/../repository", "names no repository"),
        ("oci://host/repository?token=hunter2", r"the only query of an oci:// URL is \?insecure"),
    ],
)
def test_an_address_that_is_none_is_refused(url: str, words: str, make_bundle: Make) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        push(make_bundle(), url, PLAN)
    assert "hunter2" not in caught.value.message + caught.value.hint


def test_plain_http_is_for_loopback_or_when_it_is_asked_for(front: Proxy, make_bundle: Make, inbox: Path) -> None:
    """0.0.0.0 reaches this machine, and is not a loopback address: https, until the URL says otherwise."""
    place = f"oci://0.0.0.0:{front.server_address[1]}/asked"
    with pytest.raises(NetworkError):
        push(make_bundle(), place, PLAN)
    assert front.requests == [], "no request came through in the clear"
    file = make_bundle()
    pushed = push(file, f"{place}?insecure", PLAN)
    assert pushed.url.endswith(".tcb?insecure")
    assert pull(pushed.url, inbox / "got.tcb").read_bytes() == file.read_bytes()
    assert find(f"{place}?insecure", PLAN) == [pushed.url]
