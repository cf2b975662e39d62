"""Settings of `tcdeploy serve` other than the recipe. Their defaults are those of the command's options.

Does not import torch or the server's packages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tcdeploy.errors import UsageError
from tcdeploy.text.chat_template import ChatTemplate


@dataclass(frozen=True)
class HotPath:
    """Which latency optimizations of hot_path.py are on. False selects the simpler code, for benchmarks."""

    direct_routes: bool = True
    first_token_sleep: bool = True
    delayed_launch: bool = True
    short_switch_interval: bool = True
    wait_for_launch: bool = True
    yield_to_launch: bool = True


StartTier = Literal["warm", "eager"]
RequestLogFormat = Literal["off", "text", "json"]
MAX_PORT = 65535
MAX_API_KEY_CHARS = 8192  # the head of a request is limited to 64 KiB
API_KEY_INVALID_CHARACTER = re.compile(r"[^!-~]")
ROOT_PATH_PATTERN = re.compile(r"(/[A-Za-z0-9._~-]+)+")
ORIGIN_PATTERN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")
OTLP_ENDPOINT_PATTERN = re.compile(r"https?://[^?#\s]+(?<!/)(?<!/v1/traces)")
METRICS_PREFIX_PATTERN = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


@dataclass(frozen=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()  # a request needs one of them; (): no authentication
    model: str = ""  # the model's name in the API
    model_aliases: tuple[str, ...] = ()  # further names that requests may use
    allowed_origins: tuple[str, ...] = ()  # of browsers (CORS); "*": all
    root_path: str = ""  # path below which a proxy serves this server: "" or "/path"
    ssl_certfile: str | None = None  # certificate chain in PEM; None: HTTP without TLS
    ssl_keyfile: str | None = None  # its private key; None: in `ssl_certfile`
    chat_template: ChatTemplate | None = None  # replaces the tokenizer's
    tool_parser: str = "auto"  # a name in text/tool_formats.py
    reasoning_parser: str = "auto"
    max_queued: int = 256  # choices that may wait for a decode row
    drain_timeout: float = 30.0  # seconds
    stall_timeout: float = 30.0  # seconds
    start: StartTier = "warm"  # eager: answer with eager steps, and replace them by programs while serving
    canary_interval: float = 600.0  # seconds between two rounds of the canary; 0: none
    canary_strict: bool = False  # whether a difference makes the server unhealthy
    max_body_bytes: int = 8 << 20
    max_waiting_bytes: int = 32 << 20  # of all large bodies that are being received, parsed or tokenized
    log_requests: RequestLogFormat = "off"  # one line for each HTTP request
    log_prompts: int = 0  # characters of each prompt in these lines
    otlp_endpoint: str = ""  # base URL of an OpenTelemetry collector; "": no traces
    metrics_prefix: str = "tcdeploy:"  # of the names in /metrics
    hot_path: HotPath = HotPath()


def check_settings(settings: ServerSettings) -> None:
    """Raise UsageError for values that are invalid, or that exclude each other."""
    check_api_keys(settings.api_keys)
    if not 0 <= settings.port <= MAX_PORT:
        raise UsageError(f"--port is {settings.port}; it must be 0 to {MAX_PORT}", "--port 0 selects a free port")
    _check_root_path(settings.root_path)
    for origin in settings.allowed_origins:
        if origin != "*" and not ORIGIN_PATTERN.fullmatch(origin):
            raise UsageError(
                f"--allowed-origins {origin!r} is not an origin", "scheme://host or scheme://host:port, or * for all"
            )
    if settings.ssl_keyfile is not None and settings.ssl_certfile is None:
        raise UsageError("--ssl-keyfile needs --ssl-certfile", "pass the certificate chain too")
    if not METRICS_PREFIX_PATTERN.fullmatch(settings.metrics_prefix):
        raise UsageError(
            f"--metrics-prefix {settings.metrics_prefix!r} cannot begin the name of a Prometheus metric",
            "use letters, digits (not first), _ and :, such as vllm:",
        )
    if settings.log_prompts < 0:
        raise UsageError(f"--log-prompts is {settings.log_prompts}; it must be 0 or more", "--log-prompts 200")
    if settings.log_prompts and settings.log_requests == "off":
        raise UsageError("--log-prompts needs --log-requests", "--log-requests text, or json")
    if settings.otlp_endpoint and not OTLP_ENDPOINT_PATTERN.fullmatch(settings.otlp_endpoint):
        raise UsageError(
            f"--otlp-endpoint {settings.otlp_endpoint!r} is not the base URL of a collector",
            "the address of OTLP over HTTP, without /v1/traces, such as http://localhost:4318",
        )
    _check_canary(settings)


def check_api_keys(keys: Sequence[str]) -> None:
    """Raise UsageError for a key that no request can contain. The message does not contain the key."""
    for number, key in enumerate(keys, 1):
        if not key.strip():
            raise UsageError("the API key is empty", "omit --api-key and TCDEPLOY_API_KEY to serve without a key")
        if invalid := API_KEY_INVALID_CHARACTER.search(key):
            raise UsageError(
                f"API key {number} of {len(keys)} has the character U+{ord(invalid[0]):04X} at position "
                f"{invalid.start() + 1}, which cannot be part of a key in an Authorization header",
                "use letters, digits and punctuation of ASCII, without spaces: openssl rand -hex 32",
            )
        if len(key) > MAX_API_KEY_CHARS:
            raise UsageError(
                f"API key {number} of {len(keys)} has {len(key)} characters; the limit is {MAX_API_KEY_CHARS}",
                "use a shorter key: openssl rand -hex 32",
            )


def _check_root_path(root_path: str) -> None:
    if root_path and not root_path.startswith("/"):
        raise UsageError(f"--root-path {root_path!r} does not begin with /", f"--root-path /{root_path}")
    if root_path and not ROOT_PATH_PATTERN.fullmatch(root_path):
        raise UsageError(
            f"--root-path {root_path!r} is not a plain path", "use parts of letters, digits, -, _, . and ~: /models/llm"
        )
    if root_path.split("/")[1:2] == ["v1"]:  # /v1/models would be taken for /models below it
        raise UsageError(f"--root-path {root_path} begins with /v1, as the API's own routes do", "for example /llm")


def _check_canary(settings: ServerSettings) -> None:
    if not settings.canary_interval >= 0:  # NaN included
        raise UsageError(
            f"--canary-interval is {settings.canary_interval}; it must be 0 or more seconds",
            "--canary-interval 0 disables the canary",
        )
    if not settings.canary_strict:
        return
    if not settings.canary_interval:
        raise UsageError(
            "--canary-strict has no effect with --canary-interval 0",
            "remove --canary-strict, or pass a --canary-interval above 0",
        )
    if settings.start == "eager":
        raise UsageError(
            "--start eager excludes --canary-strict: the canary can be recorded only after eager steps are replaced",
            "remove one of them",
        )
