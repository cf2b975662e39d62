"""Push, pull and find on folders, memory, S3 and HTTP, with the stores in good health and in every bad one."""

from __future__ import annotations

import gzip
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.errors import IntegrityError, NetworkError, SpaceError, UsageError
from tcdeploy.remote import retry as retry
from tcdeploy.remote import transfer
from tcdeploy.remote.address import Address
from tcdeploy.remote.transfer import find, pull, push, redacted
from tests.conftest import mounted_tmpfs
from tests.remote.conftest import OTHER_PLAN, PLAN, ConcurrentRun
from tests.remote.faulty import Cut, Drip, FakeResponse, NoContentLength, Proxy, Stall, Wait

Make = Callable[..., Path]
EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


@pytest.fixture(params=["folder", "file", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder URL of each kind, which does not exist yet."""
    if request.param == "s3":
        request.getfixturevalue("s3")
    folder = tmp_path / "stored" / "deep"
    urls = {"folder": str(folder), "file": f"file://{folder}", "memory": f"memory://{tmp_path.name}/deep"}
    return urls.get(request.param, "s3://bucket/deep")


def put_on(web: tuple[Proxy, Path], file: Path) -> str:
    """The URL of a bundle that a web server shows."""
    proxy, folder = web
    return f"http://{proxy.host}/{Path(push(file, str(folder), PLAN).url).name}"


def name_for(file: Path, plan: str = PLAN) -> str:
    return f"{plan}-{hashlib.sha256(file.read_bytes()).hexdigest()}.tcb"


# Every place


def test_what_was_pushed_is_what_is_pulled(place: str, make_bundle: Make, inbox: Path) -> None:
    file = make_bundle(3_000_000)
    pushed = push(file, place, PLAN)
    assert (pushed.url, pushed.bytes, pushed.already_present) == (f"{place}/{name_for(file)}", 3_000_000, False)
    assert pull(pushed.url, inbox / "got.tcb") == inbox / "got.tcb"
    assert (inbox / "got.tcb").read_bytes() == file.read_bytes()
    assert [path.name for path in inbox.iterdir()] == ["got.tcb"]


def test_the_second_push_says_that_it_was_there(place: str, make_bundle: Make) -> None:
    file = make_bundle()
    assert [push(file, f"{place}/", PLAN).already_present for _ in range(3)] == [False, True, True]
    assert push(file, place, OTHER_PLAN).already_present is False, "a plan's bundle is its own, whatever its bytes"


def test_jobs_that_push_the_same_bytes_at_once_all_succeed(place: str, make_bundle: Make, inbox: Path) -> None:
    file = make_bundle()
    results = ConcurrentRun.run(lambda: push(file, place, PLAN), 6).results
    assert [result.url for result in results] == [f"{place}/{name_for(file)}"] * 6, results
    assert find(place, PLAN) == [results[0].url], "one bundle, and no temporary"
    assert pull(results[0].url, inbox / "got.tcb").read_bytes() == file.read_bytes()


def test_a_plan_finds_its_own_bundles(place: str, make_bundle: Make) -> None:
    assert find(place, PLAN) == [], "a folder that is not there yet has none"
    urls = {push(make_bundle(100), place, PLAN).url for _ in range(3)}
    push(make_bundle(100), place, OTHER_PLAN)
    assert set(find(place, PLAN)) == urls and len(find(place, PLAN)) == 3
    assert find(f"{place}/elsewhere", PLAN) == []


def test_an_empty_bundle_travels_too(place: str, make_bundle: Make, inbox: Path) -> None:
    url = push(make_bundle(0), place, PLAN).url
    assert pull(url, inbox / "got.tcb").read_bytes() == b""


def test_a_bundle_that_is_not_there_is_said_so(place: str, make_bundle: Make, inbox: Path) -> None:
    push(make_bundle(), place, PLAN)
    with pytest.raises(NetworkError, match="nothing is there") as caught:
        pull(f"{place}/{OTHER_PLAN}-{'0' * 64}.tcb", inbox / "got.tcb")
    assert f"{place}/{OTHER_PLAN}" in caught.value.message and caught.value.exit_code == 8
    assert list(inbox.iterdir()) == []


def overwrite(url: str, content: bytes) -> None:
    import fsspec

    with fsspec.open(url, "wb", skip_instance_cache=True) as file:
        file.write(content)


@pytest.mark.parametrize("damage", ["flipped", "shorter", "longer"])
def test_other_bytes_under_the_name_are_told_by_push_and_by_pull(
    place: str, make_bundle: Make, inbox: Path, damage: str
) -> None:
    file = make_bundle()
    url, right = push(file, place, PLAN).url, file.read_bytes()
    wrong = {"flipped": right[:-1] + bytes([right[-1] ^ 1]), "shorter": right[:-1], "longer": right + b"x"}[damage]
    overwrite(url, wrong)
    with pytest.raises(IntegrityError, match="other bytes stand at") as caught:
        push(file, place, PLAN)
    assert url in caught.value.message and caught.value.exit_code == 5
    (inbox / "got.tcb").write_text("what was there before")
    with pytest.raises(IntegrityError, match="is not the bundle of that name"):
        pull(url, inbox / "got.tcb")
    assert [path.read_text() for path in inbox.iterdir()] == ["what was there before"]


# A folder


def test_the_newest_bundle_comes_first(tmp_path: Path, make_bundle: Make) -> None:
    urls = [push(make_bundle(100), str(tmp_path / "stored"), PLAN).url for _ in range(4)]
    order = [urls[2], urls[0], urls[3], urls[1]]
    for age, url in enumerate(order):
        os.utime(url, (1e9 - age, 1e9 - age))
    assert find(str(tmp_path / "stored"), PLAN) == order


def test_exactly_one_of_many_jobs_writes(tmp_path: Path, make_bundle: Make) -> None:
    file = make_bundle()
    results = ConcurrentRun.run(lambda: push(file, str(tmp_path / "stored"), PLAN), 12).results
    assert sorted(result.already_present for result in results) == [False] + [True] * 11
    assert len(list((tmp_path / "stored").iterdir())) == 1


def test_a_file_system_without_hard_links_serves_too(
    tmp_path: Path, make_bundle: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    file = make_bundle()
    assert [push(file, str(tmp_path / "stored"), PLAN).already_present for _ in range(2)] == [False, True]
    assert [path.name for path in (tmp_path / "stored").iterdir()] == [name_for(file)]


def test_a_full_disk_at_the_destination_is_told_and_left_clean(tmp_path: Path, make_bundle: Make) -> None:
    file = make_bundle(2_000_000)
    with mounted_tmpfs(tmp_path / "small", "-o", "size=1m") as folder:
        with pytest.raises(SpaceError, match="no room") as caught:
            push(file, str(folder / "stored"), PLAN)
        assert list((folder / "stored").iterdir()) == []
    assert caught.value.exit_code == 7


def test_a_disk_without_room_refuses_before_the_first_byte(
    tmp_path: Path, make_bundle: Make, web: tuple[Proxy, Path]
) -> None:
    url = put_on(web, make_bundle(2_000_000))
    with mounted_tmpfs(tmp_path / "small", "-o", "size=1m") as folder:
        with pytest.raises(SpaceError, match=r"needs 2000000 bytes \(1.9 MiB\)"):
            pull(url, folder / "got.tcb")
        assert list(folder.iterdir()) == []


@pytest.mark.parametrize("size", [2_000_000, (1 << 20) + 10], ids=["long before the end", "in the last write"])
def test_a_disk_that_fills_up_on_the_way_is_left_clean(
    tmp_path: Path, make_bundle: Make, web: tuple[Proxy, Path], size: int
) -> None:
    """The server does not say how long the bundle is, so nothing can be refused before."""
    url = put_on(web, make_bundle(size))
    web[0].fail(NoContentLength())
    with mounted_tmpfs(tmp_path / "small", "-o", "size=1m") as folder:
        with pytest.raises(SpaceError, match=f"the disk of {folder} is full"):
            pull(url, folder / "got.tcb")
        assert list(folder.iterdir()) == []
    assert web[0].count("GET") == 1, "a full disk is not tried again"


def test_a_move_that_fails_leaves_no_temporary(
    tmp_path: Path, make_bundle: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    def refuse(*arguments: Any) -> None:
        raise ConnectionResetError("gone")

    monkeypatch.setattr(MemoryFileSystem, "mv", refuse)
    with pytest.raises(NetworkError, match="tried 4 times"):
        push(make_bundle(), f"memory://{tmp_path.name}/moved", PLAN)
    assert MemoryFileSystem().ls(f"/{tmp_path.name}/moved") == []


# S3


def test_a_push_that_finds_its_bytes_uploads_none(s3: Proxy, make_bundle: Make) -> None:
    file = make_bundle()
    push(file, "s3://bucket/deep", PLAN)
    assert s3.count("PUT") == 1
    s3.requests.clear()
    assert push(file, "s3://bucket/deep", PLAN).already_present
    assert {request.method for request in s3.requests} == {"HEAD", "GET"}
    assert sum(request.body_bytes for request in s3.requests) == 0


@pytest.mark.parametrize("size", [300_000, 40_000_000], ids=["in one put", "in parts"])
def test_s3_keeps_the_first_of_two_writers_that_both_saw_a_free_name(
    s3: Proxy, make_bundle: Make, inbox: Path, size: int
) -> None:
    """Both writes are held until both have come: what decides is the store's If-None-Match."""
    file = make_bundle(size)
    method = "PUT" if size < 1_000_000 else "POST"
    path = ".tcb" if method == "PUT" else "uploadId="
    barrier = threading.Barrier(2)
    s3.choose = lambda request: Wait(barrier) if request.method == method and path in request.path else None
    results = ConcurrentRun.run(lambda: push(file, "s3://bucket/deep", PLAN), 2).results
    assert sorted(result.already_present for result in results) == [False, True], results
    s3.choose = lambda request: None
    assert pull(results[0].url, inbox / "got.tcb").read_bytes() == file.read_bytes()


def test_a_writer_that_comes_too_late_never_overwrites(s3: Proxy, s3_client: Any, make_bundle: Make) -> None:
    """Other bytes appear under the name between the look and the write."""
    file = make_bundle()
    key = f"deep/{name_for(file)}"

    def choose(request: Any) -> None:
        if request.method == "PUT":
            s3_client.put_object(Bucket="bucket", Key=key, Body=b"other")

    s3.choose = choose
    with pytest.raises(IntegrityError, match="other bytes stand at"):
        push(file, "s3://bucket/deep", PLAN)
    assert s3_client.get_object(Bucket="bucket", Key=key)["Body"].read() == b"other"


def test_a_failed_upload_in_parts_leaves_none_of_them(s3: Proxy, s3_client: Any, make_bundle: Make) -> None:
    s3.fail(FakeResponse(500), method="PUT", path="partNumber=3")
    with pytest.raises(NetworkError, match="tried 4 times: it answered 500"):
        push(make_bundle(40_000_000), "s3://bucket/deep", PLAN)
    assert "Uploads" not in s3_client.list_multipart_uploads(Bucket="bucket")
    assert "Contents" not in s3_client.list_objects_v2(Bucket="bucket")


@pytest.mark.parametrize("fault", [FakeResponse(500), FakeResponse(503, SLOW_DOWN), Cut(1000)], ids=str)
def test_s3_in_trouble_is_asked_again_but_not_for_ever(s3: Proxy, make_bundle: Make, inbox: Path, fault: Any) -> None:
    file = make_bundle()
    url = push(file, "s3://bucket/deep", PLAN).url
    s3.fail(fault, times=3, method="GET")
    assert pull(url, inbox / "got.tcb").read_bytes() == file.read_bytes()
    s3.fail(fault, method="GET")
    (inbox / "got.tcb").unlink()
    with pytest.raises(NetworkError, match="tried 4 times") as caught:
        pull(url, inbox / "got.tcb")
    assert caught.value.exit_code == 8 and url in caught.value.message and caught.value.hint
    assert s3.count("GET") == retry.MAX_ATTEMPTS, "the library's own attempts do not multiply with ours"
    assert list(inbox.iterdir()) == []


def test_a_push_through_errors_arrives(s3: Proxy, make_bundle: Make, inbox: Path) -> None:
    file = make_bundle()
    s3.fail(FakeResponse(500), times=2, method="PUT")
    pushed = push(file, "s3://bucket/deep", PLAN)
    assert pushed.already_present is False and s3.count("PUT") == 3
    assert pull(pushed.url, inbox / "got.tcb").read_bytes() == file.read_bytes()


def test_a_push_whose_answer_was_lost_has_arrived(s3: Proxy, make_bundle: Make) -> None:
    """The bytes are stored and the connection is cut: the next attempt finds them, and does not complain."""
    s3.choose = lambda request: Cut(0) if request.method == "PUT" and s3.count("PUT") == 1 else None
    assert find("s3://bucket/deep", PLAN) == []
    url = push(make_bundle(), "s3://bucket/deep", PLAN).url
    assert find("s3://bucket/deep", PLAN) == [url]


@pytest.mark.parametrize(
    ("status", "body"), [(400, EXPIRED), (403, EXPIRED.replace(b"ExpiredToken", b"InvalidAccessKeyId")), (401, b"")]
)
def test_an_expired_login_is_said_at_once(s3: Proxy, make_bundle: Make, inbox: Path, status: int, body: bytes) -> None:
    """A HEAD has no body, so S3 says no more than 400 there, and s3fs asks by a list as well: two requests then."""
    file = make_bundle()
    url = push(file, "s3://bucket/deep", PLAN).url
    s3.fail(FakeResponse(status, body))
    for work in (
        lambda: push(file, "s3://bucket/deep", PLAN),
        lambda: pull(url, inbox / "got.tcb"),
        lambda: find("s3://bucket/deep", PLAN),
    ):
        s3.requests.clear()
        with pytest.raises(NetworkError, match="lets nobody in with this login, wrong or expired") as caught:
            work()
        assert caught.value.exit_code == 8 and "aws sso login" in caught.value.hint
        asked = [(request.method, request.path) for request in s3.requests]
        assert len(asked) == len(set(asked)) <= 2, "asking the same again does not make a login valid"
    assert list(inbox.iterdir()) == []


def test_no_login_at_all_is_said_as_plainly(s3: Proxy, monkeypatch: pytest.MonkeyPatch, inbox: Path) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(NetworkError, match="lets nobody in") as caught:
        pull(f"s3://bucket/deep/{PLAN}-{'0' * 64}.tcb", inbox / "got.tcb")
    assert "aws sso login" in caught.value.hint and s3.requests == []


def test_a_bucket_that_does_not_exist_is_no_empty_folder(s3: Proxy, make_bundle: Make) -> None:
    with pytest.raises(NetworkError, match="nothing is there: s3://no-such-bucket"):
        find("s3://no-such-bucket/deep", PLAN)
    with pytest.raises(NetworkError, match="nothing is there: s3://no-such-bucket"):
        push(make_bundle(), "s3://no-such-bucket/deep", PLAN)


@pytest.mark.parametrize("fault", [Stall(), Drip(0.05)], ids=["silent", "a byte at a time"])
def test_a_slow_s3_is_given_up_on(
    s3: Proxy, make_bundle: Make, inbox: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    monkeypatch.setattr(retry, "READ_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(retry, "TOTAL_TIMEOUT_SECONDS", 1.5)
    url = push(make_bundle(5000), "s3://bucket/deep", PLAN).url
    s3.fail(fault, method="GET")
    start = time.monotonic()
    with pytest.raises(NetworkError, match="did not answer as it should"):
        pull(url, inbox / "got.tcb")
    assert time.monotonic() - start < 10, "twenty times 250 s would be the whole body"
    assert list(inbox.iterdir()) == []


@pytest.mark.parametrize("store", ["s3", "web"])
def test_one_silent_answer_is_not_waited_for_longer_than_a_read_may_take(
    store: str, request: pytest.FixtureRequest, make_bundle: Make, inbox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "READ_TIMEOUT_SECONDS", 0.5)
    file = make_bundle()
    proxy = request.getfixturevalue(store) if store == "s3" else request.getfixturevalue(store)[0]
    url = push(file, "s3://bucket/deep", PLAN).url if store == "s3" else put_on(request.getfixturevalue(store), file)
    proxy.fail(Stall(), times=1, method="GET")
    start = time.monotonic()
    assert pull(url, inbox / "got.tcb").read_bytes() == file.read_bytes()
    assert time.monotonic() - start < 15, "the proxy is silent for 20 s"


# HTTP: what somebody put on a web server can be pulled


@pytest.mark.parametrize("fault", [FakeResponse(500), FakeResponse(429), Cut(100_000), Cut(0)], ids=str)
def test_a_web_server_in_trouble_is_asked_again_but_not_for_ever(
    web: tuple[Proxy, Path], make_bundle: Make, inbox: Path, fault: Any
) -> None:
    file = make_bundle()
    url = put_on(web, file)
    web[0].fail(fault, times=1)
    assert pull(url, inbox / "got.tcb").read_bytes() == file.read_bytes()
    assert web[0].count("GET") == 2
    web[0].fail(fault)
    (inbox / "got.tcb").unlink()
    with pytest.raises(NetworkError, match="tried 4 times"):
        pull(url, inbox / "got.tcb")
    assert web[0].count("GET") == retry.MAX_ATTEMPTS
    assert list(inbox.iterdir()) == []


@pytest.mark.parametrize(("status", "words"), [(401, "lets nobody in"), (403, "lets nobody in"), (404, "nothing is")])
def test_a_web_server_that_says_no_is_asked_once(
    web: tuple[Proxy, Path], make_bundle: Make, inbox: Path, status: int, words: str
) -> None:
    url = put_on(web, make_bundle())
    web[0].fail(FakeResponse(status))
    with pytest.raises(NetworkError, match=words):
        pull(url, inbox / "got.tcb")
    assert len(web[0].requests) == 1


@pytest.mark.parametrize("fault", [Stall(), Drip(0.05)], ids=["silent", "a byte at a time"])
def test_a_slow_web_server_is_given_up_on(
    web: tuple[Proxy, Path], make_bundle: Make, inbox: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    url = put_on(web, make_bundle(5000))
    monkeypatch.setattr(retry, "READ_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(retry, "TOTAL_TIMEOUT_SECONDS", 1.5)
    web[0].fail(fault)
    start = time.monotonic()
    with pytest.raises(NetworkError, match="did not answer as it should"):
        pull(url, inbox / "got.tcb")
    assert time.monotonic() - start < 10
    assert list(inbox.iterdir()) == []


def test_nobody_listening_is_told_within_the_bound(inbox: Path) -> None:
    with pytest.raises(NetworkError, match="tried 4 times") as caught:
        pull(f"http://127.0.0.1:1/{PLAN}-{'0' * 64}.tcb", inbox / "got.tcb")
    assert "127.0.0.1:1" in caught.value.message
    assert list(inbox.iterdir()) == []


def test_a_body_that_unpacks_beyond_what_was_announced_is_cut_off(
    web: tuple[Proxy, Path], make_bundle: Make, inbox: Path
) -> None:
    url = put_on(web, make_bundle())
    bomb = gzip.compress(b"\0" * 50_000_000)
    web[0].fail(FakeResponse(200, bomb, (("Content-Encoding", "gzip"),)))
    with pytest.raises(IntegrityError, match=f"it goes on after the {len(bomb)} bytes"):
        pull(url, inbox / "got.tcb")
    assert list(inbox.iterdir()) == []


def test_a_body_beyond_the_most_is_cut_off_announced_or_not(
    web: tuple[Proxy, Path], make_bundle: Make, inbox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = put_on(web, make_bundle())
    monkeypatch.setattr(transfer, "MAX_BUNDLE_BYTES", 200_000)
    with pytest.raises(IntegrityError, match="it has 300000 bytes, and a bundle has 200000 at most"):
        pull(url, inbox / "got.tcb")
    web[0].fail(NoContentLength())
    with pytest.raises(IntegrityError, match="it goes on after the 200000 bytes"):
        pull(url, inbox / "got.tcb")
    assert list(inbox.iterdir()) == []


def test_a_bundle_without_a_length_is_checked_by_its_digest(
    web: tuple[Proxy, Path], make_bundle: Make, inbox: Path
) -> None:
    file = make_bundle()
    url = put_on(web, file)
    web[0].fail(NoContentLength())
    assert pull(url, inbox / "got.tcb").read_bytes() == file.read_bytes()
    web[0].fail(NoContentLength(b"and more"))
    with pytest.raises(IntegrityError, match="its sha256 is"):
        pull(url, inbox / "more.tcb")
    assert [path.name for path in inbox.iterdir()] == ["got.tcb"]


def test_the_web_is_read_only_and_can_be_searched(web: tuple[Proxy, Path], make_bundle: Make) -> None:
    url = put_on(web, make_bundle())
    assert find(f"http://{web[0].host}", PLAN) == [url]
    with pytest.raises(UsageError, match="can only be read"):
        push(make_bundle(), f"http://{web[0].host}", PLAN)


# Secrets


def test_no_message_holds_a_secret(web: tuple[Proxy, Path], make_bundle: Make, inbox: Path) -> None:
    file = make_bundle()
    bare = put_on(web, file)
    url = bare.replace("http://", "http://some:hunter2@") + "?X-Amz-Signature=f00d"
    assert pull(url, inbox / "got.tcb").read_bytes() == file.read_bytes()
    assert any("f00d" in request.path for request in web[0].requests), "the store is given them"
    for fault in (FakeResponse(403), FakeResponse(500), Cut(5), FakeResponse(404)):
        web[0].fail(fault)
        with pytest.raises(NetworkError) as caught:
            pull(url, inbox / "got.tcb")
        told = caught.value.message + caught.value.hint
        assert bare in told and "hunter2" not in told and "f00d" not in told
    with pytest.raises(NetworkError) as caught:
        find("ftp://some:hunter2@127.0.0.1:1/deep", PLAN)
    assert "ftp://127.0.0.1:1/deep" in caught.value.message and "hunter2" not in caught.value.message
    assert redacted(url) == bare


def test_a_foreign_message_is_scrubbed_of_this_urls_secrets_and_any_others() -> None:
    address = Address.parse("sftp://some:hunter2@host/deep?key=f00d")
    foreign = (
        "login of some with hunter2 failed for key=f00d, see https://you:me@else/where?Signature=cafe or /v2/x?t=1"
    )
    assert address.scrub(foreign) == "login of *** with *** failed for ***, see https://else/where or /v2/x"


# What is wrong with the request itself


@pytest.mark.parametrize(
    ("url", "words", "hint"),
    [
        ("s4://bucket/deep", "speaks s4://", "did you mean s3://"),
        ("ocy://host/repository", "speaks ocy://", "did you mean oci://"),
        ("simplecache::s3://bucket", "speaks simplecache::s3://", ""),
        ("s3://", "names no place", "s3://bucket/folder"),
        ("", "names no place", ""),
    ],
)
def test_an_address_that_is_none_is_refused(url: str, words: str, hint: str, make_bundle: Make) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        push(make_bundle(), url, PLAN)
    assert hint in caught.value.hint and caught.value.exit_code == 2


def test_a_name_a_key_or_a_place_that_is_none_is_refused(make_bundle: Make, inbox: Path, tmp_path: Path) -> None:
    file = make_bundle()
    for url in ("s3://bucket/deep/bundle.tcb", f"{PLAN}-{'0' * 63}.tcb", f"s3://bucket/{PLAN}-{'0' * 64}.zip"):
        with pytest.raises(UsageError, match="is no bundle"):
            pull(url, inbox / "got.tcb")
    for key in ("", "0123456789ABCDEF", "../../../../etc/", f"{PLAN}0"):
        with pytest.raises(UsageError, match="is no plan key"):
            push(file, str(tmp_path / "stored"), key)
    with pytest.raises(UsageError, match="cannot be read"):
        push(tmp_path / "missing.tcb", str(tmp_path / "stored"), PLAN)
    url = push(file, str(tmp_path / "stored"), PLAN).url
    with pytest.raises(UsageError, match="its folder is missing"):
        pull(url, inbox / "deeper" / "got.tcb")
    with pytest.raises(UsageError, match="it is a folder"):
        pull(url, inbox)
    assert list(inbox.iterdir()) == []


def test_a_missing_library_is_named_with_its_extra() -> None:
    """In a process of its own, with the libraries hidden."""
    script = """
import sys
for name in ("s3fs", "gcsfs", "requests", "huggingface_hub"):
    sys.modules[name] = None
from tcdeploy.remote.transfer import find
from tcdeploy.errors import UsageError
for scheme in ("s3", "gs", "oci", "hf"):
    try:
        find(f"{scheme}://place/deep", "0123456789abcdef")
    except UsageError as error:
        print(scheme, error.hint)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    hints = [f"{scheme} pip install 'tcdeploy[{scheme}]'" for scheme in ("s3", "gs", "oci")]
    assert done.stdout.splitlines() == [*hints, "hf pip install 'tcdeploy'"], done.stderr


def test_importing_the_module_imports_no_storage_library() -> None:
    heavy = ("fsspec", "s3fs", "botocore", "aiohttp", "requests", "huggingface_hub", "asyncio", "torch")
    script = f"import sys, tcdeploy.remote.transfer; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_an_error_of_our_own_is_not_taken_for_the_network(
    tmp_path: Path, make_bundle: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", lambda source: None)  # takes one argument: calling it is a TypeError
    with pytest.raises(TypeError):
        push(make_bundle(), str(tmp_path / "stored"), PLAN)
    assert list((tmp_path / "stored").iterdir()) == []
