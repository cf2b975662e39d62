"""Reads the body of a request, within limits of bytes and time."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from tcdeploy.server.apis.openai.protocol import ApiError
from tcdeploy.server.generate.admission import BodyReservation
from tcdeploy.server.http.connection import is_body_received

BODY_TIMEOUT_S = 60.0


async def read_body(request: Request, max_bytes: int, reservation: BodyReservation) -> bytearray:
    """The request's body, with its content encodings.

    Raises ApiError 413 above `max_bytes`, 503 if too many bytes wait and 408 after BODY_TIMEOUT_S; ClientDisconnect if
    the client disconnects.
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
