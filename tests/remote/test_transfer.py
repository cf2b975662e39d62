"""Push, pull and find on local folders, memory, S3 and HTTP, with healthy and failing stores."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.errors import IntegrityError, NetworkError, SpaceError, UsageError
from tcdeploy.planning.installation import install_command
from tcdeploy.remote import fsspec_folder, retry, transfer
from tcdeploy.remote.address import Address
from tcdeploy.remote.transfer import exists, find, pull, push
from tests.conftest import mounted_tmpfs
from tests.remote.conftest import OTHER_PLAN, PLAN, ConcurrentRun
from tests.remote.faulty import Cut, Drip, FakeResponse, NoContentLength, Proxy, Stall, Wait

Make = Callable[..., Path]
EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
SMALLEST_PART = 5 << 20  # that S3 accepts, except for the last
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


@pytest.fixture(params=["folder", "file", "memory", "s3"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a folder that does not exist yet, in each kind of store."""
    if request.param == "s3":
        request.getfixturevalue("s3")
    folder = tmp_path / "stored" / "deep"
    urls = {"folder": str(folder), "file": f"file://{folder}", "memory": f"memory://{tmp_path.name}/deep"}
    return urls.get(request.param, "s3://bucket/deep")


def put_on(web: tuple[Proxy, Path], file: Path) -> str:
    """Put a bundle on the web server; returns its URL."""
    proxy, folder = web
    return f"http://{proxy.host}/{Path(push(file, str(folder), PLAN).url).name}"


def name_for(file: Path, plan: str = PLAN) -> str:
    return f"{plan}-{hashlib.sha256(file.read_bytes()).hexdigest()}.tcb"


# Every kind of store


def test_a_pushed_bundle_can_be_pulled(store_url: str, make_bundle: Make, inbox: Path) -> None:
    file = make_bundle(3_000_000)
    pushed = push(file, store_url, PLAN)
    assert (pushed.url, pushed.bytes, pushed.already_present) == (f"{store_url}/{name_for(file)}", 3_000_000, False)
    reports = list[str]()
    assert pull(pushed.url, inbox / "got.tcb", report=reports.append) == inbox / "got.tcb"
    assert re.fullmatch(r"2\.9( of 2\.9)? MiB", reports[-1]), "some stores do not know the size"
    assert (inbox / "got.tcb").read_bytes() == file.read_bytes()
    assert [path.name for path in inbox.iterdir()] == ["got.tcb"]


def test_a_second_push_reports_that_the_bundle_is_present(store_url: str, make_bundle: Make) -> None:
    file = make_bundle()
    assert [push(file, f"{store_url}/", PLAN).already_present for _ in range(3)] == [False, True, True]
    assert push(file, store_url, OTHER_PLAN).already_present is False, (
        "bundles of different plans are separate, even with equal bytes"
    )


def test_concurrent_pushes_of_the_same_bytes_all_succeed(store_url: str, make_bundle: Make, inbox: Path) -> None:
    file = make_bundle()
    results = ConcurrentRun.run(lambda: push(file, store_url, PLAN), 6).results
    assert [result.url for result in results] == [f"{store_url}/{name_for(file)}"] * 6, results
    assert find(store_url, PLAN) == [results[0].url], "one bundle and no temporary file"
    assert pull(results[0].url, inbox / "got.tcb").read_bytes() == file.read_bytes()


def test_find_lists_the_bundles_of_a_plan(store_url: str, make_bundle: Make) -> None:
    assert find(store_url, PLAN) == [], "a folder that does not exist has no bundles"
    assert not exists(store_url)
    urls = {push(make_bundle(100), store_url, PLAN).url for _ in range(3)}
    push(make_bundle(100), store_url, OTHER_PLAN)
    assert set(find(store_url, PLAN)) == urls and len(find(store_url, PLAN)) == 3
    assert find(f"{store_url}/elsewhere", PLAN) == []
    assert exists(store_url)
    assert not exists(f"{store_url}/elsewhere")


def test_an_empty_bundle_can_be_pushed_and_pulled(store_url: str, make_bundle: Make, inbox: Path) -> None:
    url = push(make_bundle(0), store_url, PLAN).url
    assert pull(url, inbox / "got.tcb").read_bytes() == b""


def test_a_folder_below_a_file_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert find(str(tmp_path / "file/folder"), PLAN) == []
    assert not exists(str(tmp_path / "file/folder"))


def test_pulling_a_missing_bundle_is_a_network_error(store_url: str, make_bundle: Make, inbox: Path) -> None:
    push(make_bundle(), store_url, PLAN)
    with pytest.raises(NetworkError, match="does not exist") as caught:
        pull(f"{store_url}/{OTHER_PLAN}-{'0' * 64}.tcb", inbox / "got.tcb")
    assert f"{store_url}/{OTHER_PLAN}" in caught.value.message and caught.value.exit_code == 8
    assert list(inbox.iterdir()) == []


def overwrite(url: str, content: bytes) -> None:
    import fsspec

    with fsspec.open(url, "wb", skip_instance_cache=True) as file:
        file.write(content)


@pytest.mark.parametrize("damage", ["flipped", "shorter", "longer"])
def test_push_and_pull_detect_other_bytes_under_the_name(
    store_url: str, make_bundle: Make, inbox: Path, damage: str
) -> None:
    file = make_bundle()
    url, original = push(file, store_url, PLAN).url, file.read_bytes()
    damaged = {
        "flipped": original[:-1] + bytes([original[-1] ^ 1]),
        "shorter": original[:-1],
        "longer": original + b"x",
    }[damage]
    overwrite(url, damaged)
    with pytest.raises(IntegrityError, match="holds other bytes than") as caught:
        push(file, store_url, PLAN)
    assert url in caught.value.message and caught.value.exit_code == 5
    (inbox / "got.tcb").write_text("previous content")
    with pytest.raises(IntegrityError, match="does not match its name"):
        pull(url, inbox / "got.tcb")
    assert [path.read_text() for path in inbox.iterdir()] == ["previous content"]


# A folder


def test_the_newest_bundle_comes_first(tmp_path: Path, make_bundle: Make) -> None:
    urls = [push(make_bundle(100), str(tmp_path / "stored"), PLAN).url for _ in range(4)]
    order = [urls[2], urls[0], urls[3], urls[1]]
    for age, url in enumerate(order):
        os.utime(url, (1e9 - age, 1e9 - age))
    assert find(str(tmp_path / "stored"), PLAN) == order


def test_exactly_one_of_many_concurrent_jobs_writes(tmp_path: Path, make_bundle: Make) -> None:
    file = make_bundle()
    results = ConcurrentRun.run(lambda: push(file, str(tmp_path / "stored"), PLAN), 12).results
    assert sorted(result.already_present for result in results) == [False] + [True] * 11
    assert len(list((tmp_path / "stored").iterdir())) == 1


def test_a_file_system_without_hard_links_works(
    tmp_path: Path, make_bundle: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    file = make_bundle()
    assert [push(file, str(tmp_path / "stored"), PLAN).already_present for _ in range(2)] == [False, True]
    assert [path.name for path in (tmp_path / "stored").iterdir()] == [name_for(file)]


def test_a_full_destination_disk_is_a_space_error_without_leftovers(tmp_path: Path, make_bundle: Make) -> None:
    file = make_bundle(2_000_000)
    with mounted_tmpfs(tmp_path / "small", "-o", "size=1m") as folder:
        with pytest.raises(SpaceError, match="no space left at") as caught:
            push(file, str(folder / "stored"), PLAN)
        assert list((folder / "stored").iterdir()) == []
    assert caught.value.exit_code == 7


def test_without_free_space_a_pull_fails_before_the_download(
    tmp_path: Path, make_bundle: Make, web: tuple[Proxy, Path]
) -> None:
    url = put_on(web, make_bundle(2_000_000))
    with mounted_tmpfs(tmp_path / "small", "-o", "size=1m") as folder:
        with pytest.raises(SpaceError, match=r"needs 2000000 bytes \(1.9 MiB\)"):
            pull(url, folder / "got.tcb")
        assert list(folder.iterdir()) == []


@pytest.mark.parametrize("size", [2_000_000, (1 << 20) + 10], ids=["early", "in the last write"])
def test_a_disk_that_fills_up_during_a_pull_has_no_leftovers(
    tmp_path: Path, make_bundle: Make, web: tuple[Proxy, Path], size: int
) -> None:
    """The server sends no Content-Length, so the check before the download passes."""
    url = put_on(web, make_bundle(size))
    web[0].fail(NoContentLength())
    with mounted_tmpfs(tmp_path / "small", "-o", "size=1m") as folder:
        with pytest.raises(SpaceError, match=f"the disk of {folder} is full"):
            pull(url, folder / "got.tcb")
        assert list(folder.iterdir()) == []
    assert web[0].count("GET") == 1, "a full disk is not retried"


def test_a_failed_move_leaves_no_temporary_file(
    tmp_path: Path, make_bundle: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    def refuse(*arguments: Any) -> None:
        raise ConnectionResetError("gone")

    monkeypatch.setattr(MemoryFileSystem, "mv", refuse)
    with pytest.raises(NetworkError, match="failed after 4 attempts"):
        push(make_bundle(), f"memory://{tmp_path.name}/moved", PLAN)
    assert MemoryFileSystem().ls(f"/{tmp_path.name}/moved") == []


# S3


def test_a_push_of_stored_bytes_uploads_nothing(s3: Proxy, make_bundle: Make) -> None:
    file = make_bundle()
    push(file, "s3://bucket/deep", PLAN)
    assert s3.count("PUT") == 1
    s3.requests.clear()
    assert push(file, "s3://bucket/deep", PLAN).already_present
    assert {request.method for request in s3.requests} == {"HEAD", "GET"}
    assert sum(request.body_bytes for request in s3.requests) == 0


@pytest.mark.parametrize("size", [300_000, 12_000_000], ids=["in one put", "in parts"])
def test_s3_keeps_the_first_of_two_writers_that_both_find_the_name_free(
    s3: Proxy, make_bundle: Make, inbox: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Both writes are held until both have arrived, so that the store's If-None-Match decides."""
    monkeypatch.setattr(fsspec_folder, "PART_BYTES", SMALLEST_PART)
    file = make_bundle(size)
    method = "PUT" if size < 1_000_000 else "POST"
    path = ".tcb" if method == "PUT" else "uploadId="
    barrier = threading.Barrier(2)
    s3.choose = lambda request: Wait(barrier) if request.method == method and path in request.path else None
    results = ConcurrentRun.run(lambda: push(file, "s3://bucket/deep", PLAN), 2).results
    assert sorted(result.already_present for result in results) == [False, True], results
    s3.choose = lambda request: None
    assert pull(results[0].url, inbox / "got.tcb").read_bytes() == file.read_bytes()


def test_a_late_writer_does_not_overwrite(s3: Proxy, s3_client: Any, make_bundle: Make) -> None:
    """Other bytes are stored under the name between the check and the write."""
    file = make_bundle()
    key = f"deep/{name_for(file)}"

    def choose(request: Any) -> None:
        if request.method == "PUT":
            s3_client.put_object(Bucket="bucket", Key=key, Body=b"other")

    s3.choose = choose
    with pytest.raises(IntegrityError, match="holds other bytes than"):
        push(file, "s3://bucket/deep", PLAN)
    assert s3_client.get_object(Bucket="bucket", Key=key)["Body"].read() == b"other"


def test_a_failed_multipart_upload_leaves_no_parts(
    s3: Proxy, s3_client: Any, make_bundle: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec_folder, "PART_BYTES", SMALLEST_PART)
    s3.fail(FakeResponse(500), method="PUT", path="partNumber=3")
    with pytest.raises(NetworkError, match="failed after 4 attempts: HTTP 500"):
        push(make_bundle(12_000_000), "s3://bucket/deep", PLAN)
    assert "Uploads" not in s3_client.list_multipart_uploads(Bucket="bucket")
    assert "Contents" not in s3_client.list_objects_v2(Bucket="bucket")


@pytest.mark.parametrize("fault", [FakeResponse(500), FakeResponse(503, SLOW_DOWN), Cut(1000)], ids=str)
def test_a_failing_s3_is_retried_a_bounded_number_of_times(
    s3: Proxy, make_bundle: Make, inbox: Path, fault: Any
) -> None:
    file = make_bundle()
    url = push(file, "s3://bucket/deep", PLAN).url
    s3.fail(fault, times=3, method="GET")
    assert pull(url, inbox / "got.tcb").read_bytes() == file.read_bytes()
    s3.fail(fault, method="GET")
    (inbox / "got.tcb").unlink()
    with pytest.raises(NetworkError, match="failed after 4 attempts") as caught:
        pull(url, inbox / "got.tcb")
    assert caught.value.exit_code == 8 and url in caught.value.message and caught.value.hint
    assert s3.count("GET") == retry.MAX_ATTEMPTS, "the library does not retry on its own"
    assert list(inbox.iterdir()) == []


def test_a_push_succeeds_after_transient_errors(s3: Proxy, make_bundle: Make, inbox: Path) -> None:
    file = make_bundle()
    s3.fail(FakeResponse(500), times=2, method="PUT")
    pushed = push(file, "s3://bucket/deep", PLAN)
    assert pushed.already_present is False and s3.count("PUT") == 3
    assert pull(pushed.url, inbox / "got.tcb").read_bytes() == file.read_bytes()


def test_a_push_whose_response_was_lost_succeeds(s3: Proxy, make_bundle: Make) -> None:
    """The bytes are stored but the connection is cut; the next attempt finds them."""
    s3.choose = lambda request: Cut(0) if request.method == "PUT" and s3.count("PUT") == 1 else None
    assert find("s3://bucket/deep", PLAN) == []
    url = push(make_bundle(), "s3://bucket/deep", PLAN).url
    assert find("s3://bucket/deep", PLAN) == [url]


@pytest.mark.parametrize(
    ("status", "body"), [(400, EXPIRED), (403, EXPIRED.replace(b"ExpiredToken", b"InvalidAccessKeyId")), (401, b"")]
)
def test_an_expired_login_fails_without_retries(
    s3: Proxy, make_bundle: Make, inbox: Path, status: int, body: bytes
) -> None:
    """S3's response to HEAD has no body, only status 400, and s3fs also sends a list request: at most two requests."""
    file = make_bundle()
    url = push(file, "s3://bucket/deep", PLAN).url
    s3.fail(FakeResponse(status, body))
    for operation in (
        lambda: push(file, "s3://bucket/deep", PLAN),
        lambda: pull(url, inbox / "got.tcb"),
        lambda: find("s3://bucket/deep", PLAN),
    ):
        s3.requests.clear()
        with pytest.raises(NetworkError, match="was denied .wrong or expired login") as caught:
            operation()
        assert caught.value.exit_code == 8 and "aws sso login" in caught.value.hint
        requests = [(request.method, request.path) for request in s3.requests]
        assert len(requests) == len(set(requests)) <= 2, "no request is repeated"
    assert list(inbox.iterdir()) == []


def test_a_missing_login_is_reported_like_an_expired_one(
    s3: Proxy, monkeypatch: pytest.MonkeyPatch, inbox: Path
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(NetworkError, match="was denied .wrong or expired login") as caught:
        pull(f"s3://bucket/deep/{PLAN}-{'0' * 64}.tcb", inbox / "got.tcb")
    assert "aws sso login" in caught.value.hint and s3.requests == []


def test_a_missing_bucket_is_not_an_empty_folder(s3: Proxy, make_bundle: Make) -> None:
    with pytest.raises(NetworkError, match=r"s3://no-such-bucket\S* does not exist"):
        find("s3://no-such-bucket/deep", PLAN)
    with pytest.raises(NetworkError, match=r"s3://no-such-bucket\S* does not exist"):
        push(make_bundle(), "s3://no-such-bucket/deep", PLAN)


@pytest.mark.parametrize("fault", [Stall(), Drip(0.05)], ids=["silent", "a byte at a time"])
def test_a_slow_s3_times_out(
    s3: Proxy, make_bundle: Make, inbox: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    url = push(make_bundle(5000), "s3://bucket/deep", PLAN).url
    monkeypatch.setattr(retry, "READ_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(retry, "TOTAL_TIMEOUT_SECONDS", 0.8)
    s3.fail(fault, method="GET")
    start = time.monotonic()
    with pytest.raises(NetworkError, match="failed after [1-4] attempt"):
        pull(url, inbox / "got.tcb")
    assert time.monotonic() - start < 10, "the complete body would take 250 s"
    assert list(inbox.iterdir()) == []


@pytest.mark.parametrize("store", ["s3", "web"])
def test_a_stalled_response_is_retried_after_the_read_timeout(
    store: str, request: pytest.FixtureRequest, make_bundle: Make, inbox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_bundle()
    proxy = request.getfixturevalue(store) if store == "s3" else request.getfixturevalue(store)[0]
    url = push(file, "s3://bucket/deep", PLAN).url if store == "s3" else put_on(request.getfixturevalue(store), file)
    monkeypatch.setattr(retry, "READ_TIMEOUT_SECONDS", 0.3)
    proxy.fail(Stall(), times=1, method="GET")
    start = time.monotonic()
    assert pull(url, inbox / "got.tcb").read_bytes() == file.read_bytes()
    assert time.monotonic() - start < 15, "the proxy is silent for 20 s"


# HTTP: bundles on a plain web server


@pytest.mark.parametrize("fault", [FakeResponse(500), FakeResponse(429), Cut(100_000), Cut(0)], ids=str)
def test_a_failing_web_server_is_retried_a_bounded_number_of_times(
    web: tuple[Proxy, Path], make_bundle: Make, inbox: Path, fault: Any
) -> None:
    file = make_bundle()
    url = put_on(web, file)
    web[0].fail(fault, times=1)
    assert pull(url, inbox / "got.tcb").read_bytes() == file.read_bytes()
    assert web[0].count("GET") == 2
    web[0].fail(fault)
    (inbox / "got.tcb").unlink()
    with pytest.raises(NetworkError, match="failed after 4 attempts"):
        pull(url, inbox / "got.tcb")
    assert web[0].count("GET") == retry.MAX_ATTEMPTS
    assert list(inbox.iterdir()) == []


@pytest.mark.parametrize(("status", "message"), [(401, "was denied"), (403, "was denied"), (404, "does not exist")])
def test_a_final_http_error_is_not_retried(
    web: tuple[Proxy, Path], make_bundle: Make, inbox: Path, status: int, message: str
) -> None:
    url = put_on(web, make_bundle())
    web[0].fail(FakeResponse(status))
    with pytest.raises(NetworkError, match=message):
        pull(url, inbox / "got.tcb")
    assert len(web[0].requests) == 1


@pytest.mark.parametrize("fault", [Stall(), Drip(0.05)], ids=["silent", "a byte at a time"])
def test_a_slow_web_server_times_out(
    web: tuple[Proxy, Path], make_bundle: Make, inbox: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    url = put_on(web, make_bundle(5000))
    monkeypatch.setattr(retry, "READ_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(retry, "TOTAL_TIMEOUT_SECONDS", 0.8)
    web[0].fail(fault)
    start = time.monotonic()
    with pytest.raises(NetworkError, match="failed after [1-4] attempt"):
        pull(url, inbox / "got.tcb")
    assert time.monotonic() - start < 10
    assert list(inbox.iterdir()) == []


def test_a_refused_connection_is_reported_after_the_last_attempt(inbox: Path) -> None:
    with pytest.raises(NetworkError, match="failed after 4 attempts") as caught:
        pull(f"http://127.0.0.1:1/{PLAN}-{'0' * 64}.tcb", inbox / "got.tcb")
    assert "127.0.0.1:1" in caught.value.message
    assert list(inbox.iterdir()) == []


def test_a_compressed_body_longer_than_its_content_length_is_refused(
    web: tuple[Proxy, Path], make_bundle: Make, inbox: Path
) -> None:
    url = put_on(web, make_bundle())
    bomb = gzip.compress(b"\0" * 50_000_000)
    web[0].fail(FakeResponse(200, bomb, (("Content-Encoding", "gzip"),)))
    with pytest.raises(IntegrityError, match=f"it is longer than {len(bomb)} bytes"):
        pull(url, inbox / "got.tcb")
    assert list(inbox.iterdir()) == []


def test_a_body_above_the_size_limit_is_refused_with_and_without_content_length(
    web: tuple[Proxy, Path], make_bundle: Make, inbox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = put_on(web, make_bundle())
    monkeypatch.setattr(transfer, "MAX_BUNDLE_BYTES", 200_000)
    with pytest.raises(IntegrityError, match="it has 300000 bytes; the limit is 200000"):
        pull(url, inbox / "got.tcb")
    web[0].fail(NoContentLength())
    with pytest.raises(IntegrityError, match="it is longer than 200000 bytes"):
        pull(url, inbox / "got.tcb")
    assert list(inbox.iterdir()) == []


def test_a_bundle_without_content_length_is_verified_by_its_digest(
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


def test_a_web_server_is_read_only_and_can_be_listed(web: tuple[Proxy, Path], make_bundle: Make) -> None:
    url = put_on(web, make_bundle())
    assert find(f"http://{web[0].host}", PLAN) == [url]
    with pytest.raises(UsageError, match="is read-only"):
        push(make_bundle(), f"http://{web[0].host}", PLAN)


# Secrets


def test_no_message_contains_a_secret(web: tuple[Proxy, Path], make_bundle: Make, inbox: Path) -> None:
    file = make_bundle()
    redacted_url = put_on(web, file)
    url = redacted_url.replace("http://", "http://some:hunter2@") + "?X-Amz-Signature=s3cr3t"
    assert pull(url, inbox / "got.tcb").read_bytes() == file.read_bytes()
    assert any("s3cr3t" in request.path for request in web[0].requests), "requests to the store contain the secrets"
    for fault in (FakeResponse(403), FakeResponse(500), Cut(5), FakeResponse(404)):
        web[0].fail(fault)
        with pytest.raises(NetworkError) as caught:
            pull(url, inbox / "got.tcb")
        text = caught.value.message + caught.value.hint
        assert redacted_url in text and "hunter2" not in text and "s3cr3t" not in text
    with pytest.raises(NetworkError) as caught:
        find("ftp://some:hunter2@127.0.0.1:1/deep", PLAN)
    assert "ftp://127.0.0.1:1/deep" in caught.value.message and "hunter2" not in caught.value.message
    assert Address.parse(url).redacted == redacted_url


def test_secrets_are_removed_from_library_messages() -> None:
    address = Address.parse("sftp://some:hunter2@host/deep?key=f00d")
    message = (
        "login of some with hunter2 failed for key=f00d, see https://you:me@else/where?Signature=cafe or /v2/x?t=1"
    )
    assert address.scrub(message) == "login of *** with *** failed for ***, see https://else/where or /v2/x"


# Invalid requests


@pytest.mark.parametrize(
    ("url", "message", "hint"),
    [
        ("s4://bucket/deep", "URL scheme s4:// is not supported", "did you mean s3://"),
        ("ocy://host/repository", "URL scheme ocy:// is not supported", "did you mean oci://"),
        ("simplecache::s3://bucket", "URL scheme simplecache::s3:// is not supported", ""),
        ("s3://", "has no host or folder", "s3://bucket/folder"),
        ("", "has no host or folder", ""),
    ],
)
def test_an_invalid_url_is_refused(url: str, message: str, hint: str, make_bundle: Make) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        push(make_bundle(), url, PLAN)
    assert hint in caught.value.hint and caught.value.exit_code == 2


def test_invalid_bundle_names_plan_keys_and_paths_are_refused(make_bundle: Make, inbox: Path, tmp_path: Path) -> None:
    file = make_bundle()
    for url in ("s3://bucket/deep/bundle.tcb", f"{PLAN}-{'0' * 63}.tcb", f"s3://bucket/{PLAN}-{'0' * 64}.zip"):
        with pytest.raises(UsageError, match="is not a bundle URL"):
            pull(url, inbox / "got.tcb")
    for key in ("", "0123456789ABCDEF", "../../../../etc/", f"{PLAN}0"):
        with pytest.raises(UsageError, match="is not a plan key"):
            push(file, str(tmp_path / "stored"), key)
    with pytest.raises(UsageError, match="cannot be read"):
        push(tmp_path / "missing.tcb", str(tmp_path / "stored"), PLAN)
    url = push(file, str(tmp_path / "stored"), PLAN).url
    with pytest.raises(UsageError, match="its folder is missing"):
        pull(url, inbox / "deeper" / "got.tcb")
    with pytest.raises(UsageError, match="it is a folder"):
        pull(url, inbox)
    assert list(inbox.iterdir()) == []


def test_a_missing_library_is_reported_with_its_pip_extra() -> None:
    """In a subprocess in which the libraries cannot be imported."""
    script = """
import sys
for name in ("s3fs", "gcsfs", "requests", "huggingface_hub"):
    sys.modules[name] = None
from tcdeploy.remote.transfer import find
from tcdeploy.errors import UsageError
for scheme in ("s3", "gs", "oci", "hf"):
    try:
        find(f"{scheme}://host/deep", "0123456789abcdef")
    except UsageError as error:
        print(scheme, error.hint)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    extras = {"s3": "s3", "gs": "gs", "oci": "oci", "hf": "compile"}
    expected = [f"{scheme} {install_command(extra)}" for scheme, extra in extras.items()]
    assert done.stdout.splitlines() == expected, done.stderr


def test_importing_the_module_imports_no_storage_library() -> None:
    heavy = ("fsspec", "s3fs", "botocore", "aiohttp", "requests", "huggingface_hub", "asyncio", "torch")
    script = f"import sys, tcdeploy.remote.transfer; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_a_programming_error_is_not_reported_as_a_network_error(
    tmp_path: Path, make_bundle: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", lambda source: None)  # takes one argument: calling it is a TypeError
    with pytest.raises(TypeError):
        push(make_bundle(), str(tmp_path / "stored"), PLAN)
    assert list((tmp_path / "stored").iterdir()) == []
