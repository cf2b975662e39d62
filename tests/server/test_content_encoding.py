"""Compressed bodies: the routes get their content, within the limit of the body, and errors are 400, 413 or 415."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import zstandard

from tcdeploy.server.api import make_app
from tcdeploy.server.apis.openai.protocol import ApiError
from tcdeploy.server.http import request_body
from tcdeploy.server.http.request_body import INPUT_BYTES, MAX_PARTS, decompress
from tests.server.test_api import loading_state

BODY = json.dumps({"prompt": "a list", "max_tokens": 1, "unknown": "x" * 3000}).encode()


def raw_deflate(body: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(body) + compressor.flush()


def zstd_without_size(body: bytes) -> bytes:
    compressor = zstandard.ZstdCompressor(write_content_size=False, write_checksum=True).compressobj()
    return compressor.compress(body) + compressor.flush()


def zstd(body: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(body)


ENCODERS: dict[str, list[Callable[[bytes], bytes]]] = {
    "gzip": [gzip.compress, lambda body: gzip.compress(body[:9]) + gzip.compress(body[9:])],
    "deflate": [zlib.compress, raw_deflate],
    "zstd": [zstd, zstd_without_size, lambda body: zstd(body[:9]) + zstd(body[9:])],
}
CASES = [(coding, encode) for coding, encoders in ENCODERS.items() for encode in encoders]


def post(body: bytes, encoding: str | list[str] | None, path: str = "/v1/completions") -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(loading_state()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            values = [encoding] if isinstance(encoding, str) else encoding or []
            headers = [("content-type", "application/json"), *(("content-encoding", value) for value in values)]
            return await client.post(path, content=body, headers=headers)

    return asyncio.run(send())


def is_valid(response: httpx.Response) -> bool:
    """A valid body gets the error of a loading model, which is checked after the body."""
    return response.status_code == 503 and response.json()["error"]["code"] == "loading"


@pytest.mark.parametrize(("coding", "encode"), CASES)
def test_a_compressed_body_is_decompressed(coding: str, encode: Callable[[bytes], bytes]) -> None:
    assert decompress(coding, encode(BODY), len(BODY)) == BODY
    assert is_valid(post(encode(BODY), coding))
    large = json.dumps({"prompt": [5] * 200_000}).encode()
    assert decompress(coding, encode(large), len(large)) == large
    wrong = post(encode(b'{"prompt": "a", "n": "x"}'), coding).json()["error"]
    assert wrong["param"] == "n", "the content is validated"


@pytest.mark.parametrize("name", ["GZIP", "x-gzip", " gzip ", "identity, gzip", "gzip,", ["identity", "gzip"]])
def test_names_of_encodings_are_read_as_http_defines_them(name: str | list[str]) -> None:
    assert is_valid(post(gzip.compress(BODY), name))


@pytest.mark.parametrize("name", [None, "", "identity", ","])
def test_a_body_without_an_encoding_stays_as_it_is(name: str | None) -> None:
    assert is_valid(post(BODY, name))


def test_several_encodings_are_removed_in_the_reverse_order() -> None:
    body = gzip.compress(zstd(BODY))
    assert is_valid(post(body, "zstd, gzip")) and is_valid(post(body, ["zstd", "gzip"]))
    assert post(body, "gzip, zstd").status_code == 400


@pytest.mark.parametrize("name", ["br", "compress", "gzip, br", "dcz", "gzip;q=1", "gzip, gzip, gzip, gzip"])
def test_another_encoding_is_415_and_names_those_that_work(name: str) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        response = post(BODY, name, path)
        assert response.status_code == 415 and response.headers["accept-encoding"] == "gzip, deflate, zstd"
    if name == "br":
        assert "'br' is not supported; send gzip, deflate, zstd, or none" in post(BODY, name).json()["error"]["message"]


@pytest.mark.parametrize(("coding", "encode"), CASES)
def test_invalid_and_truncated_data_is_400(coding: str, encode: Callable[[bytes], bytes]) -> None:
    valid = encode(BODY)
    for broken in (b"", b"\x00" * 50, BODY, valid[:-1], valid[: len(valid) // 2], valid + b"garbage", valid[3:]):
        response = post(broken, coding)
        assert response.status_code == 400, (broken[:20], response.text)
        assert response.json()["error"]["code"] == "invalid_encoding", response.text
        assert f"not valid {coding}" in response.json()["error"]["message"]


def bomb(coding: str) -> bytes:
    """Zeros: a gigabyte with zstd, and 64 MiB with zlib, which compresses more slowly."""
    compressor: Any = {
        "gzip": lambda: zlib.compressobj(9, wbits=31), "deflate": lambda: zlib.compressobj(9),
        "zstd": lambda: zstandard.ZstdCompressor().compressobj(),
    }[coding]()  # fmt: skip
    block = bytes(16 << 20)
    return b"".join(compressor.compress(block) for _ in range(64 if coding == "zstd" else 4)) + bytes(
        compressor.flush()
    )


@pytest.mark.parametrize("coding", ENCODERS)
def test_a_body_that_expands_beyond_the_limit_is_413_before_it_is_expanded(coding: str) -> None:
    """Memory: the limit, the output of one call of zstd's decoder, and the growth of a bytearray."""
    body, limit = bomb(coding), 8 << 20
    assert len(body) < limit
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(ApiError) as error:
        decompress(coding, body, limit)
    seconds, peak = time.process_time() - start, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert error.value.status == 413 and "decompressed body is larger than 8388608 bytes" in str(error.value.body)
    assert peak < 4 * limit and seconds < 5, (peak >> 20, seconds)
    assert post(body, coding).status_code == 413
    assert post(gzip.compress(body), f"{coding}, gzip").status_code == 413


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_the_number_of_parts_is_limited(coding: str) -> None:
    """A part takes a new decoder, and an empty one no more than 20 bytes."""
    encode = ENCODERS[coding][0]
    assert decompress(coding, encode(b"") * (MAX_PARTS - 1) + encode(b"a"), 9) == b"a"
    with pytest.raises(ApiError, match="more than 256 parts"):
        decompress(coding, encode(b"") * 400_000, 9)


def test_a_zstd_window_above_that_of_http_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    response = post(compressor.compress(BODY) + compressor.flush(), "zstd")
    assert response.status_code == 400 and "too much memory" in response.json()["error"]["message"]


def test_one_call_of_the_zstd_decoder_has_little_output() -> None:
    """4 bytes may become 128 KiB."""
    body, decoder = bomb("zstd"), zstandard.ZstdDecompressor().decompressobj()
    size = INPUT_BYTES["zstd"]
    assert max(len(decoder.decompress(body[at : at + size])) for at in range(0, 10 * size, size)) <= 4 << 20


def test_decompression_runs_in_another_thread_than_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 MiB take up to 0.3 s. tests/hostile/bodies.py measures the delays of the event loop."""
    threads = []

    def recorded(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return decompress(*arguments)

    monkeypatch.setattr(request_body, "decompress", recorded)
    assert is_valid(post(gzip.compress(BODY), "gzip"))
    assert len(threads) == 1 and threads[0] is not threading.main_thread()
