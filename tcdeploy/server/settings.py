"""Settings of `tcdeploy serve` other than the recipe. The command's options are derived from the fields.

Does not import torch or the server's packages.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tcdeploy.errors import UsageError
from tcdeploy.planning.option import check_ranges, option, variables_of
from tcdeploy.planning.recipe import Recipe
from tcdeploy.text.chat_template import ChatTemplate, read_chat_template
from tcdeploy.text.tool_formats import REASONING_PARSERS, TOOL_PARSERS

StartTier = Literal["warm", "eager"]
RequestLogFormat = Literal["off", "text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
MAX_API_KEY_CHARS = 8192  # the head of a request is limited to 64 KiB
API_KEY_INVALID_CHARACTER = re.compile(r"[^!-~]")
ROOT_PATH_PATTERN = re.compile(r"(/[A-Za-z0-9._~-]+)+")
ORIGIN_PATTERN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")
OTLP_ENDPOINT_PATTERN = re.compile(r"https?://[^?#\s]+(?<!/)(?<!/v1/traces)")
METRICS_PREFIX_PATTERN = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


_option = functools.partial(option, panel="Server", has_variable=True)


def _without_slash(text: str) -> str:
    return text.rstrip("/")


@dataclass(frozen=True)
class ServerSettings:
    """Fields without an option are set by the command, or keep their defaults."""

    host: str = _option("127.0.0.1", "Address to listen on; 0.0.0.0 listens on all interfaces")
    port: int = _option(
        8000, "Port to listen on; 0 selects a free one", minimum=0, maximum=65535, valid="0 selects a free port"
    )
    api_keys: tuple[str, ...] = _option(
        (), "API key that requests must send; repeat it for several keys; default: none required", name="api_key",
        metavar="KEY",
    )  # fmt: skip
    model: str = ""  # the model's name in the API
    # Further names that requests may use. The option has all names, the first of which becomes `model`.
    model_aliases: tuple[str, ...] = _option(
        (), "Model name in the API, default: MODEL; repeat it for further names", name="served_model_name",
        metavar="NAME",
    )  # fmt: skip
    allowed_origins: tuple[str, ...] = _option(
        (),
        "Origin of web pages that may call the server (CORS), such as https://app.example.com, or * for all; repeat it "
        "for several",
        is_advanced=True,
        metavar="ORIGIN",
    )
    root_path: str = _option(
        "", "Path below which a proxy serves this server, such as /llm", is_advanced=True, metavar="PATH",
        parse=_without_slash,
    )  # fmt: skip
    ssl_certfile: str | None = _option(
        None, "PEM file with the certificate chain; the server then speaks HTTPS", is_advanced=True, metavar="FILE"
    )
    ssl_keyfile: str | None = _option(
        None, "PEM file with the private key; default: it is in --ssl-certfile", is_advanced=True, metavar="FILE"
    )
    chat_template: ChatTemplate | None = _option(
        None, "Jinja file with the chat template; default: the tokenizer's", is_advanced=True, metavar="FILE",
        parse=lambda path: read_chat_template(Path(path)),
    )  # fmt: skip
    tool_parser: str = _option(
        "auto",
        "Format of the model's tool calls; auto: the tokenizer's response template, else detected from the chat "
        f"template. {', '.join(TOOL_PARSERS[1:])}",
        is_advanced=True, metavar="NAME", choices=TOOL_PARSERS,
    )  # fmt: skip
    reasoning_parser: str = _option(
        "auto",
        "Format of the model's reasoning, which is returned as reasoning_content; auto: detected from the chat "
        f"template; none: reasoning is content. {', '.join(REASONING_PARSERS[2:])}",
        is_advanced=True, metavar="NAME", choices=REASONING_PARSERS,
    )  # fmt: skip
    max_queued: int = _option(256, "Completions that may wait for a decode row; more get 503", minimum=0)
    stall_timeout: float = _option(
        30.0, "Seconds until a client that reads nothing is dropped", is_advanced=True, minimum=1, maximum=86_400,
        unit="seconds",
    )  # fmt: skip
    drain_timeout: float = _option(
        30.0, "Seconds for running requests to finish after SIGTERM", minimum=0, unit="seconds"
    )
    canary_interval: float = _option(
        600.0, "Seconds between canary rounds, which rerun fixed prompts while the server is idle; 0 disables them",
        is_advanced=True, minimum=0, unit="seconds", valid="0 disables the canary",
    )  # fmt: skip
    canary_strict: bool = _option(
        False, "Make /health and /ready return 503 after a canary result has differed", is_advanced=True
    )
    start: StartTier = _option(
        "warm",
        "warm: answer once all programs are compiled or loaded; eager: answer with uncompiled steps at once, and "
        "replace them by programs while serving",
    )
    build_packages: bool = _option(
        False,
        "With --programs auto, and if this server runs jit programs: build packages in a process of the lowest "
        "priority while no request is open; takes minutes of a compiler, and memory for a second copy of the model",
        is_advanced=True,
    )
    max_body_bytes: int = 8 << 20
    max_waiting_bytes: int = 32 << 20  # of all large bodies that are being received, parsed or tokenized
    log_requests: RequestLogFormat = _option(
        "off", "Write a line to stderr for each HTTP request: client, method, path, status, time, tokens, request id"
    )
    log_prompts: int = _option(
        0, "Add the first N characters of each prompt to the lines of --log-requests; 0: none", is_advanced=True,
        metavar="N", minimum=0, valid="200",
    )  # fmt: skip
    log_level: LogLevel = _option("warning", "Lowest level of messages on stderr", is_advanced=True)
    metrics_prefix: str = _option(
        "tcdeploy:", "Prefix of the names in /metrics; vllm: makes the dashboards of vLLM work", is_advanced=True,
        metavar="PREFIX",
    )  # fmt: skip
    otlp_endpoint: str = _option(
        "",
        "Base URL of an OpenTelemetry collector (OTLP over HTTP), such as http://localhost:4318, which gets a span and "
        "the latencies of each generation request",
        is_advanced=True, metavar="URL", parse=_without_slash,
    )  # fmt: skip


SERVER_VARIABLES = set(variables_of(ServerSettings))


def check_package_build(settings: ServerSettings, recipe: Recipe) -> None:
    """Raise UsageError for a recipe whose server would build no packages, although the settings request it."""
    reasons = {
        f"--programs {recipe.programs}": (recipe.programs != "auto", "which is fixed for all starts"),
        "--no-compile": (not recipe.compile, "which compiles nothing"),
        "--require-signed": (recipe.require_signed, "which uses only files of a signed bundle"),
    }
    for flag, (is_given, reason) in reasons.items():
        if settings.build_packages and is_given:
            raise UsageError(f"--build-packages excludes {flag}, {reason}", f"omit --build-packages, or {flag}")


def check_settings(settings: ServerSettings) -> None:
    """Raise UsageError for values that are invalid, or that exclude each other."""
    check_api_keys(settings.api_keys)
    check_ranges(settings)
    _check_root_path(settings.root_path)
    for origin in settings.allowed_origins:
        if origin != "*" and not ORIGIN_PATTERN.fullmatch(origin):
            problem = f"--allowed-origins {origin!r} is not an origin"
            raise UsageError(problem, "scheme://host or scheme://host:port, or * for all")
    if settings.ssl_keyfile is not None and settings.ssl_certfile is None:
        raise UsageError("--ssl-keyfile needs --ssl-certfile", "pass the certificate chain too")
    if not METRICS_PREFIX_PATTERN.fullmatch(settings.metrics_prefix):
        problem = f"--metrics-prefix {settings.metrics_prefix!r} cannot begin the name of a Prometheus metric"
        raise UsageError(problem, "use letters, digits (not first), _ and :, such as vllm:")
    if settings.log_prompts and settings.log_requests == "off":
        raise UsageError("--log-prompts needs --log-requests", "--log-requests text, or json")
    if settings.otlp_endpoint and not OTLP_ENDPOINT_PATTERN.fullmatch(settings.otlp_endpoint):
        problem = f"--otlp-endpoint {settings.otlp_endpoint!r} is not the base URL of a collector"
        raise UsageError(problem, "the address of OTLP over HTTP, without /v1/traces, such as http://localhost:4318")
    if settings.canary_strict and not settings.canary_interval:
        problem = "--canary-strict has no effect with --canary-interval 0"
        raise UsageError(problem, "remove --canary-strict, or pass a --canary-interval above 0")
    if settings.canary_strict and settings.start == "eager":
        raise UsageError(
            "--start eager excludes --canary-strict: the canary can be recorded only after eager steps are replaced",
            "remove one of them",
        )


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
            problem = f"API key {number} of {len(keys)} has {len(key)} characters; the limit is {MAX_API_KEY_CHARS}"
            raise UsageError(problem, "use a shorter key: openssl rand -hex 32")


def _check_root_path(root_path: str) -> None:
    if root_path and not root_path.startswith("/"):
        raise UsageError(f"--root-path {root_path!r} does not begin with /", f"--root-path /{root_path}")
    if root_path and not ROOT_PATH_PATTERN.fullmatch(root_path):
        problem = f"--root-path {root_path!r} is not a plain path"
        raise UsageError(problem, "use parts of letters, digits, -, _, . and ~: /models/llm")
    if root_path.split("/")[1:2] == ["v1"]:  # /v1/models would be taken for /models below it
        raise UsageError(f"--root-path {root_path} begins with /v1, as the API's own routes do", "for example /llm")
