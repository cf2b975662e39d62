"""Variables that Kubernetes sets for a Service are ignored by their exact names and values; typos are still refused."""

from __future__ import annotations

from dataclasses import fields

import pytest

from tcdeploy.errors import RecipeError
from tcdeploy.planning.kubernetes import is_service_variable
from tcdeploy.planning.recipe import SHARED_VARIABLES, Recipe, build_recipe
from tcdeploy.server.settings import SERVER_VARIABLES


def service_variables(prefix: str, address: str, ports: list[tuple[str, int, str]]) -> dict[str, str]:
    """What `FromServices` in Kubernetes' pkg/kubelet/envvars writes for a Service with these (name, port, protocol)."""
    host = f"[{address}]" if ":" in address else address
    variables = {f"{prefix}_SERVICE_HOST": address, f"{prefix}_SERVICE_PORT": str(ports[0][1])}
    variables[f"{prefix}_PORT"] = f"{ports[0][2]}://{host}:{ports[0][1]}"
    for name, port, protocol in ports:
        if name:
            variables[f"{prefix}_SERVICE_PORT_{name}"] = str(port)
        link = f"{prefix}_PORT_{port}_{protocol.upper()}"
        variables |= {link: f"{protocol}://{host}:{port}", f"{link}_PROTO": protocol}
        variables |= {f"{link}_PORT": str(port), f"{link}_ADDR": address}
    return variables


SERVICES = {
    "tcdeploy": service_variables("TCDEPLOY", "10.96.0.7", [("", 8000, "tcp")]),
    "tcdeploy-server": service_variables("TCDEPLOY_SERVER", "10.96.0.8", [("HTTP", 80, "tcp"), ("UDP_DNS", 53, "udp")]),
    "tcdeploy-ipv6": service_variables("TCDEPLOY_IPV6", "fd00:10:96::7", [("_8000_X", 8000, "sctp")]),
    "tcdeploy-service": service_variables("TCDEPLOY_SERVICE", "10.96.0.10", [("", 443, "tcp")]),
    "tcdeploy-port": service_variables("TCDEPLOY_PORT", "10.96.0.9", [("", 65535, "tcp")]),
}


@pytest.mark.parametrize("service", SERVICES)
def test_the_variables_of_a_service_do_not_change_the_recipe(service: str) -> None:
    assert build_recipe({"model": "m"}, environ=SERVICES[service]) == Recipe(model="m")


def test_settings_beside_the_variables_of_a_service_are_read() -> None:
    environ = {**SERVICES["tcdeploy"], "TCDEPLOY_MODEL": "m", "TCDEPLOY_CONTEXT": "512"}
    assert build_recipe({}, environ=environ) == Recipe(model="m", context=512)


@pytest.mark.parametrize(
    "name, value",
    [
        ("TCDEPLOY_PORTS", "tcp://10.96.0.7:8000"),
        ("TCDEPLOY_SERVICE_HOST", "example.com"),
        ("TCDEPLOY_SERVICE_HOST", "10.96.0.7\n"),
        ("TCDEPLOY_SERVICE_HOSTS", "10.96.0.7"),
        ("TCDEPLOY_SERVICE", "10.96.0.7"),
        ("TCDEPLOY_SERVICE_PORT", "0"),
        ("TCDEPLOY_SERVICE_PORT", "65536"),
        ("TCDEPLOY_SERVICE_PORT", "http"),
        ("TCDEPLOY_SERVICE_PORTS", "8000"),
        ("TCDEPLOY_SERVICE_PORT_", "8000"),
        ("TCDEPLOY_PORT_8000_TCP", "tcp://10.96.0.7:8001"),
        ("TCDEPLOY_PORT_8000_TCP", "udp://10.96.0.7:8000"),
        ("TCDEPLOY_PORT_8000_HTTP", "tcp://10.96.0.7:8000"),
        ("TCDEPLOY_PORT_8000_TCP_PROTO", "udp"),
        ("TCDEPLOY_PORT_8000_TCP_PORT", "8001"),
        ("TCDEPLOY_PORT_8000_TCP_ADDR", "tcdeploy"),
        ("TCDEPLOY_PORT_8000_TCP_ADDRESS", "10.96.0.7"),
        ("TCDEPLOY_service_host", "10.96.0.7"),
    ],
)
def test_other_names_and_values_are_refused(name: str, value: str) -> None:
    with pytest.raises(RecipeError, match=f"unknown variable {name.upper()}"):
        build_recipe({"model": "m"}, environ={name: value})


def test_no_setting_has_the_name_of_a_service_variable() -> None:
    settings = {f"TCDEPLOY_{item.name.upper()}" for item in fields(Recipe)} | SHARED_VARIABLES | SERVER_VARIABLES
    values = {value for variables in SERVICES.values() for value in variables.values()}
    clashes = {(name, value) for name in settings for value in values if is_service_variable(name, value)}
    assert {name for name, _ in clashes} == {"TCDEPLOY_PORT"}
    assert not [value for _, value in clashes if value.isdecimal()], "a service's value is never a port number"
