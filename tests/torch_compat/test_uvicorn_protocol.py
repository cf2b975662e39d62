"""The HTTP limits are off if uvicorn's class has changed; tests/server/test_abuse.py tests the limits themselves."""

from __future__ import annotations

import json

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tcdeploy.server.http.listener import http_protocol
from tcdeploy.torch_compat.uvicorn import protocol as uvicorn_protocol
from tcdeploy.torch_compat.uvicorn.protocol import abort, is_body_received, is_write_paused
from tests.server.test_http import Unobserved


async def app(scope: object, receive: object, send: object) -> None:
    raise NotImplementedError


def test_uvicorn_takes_the_bounded_protocol() -> None:
    protocol = http_protocol(30.0, Unobserved())
    assert issubclass(protocol, HttpToolsProtocol)
    assert json.loads(protocol.error_body(408, "late"))["error"]["message"] == "late"
    config = uvicorn.Config(app, http=protocol)
    config.load()
    assert config.http_protocol_class is protocol


@pytest.mark.parametrize("name", uvicorn_protocol.METHODS)
def test_without_a_method_of_uvicorn_s_class_its_own_protocol_serves(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HttpToolsProtocol, name, None)
    assert not uvicorn_protocol.supported()
    config = uvicorn.Config(app, http=http_protocol(30.0, Unobserved()))
    config.load()
    assert config.http_protocol_class is HttpToolsProtocol


def test_a_connection_without_the_extensions_may_wait() -> None:
    scope: dict[str, object] = {"type": "http"}
    abort(scope)
    assert is_write_paused(scope) and not is_body_received(scope)
