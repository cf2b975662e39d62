"""Recognises the variables that Kubernetes sets in each container for the Services of its namespace.

A Service called tcdeploy, or tcdeploy-server, gives names that start with `TCDEPLOY_`, the prefix of recipe keys. They
are ignored by name and value, as the kubelet writes them (pkg/kubelet/envvars in Kubernetes): an IP address, a port
number, or a URL that repeats the port and protocol in the name. Everything else with the prefix remains a recipe key:
`TCDEPLOY_PORT=8000` is not what Kubernetes writes.
"""

from __future__ import annotations

import ipaddress
import re

_SERVICE = r"TCDEPLOY(?:_[A-Z0-9_]*[A-Z0-9])?"
_HOST = re.compile(rf"{_SERVICE}_SERVICE_HOST")
_NUMBER = re.compile(rf"{_SERVICE}_SERVICE_PORT(?:_[A-Z0-9_]+)?")  # the suffix is the name of a port
_URL = re.compile(rf"{_SERVICE}_PORT")
_PORT = re.compile(rf"{_SERVICE}_PORT_(?P<port>[0-9]+)_(?P<protocol>TCP|UDP|SCTP)(?:_(?P<part>PROTO|PORT|ADDR))?")
_URL_VALUE = re.compile(r"(?P<protocol>tcp|udp|sctp)://(?P<host>[0-9.]+|\[[0-9a-f:.]+\]):(?P<port>[0-9]+)")


def is_service_variable(name: str, value: str) -> bool:
    """True for variables such as `TCDEPLOY_SERVICE_HOST=10.0.0.7` or `TCDEPLOY_PORT=tcp://10.0.0.7:8000`."""
    # A name can have several shapes: TCDEPLOY_SERVICE_PORT is a number for the Service tcdeploy, and a URL for the
    # Service tcdeploy-service.
    return (
        (_HOST.fullmatch(name) is not None and _is_address(value))
        or (_NUMBER.fullmatch(name) is not None and _is_port(value))
        or (_URL.fullmatch(name) is not None and _is_url(value))
        or _is_port_variable(name, value)
    )


def _is_port_variable(name: str, value: str) -> bool:
    match = _PORT.fullmatch(name)
    if match is None:
        return False
    port, protocol = match["port"], match["protocol"].lower()
    if match["part"] == "PROTO":
        return value == protocol
    if match["part"] == "PORT":
        return value == port and _is_port(value)
    return _is_address(value) if match["part"] == "ADDR" else _is_url(value, protocol, port)


def _is_url(value: str, protocol: str | None = None, port: str | None = None) -> bool:
    match = _URL_VALUE.fullmatch(value)
    return (
        match is not None
        and _is_address(match["host"].strip("[]"))
        and _is_port(match["port"])
        and match["protocol"] == (protocol or match["protocol"])
        and match["port"] == (port or match["port"])
    )


def _is_address(value: str) -> bool:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return False
    return True


def _is_port(value: str) -> bool:
    return re.fullmatch(r"[1-9][0-9]{0,4}", value) is not None and int(value) <= 65535
