"""Reads the body of a request, within limits of bytes and time, and decompresses it.

A body may have several content encodings (RFC 9110, section 8.4): gzip, deflate and zstd. The decompressed size has the
same limit as the body itself. The decoders release the GIL, and run in a thread, one body at a time, because 8 MiB take
up to 0.3 s. zstandard's decoder returns the whole output of a piece of input at once, and 4 bytes can become 128 KiB,
so it gets small pieces. Brotli is not supported: its decoder would be one more dependency, and no client of these APIs
sends it.
"""

from __future__ import annotations

import asyncio
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import zstandard
from starlette.requests import Request

from tcdeploy.server.apis.openai.protocol import ApiError, bad_request
from tcdeploy.server.generate.admission import BodyReservation
from tcdeploy.torch_compat.uvicorn.protocol import is_body_received

BODY_TIMEOUT_S = 60.0
SUPPORTED = ("gzip", "deflate", "zstd")
ALIASES = {"x-gzip": "gzip"}  # RFC 9110, section 8.4.1.3
MAX_CODINGS = 3  # of one body
MAX_PARTS = 256  # members of a gzip body and frames of a zstd body
MAX_WINDOW_BYTES = 8 << 20  # of zstd; RFC 9659 permits no more
INPUT_BYTES = {"gzip": 16 << 10, "deflate": 16 << 10, "zstd": 128}  # per call of the decoder
_executor = ThreadPoolExecutor(1, "decompress")


async def read_body(request: Request, max_bytes: int, reservation: BodyReservation) -> bytearray:
    """The request's body, with its content encodings. Raises ApiError 413 above `max_bytes`, 503 if too many bytes wait
    and 408 after BODY_TIMEOUT_S; ClientDisconnect if the client disconnects.
    """
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:  # refused before it arrives
        raise _too_large(max_bytes)
    body = bytearray()
    has_arrived = is_body_received(request.scope)  # in the packets of its headers, as most bodies
    try:
        async with asyncio.timeout(None if has_arrived else BODY_TIMEOUT_S):  # a timer costs 0.05 ms after idle time
            async for chunk in request.stream():
                size = len(body) + len(chunk)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                reservation.grow(size)
                body += chunk
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s") from None
    return body


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes")


async def read_decoded_body(request: Request, max_bytes: int, reservation: BodyReservation) -> bytes | bytearray:
    """The request's body without its content encodings. Raises ApiError like `read_body`, and 400 or 415."""
    values = [value for name, value in request.scope["headers"] if name == b"content-encoding"]
    codings = content_codings(b",".join(values).decode("latin-1")) if values else []
    body: bytes | bytearray = await read_body(request, max_bytes, reservation)
    for coding in reversed(codings):
        body = await asyncio.get_running_loop().run_in_executor(_executor, decompress, coding, body, max_bytes)
        reservation.grow(len(body))
    return body


def content_codings(header: str) -> list[str]:
    """The encodings of a body in the order in which they were applied. Raises ApiError 415."""
    names = [name.strip().lower() for name in header.split(",")]
    codings = [ALIASES.get(name, name) for name in names if name not in ("", "identity")]
    if unknown := [name for name in codings if name not in SUPPORTED]:
        raise _unsupported(f"the content encoding {unknown[0][:80]!r} is not supported")
    if len(codings) > MAX_CODINGS:
        raise _unsupported(f"the body has {len(codings)} content encodings; the limit is {MAX_CODINGS}")
    return codings


def _unsupported(message: str) -> ApiError:
    supported = ", ".join(SUPPORTED)
    headers = {"accept-encoding": supported}
    return ApiError(415, f"{message}; send {supported}, or none", code="unsupported_encoding", headers=headers)


def _new_decoder(coding: str, body: bytes | bytearray) -> Any:
    if coding == "zstd":
        return zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj()
    return zlib.decompressobj(31 if coding == "gzip" else 15 if _has_zlib_header(body) else -15)


def _has_zlib_header(body: bytes | bytearray) -> bool:
    """Whether a `deflate` body has the format of zlib, as it should. Some clients send raw deflate data."""
    return len(body) >= 2 and body[0] & 0x0F == 8 and int.from_bytes(body[:2]) % 31 == 0


def decompress(coding: str, body: bytes | bytearray, max_bytes: int) -> bytearray:
    """The content of a body with one encoding. Raises ApiError 413 above `max_bytes`, and 400 for invalid data."""
    content, view, position, num_parts = bytearray(), memoryview(body), 0, 1
    decoder = _new_decoder(coding, body)
    try:
        while position < len(body):
            piece = view[position : position + INPUT_BYTES[coding]]
            limit = () if coding == "zstd" else (max_bytes + 1 - len(content),)
            content += decoder.decompress(piece, *limit)
            position += len(piece)
            if len(content) > max_bytes:
                raise ApiError(413, f"the decompressed body is larger than {max_bytes} bytes")
            if decoder.eof:
                position -= len(decoder.unused_data)
                if position < len(body):
                    num_parts += 1
                    decoder = _new_decoder(coding, body)
            if num_parts > MAX_PARTS:
                raise _invalid(coding, f"it has more than {MAX_PARTS} parts")
    except (zlib.error, zstandard.ZstdError) as error:
        raise _invalid(coding, str(error)) from None
    if not decoder.eof:
        raise _invalid(coding, "it is truncated")
    return content


def _invalid(coding: str, reason: str) -> ApiError:
    return bad_request(f"the body is not valid {coding}: {reason[:200]}", None, "invalid_encoding")
