"""Checks of the network: the Hugging Face Hub, and the port of the server."""

from __future__ import annotations

import errno
import http.client
import os
import socket
import urllib.error
import urllib.request
from pathlib import Path

from tcdeploy.doctor.result import Request, Result, blocking, finding, ok
from tcdeploy.planning.environment import user_cache_dir

HUB = "https://huggingface.co"
HUB_SECONDS = 5.0
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
LOOPBACK = "127.0.0.1"


def check_hub(request: Request) -> Result:
    """Whether the Hub answers. The token is not sent."""
    if request.is_offline:
        return ok("not checked: --offline")
    for name in OFFLINE_VARIABLES:
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return ok(f"offline, as {name}={os.environ[name]} requests: only models on this machine")
    endpoint = os.environ.get("HF_ENDPOINT", HUB)
    shown = "HF_ENDPOINT" if endpoint != HUB else HUB
    if reason := _reason_unreachable(endpoint):
        return finding(
            f"{shown} cannot be reached: {reason}",
            "check the network, HTTPS_PROXY and HF_ENDPOINT; if this machine shall be offline, set HF_HUB_OFFLINE=1",
        )
    return ok(f"{shown} answers; {_describe_token()}")


def _reason_unreachable(endpoint: str) -> str:
    if not endpoint.startswith(("https://", "http://")):
        return "HF_ENDPOINT is not a URL that begins with https://"
    request = urllib.request.Request(endpoint, method="HEAD", headers={"User-Agent": "tcdeploy"})
    try:
        with urllib.request.urlopen(request, timeout=HUB_SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        is_answer = error.code < 500 and error.code != http.client.PROXY_AUTHENTICATION_REQUIRED
        return "" if is_answer else f"status {error.code}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return _describe(error)


def _describe(error: Exception) -> str:
    reason = getattr(error, "reason", error)
    if isinstance(reason, TimeoutError):
        return f"no answer within {HUB_SECONDS:.0f} s"
    return str(getattr(reason, "strerror", None) or reason or type(reason).__name__)


def _describe_token() -> str:
    for name in TOKEN_VARIABLES:
        if os.environ.get(name):
            return f"the token is in {name}"
    home = Path(os.environ.get("HF_HOME") or Path(user_cache_dir(), "huggingface"))
    path = Path(os.environ.get("HF_TOKEN_PATH") or home / "token")
    return "the token is in a file" if path.is_file() else "no token, which gated models need"


def check_port(request: Request) -> Result:
    """Whether `serve` can listen on the port."""
    try:
        socket.create_server((LOOPBACK, request.port)).close()
    except OverflowError:
        return blocking(f"port {request.port} is not between 0 and 65535", "pass another --port")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return blocking(
                f"port {request.port} is in use by another process",
                f"pass another --port to serve, or find the process: ss -ltnp 'sport = :{request.port}'",
            )
        return blocking(
            f"cannot listen on port {request.port}: {error.strerror}", "pass another --port, from 1024 to 65535"
        )
    return ok(f"{request.port} is free" if request.port else "0: serve selects a free one")
