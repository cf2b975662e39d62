"""Options of `serve` for its surroundings: keys, names, browsers, proxies, TLS, and their environment variables."""

from __future__ import annotations

import dataclasses
import inspect
import ipaddress
import math
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tcdeploy.cli import process
from tcdeploy.cli.serve import serve as serve_command
from tcdeploy.errors import UsageError
from tcdeploy.planning.recipe import Recipe
from tcdeploy.server.run import run_server
from tcdeploy.server.settings import SERVER_VARIABLES, ServerSettings, check_settings
from tests.conftest import TINY, RunCLI
from tests.server.test_api import loading_state, send_request

ORIGIN = "https://app.example.com"
RECIPE_FIELDS = {field.name for field in dataclasses.fields(Recipe)} | {"recipe"}
# Options that `serve` shares with other commands.
SHARED_OPTIONS = {"cache_from", "allow_unsigned", "allow_rollback", "trusted_keys", "budget", "dry_run", "json"}
OPTIONS = (
    "host", "port", "api_key", "served_model_name", "allowed_origins", "root_path", "ssl_certfile", "ssl_keyfile",
    "max_queued", "stall_timeout", "drain_timeout", "canary_interval", "canary_strict", "start", "log_requests",
    "log_level", "log_prompts", "otlp_endpoint", "metrics_prefix", "chat_template", "tool_parser", "reasoning_parser",
    "build_packages",
)  # fmt: skip


def settings_state(**settings: Any) -> Any:
    state = loading_state()
    state.settings = dataclasses.replace(state.settings, **settings)
    return state


@pytest.mark.parametrize("key", ["first", "second"])
def test_each_of_several_keys_is_accepted(key: str) -> None:
    state = settings_state(api_keys=("first", "second"))
    assert send_request(state, "GET", "/version", None, authorization=f"Bearer {key}").status_code == 200
    assert send_request(state, "GET", "/version", None, authorization="Bearer third").status_code == 401


@pytest.mark.parametrize(("path", "methods"), [("/health", "GET, HEAD, OPTIONS"), ("/tokenize", "POST, OPTIONS")])
def test_options_names_the_methods_of_a_route(path: str, methods: str) -> None:
    response = send_request(settings_state(), "OPTIONS", path, None)
    assert (response.status_code, response.content, response.headers["allow"]) == (204, b"", methods)


def test_options_of_an_unknown_route_is_an_error() -> None:
    assert send_request(settings_state(), "OPTIONS", "/unknown", None).status_code == 404


def test_head_has_the_status_of_get_and_no_body() -> None:
    for path, status in (("/health", 200), ("/ready", 503)):
        response = send_request(settings_state(), "HEAD", path, None)
        assert (response.status_code, response.content) == (status, b"")


def test_a_browser_may_call_from_an_allowed_origin_only() -> None:
    state = settings_state(api_keys=("key",), allowed_origins=(ORIGIN,))
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    preflight = send_request(state, "OPTIONS", "/v1/completions", None, origin=ORIGIN, **asked)
    assert preflight.status_code == 200, "browsers send it without the key"
    assert preflight.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    response = send_request(state, "GET", "/version", None, origin=ORIGIN, authorization="Bearer key")
    assert response.headers["access-control-allow-origin"] == ORIGIN
    refused = send_request(state, "OPTIONS", "/v1/completions", None, origin="https://evil.example.com", **asked)
    assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers


def test_without_the_option_no_origin_is_allowed() -> None:
    response = send_request(settings_state(), "GET", "/version", None, origin=ORIGIN)
    assert "access-control-allow-origin" not in response.headers


def test_no_redirect_leads_out_of_the_root_path() -> None:
    state = settings_state(root_path="/llm")
    for method, path in (("POST", "/llm/tokenize/"), ("GET", "/llm/version/"), ("OPTIONS", "/llm/v1/completions/")):
        response = send_request(state, method, path, None)
        assert response.status_code == 404 and "did you mean" in response.json()["error"]["message"]
    page = send_request(state, "GET", "/llm", None)
    assert (page.status_code, page.headers["location"]) == (307, "/llm/"), "the page fetches addresses below its own"
    assert send_request(state, "GET", "/llm/", None).status_code == 200


@pytest.mark.parametrize("path", ["/llm/version", "/version"])
def test_a_proxy_may_forward_the_root_path_or_remove_it(path: str) -> None:
    response = send_request(settings_state(root_path="/llm"), "GET", path, None)
    assert response.status_code == 200 and "version" in response.json()


def test_the_root_path_is_part_of_the_document_and_needs_the_key_too() -> None:
    state = settings_state(root_path="/llm", api_keys=("key",))
    document = send_request(state, "GET", "/llm/openapi.json", None, authorization="Bearer key").json()
    assert document["servers"] == [{"url": "/llm"}]
    assert send_request(state, "GET", "/llm/openapi.json", None).status_code == 401
    assert send_request(state, "GET", "/llmx/openapi.json", None, authorization="Bearer key").status_code == 404


def make_certificate(folder: Path, password: bytes | None = None) -> tuple[str, str]:
    """Paths of a self-signed certificate for 127.0.0.1, and of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1)).add_extension(address, critical=False).sign(key, hashes.SHA256())
    )  # fmt: skip
    encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))
    return str(paths[0]), str(paths[1])


def test_a_server_with_a_certificate_two_names_and_a_chat_template_answers_over_tls(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    certificate, key = make_certificate(tmp_path)
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }} {{ messages[0].content }}")
    flags = ("--served-model-name", "first", "--served-model-name", "second", "--root-path", "/llm/")
    flags += ("--chat-template", str(template))
    with serve("--ssl-certfile", certificate, "--ssl-keyfile", key, *flags) as server:
        assert server.address.startswith("https://127.0.0.1:") and server.address.endswith("/llm")
        with httpx.Client(verify=ssl.create_default_context(cafile=certificate)) as client:
            models = client.get(f"{server.address}/v1/models").json()["data"]
            assert [model["id"] for model in models] == ["first", "second"]
            for name, status in (("first", 200), ("second", 200), (TINY, 404)):
                body = {"model": name, "prompt": "A list", "max_tokens": 2}
                response = client.post(f"{server.address}/v1/completions", json=body)
                assert response.status_code == status
            assert client.get(f"{server.address}/v1/models/second").json()["id"] == "second"
            bodies = ({"messages": [{"role": "user", "content": "A list"}]}, {"prompt": "A list A list"})
            prompts = [client.post(f"{server.address}/tokenize", json=body).json()["tokens"] for body in bodies]
            assert prompts[0] == prompts[1][-len(prompts[0]) :] and len(prompts[0]) > 2
            lines = client.post(
                f"{server.address}/v1/completions", json={"prompt": "A list", "max_tokens": 3, "stream": True}
            ).text.splitlines()
    assert lines[-2] == "data: [DONE]"


def test_files_that_are_no_certificate_and_key_are_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    def deploy() -> Any:
        raise AssertionError("the model is not loaded")

    certificate, key = make_certificate(tmp_path, b"secret")
    for options, message in (
        ({"ssl_certfile": certificate, "ssl_keyfile": key}, "encrypted"),
        ({"ssl_certfile": certificate, "ssl_keyfile": str(tmp_path / "missing")}, "No such file"),
        ({"ssl_certfile": certificate}, "certificate cannot be used"),
    ):
        with pytest.raises(UsageError, match=message):
            run_server(ServerSettings(port=0, **options), deploy, lambda *_: None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--root-path", "llm"), "does not begin with /"),
        (("--root-path", "/llm?x"), "is not a plain path"),
        (("--root-path", "/v1/llm"), "begins with /v1, as the API's own routes do"),
        (("--allowed-origins", "https://a.example.com/"), "is not an origin"),
        (("--allowed-origins", '["*"]'), "is not an origin"),
        (("--ssl-keyfile", "key.pem"), "needs --ssl-certfile"),
        (("--metrics-prefix", "1x"), "cannot begin the name of a Prometheus metric"),
        (("--tool-parser", "llama"), "--tool-parser is 'llama'; it must be auto, hermes, llama3_json"),
        (("--chat-template", "/missing.jinja"), "the chat template /missing.jinja cannot be read"),
        (("--log-requests", "xml"), "it must be off, text or json"),
        (("--api-key", ""), "the API key is empty"),
        (("--api-key", "key", "--api-key", " "), "the API key is empty"),
        (("--api-key", "k\u00e9 y"), "API key 1 of 1 has the character U+00E9 at position 2"),
        (("--api-key", "key", "--api-key", " lead"), "API key 2 of 2 has the character U+0020 at position 1"),
    ],
)
def test_invalid_options_are_refused(flags: tuple[str, ...], message: str, run_cli: RunCLI) -> None:
    result = run_cli("serve", TINY, *flags)
    assert result.returncode == 2 and message in result.stderr


def test_options_can_be_set_by_variables(run_cli: RunCLI) -> None:
    for variables, message in (
        ({"TCDEPLOY_API_KEY": ""}, "the API key is empty"),
        ({"TCDEPLOY_API_KEY": "\n"}, "the API key is empty"),
        (
            {"TCDEPLOY_ALLOWED_ORIGINS": "https://a.example.com https://b.example.com/"},
            "'https://b.example.com/' is not",
        ),
        ({"TCDEPLOY_ROOT_PATH": "llm"}, "does not begin with /"),
        ({"TCDEPLOY_LOG_REQUESTS": "xml"}, "it must be off, text or json"),
    ):
        result = run_cli("serve", TINY, **variables)
        assert result.returncode == 2 and message in result.stderr


@pytest.mark.parametrize(
    "key", ["trail ", "tab\t", "line\nbreak", "\x7f", "nul\x00", "\u20ac", "Bearer key", "a" * 8193]
)
def test_a_key_that_no_request_could_send_is_refused_without_printing_it(key: str) -> None:
    for keys in ((key,), ("valid", key)):
        with pytest.raises(UsageError) as error:
            check_settings(ServerSettings(api_keys=keys))
        assert f"API key {len(keys)} of {len(keys)} has" in error.value.message
        assert key not in error.value.message + error.value.hint


def test_a_key_may_have_all_visible_characters_of_ascii() -> None:
    key = "".join(map(chr, range(0x21, 0x7F)))
    check_settings(ServerSettings(api_keys=(key,)))
    state = settings_state(api_keys=(key,))
    assert send_request(state, "GET", "/version", None, authorization=f"Bearer {key}").status_code == 200
    assert send_request(state, "GET", "/version", None, **{"x-api-key": key}).status_code == 200


def test_every_option_of_the_command_has_a_variable() -> None:
    """Scripts and manifests use these names."""
    options = [
        parameter.annotation.__metadata__[0]
        for parameter in inspect.signature(serve_command).parameters.values()
        if parameter.name not in RECIPE_FIELDS and parameter.name not in SHARED_OPTIONS
    ]
    # typer keeps the name of the flag in `default` until it builds the parser.
    variables = {option.default: option.envvar for option in options}
    assert variables == {f"--{name.replace('_', '-')}": f"TCDEPLOY_{name.upper()}" for name in OPTIONS}
    assert set(variables.values()) == SERVER_VARIABLES


@pytest.mark.parametrize(
    "value", ["tcp://example.com:8000", "tcp://10.96.0.7:8000/", "tcp://10.96.0.7:80000", "http://10.96.0.7:8000"]
)
def test_a_port_that_neither_kubernetes_sets_nor_is_a_number_is_refused(value: str, run_cli: RunCLI) -> None:
    result = run_cli("serve", TINY, TCDEPLOY_PORT=value)
    assert result.returncode == 2 and "valid integer" in result.stderr


def test_the_port_that_kubernetes_sets_for_a_service_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, kept in (("tcp://10.0.0.1:80", None), ("8123", "8123")):
        monkeypatch.setenv("TCDEPLOY_PORT", value)
        process._ignore_service_links()
        assert process.os.environ.get("TCDEPLOY_PORT") == kept


@pytest.mark.parametrize(
    ("field", "value", "range"),
    [
        ("max_queued", -1, "0 or more"), ("stall_timeout", -1.0, "1 to 86400 seconds"),
        ("stall_timeout", math.inf, "1 to 86400 seconds"), ("drain_timeout", math.nan, "0 or more seconds"),
        ("log_prompts", -1, "0 or more"), ("port", 65_536, "0 to 65535"),
    ],
)  # fmt: skip
def test_a_number_outside_of_its_range_is_refused(field: str, value: float, range: str) -> None:
    settings: dict[str, Any] = {field: value}
    flag = f"--{field.replace('_', '-')}"
    with pytest.raises(UsageError, match=f"^{flag} is {value}; it must be {range}$") as error:
        check_settings(ServerSettings(**settings))
    assert error.value.hint.startswith(flag)
