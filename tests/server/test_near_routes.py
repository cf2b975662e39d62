"""The route that a client probably meant."""

from __future__ import annotations

from typing import Any

import pytest

from tcdeploy.server.http.middleware import find_near_path
from tests.server.test_api import loading_state, send_request

PATHS = ["/", "/health", "/v1/models", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/chat/completions", "/v1/chat/completions"), ("/completions", "/v1/completions"), ("/models", "/v1/models"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"), ("/api/v1/models/", "/v1/models"),
        ("/v1/chat/completion", "/v1/chat/completions"), ("/V1/Chat/Completions", "/v1/chat/completions"),
        ("/v1/tokenize", "/tokenize"), ("/healthz", "/health"), ("/v1/embeddings", None), ("/v1/messages", None),
        ("/generate", None), ("//", None), ("/v1", None), ("/" + "a" * 60_000, None),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_the_near_path_is_found_without_wild_guesses(path: str, near: str | None) -> None:
    assert find_near_path(PATHS, path) == near


@pytest.mark.parametrize(
    ("method", "path", "status", "message", "allow"),
    [
        ("POST", "/completions", 404, "unknown route POST /completions; did you mean POST /v1/completions?", None),
        ("POST", "/models", 404, "unknown route POST /models; did you mean GET /v1/models?", None),
        ("POST", "/v1/embeddings", 404, "unknown route POST /v1/embeddings; GET /openapi.json lists the routes", None),
        ("GET", "/v1/chat/completions", 405, "GET is not allowed for /v1/chat/completions; use POST", "POST"),
        ("DELETE", "/v1/models/x", 405, "DELETE is not allowed for /v1/models/x; use GET", "GET, HEAD"),
    ],
)  # fmt: skip
def test_an_unknown_route_is_404_and_a_wrong_method_405_with_a_hint(
    method: str, path: str, status: int, message: str, allow: str | None
) -> None:
    body: Any = {"input": "a"} if method == "POST" else None
    response = send_request(loading_state(), method, path, body)
    error = response.json()["error"]
    assert (response.status_code, error["message"], response.headers.get("allow")) == (status, message, allow)
    assert set(error) == {"message", "type", "param", "code"} and error["code"]
