"""Recognises the variables that Kubernetes sets in each container for the Services of its namespace.

For a Service named tcdeploy or tcdeploy-server, the names of these variables start with `TCDEPLOY_`, as those of recipe
keys do. A variable is ignored if both its name and its value have the form that the kubelet writes (pkg/kubelet/envvars
in Kubernetes): the value is an IP address, a port number, or a URL that repeats the port and the protocol in the name.
Other variables with the prefix are recipe keys, for example `TCDEPLOY_PORT=8000`, which Kubernetes does not write.
"""

from __future__ import annotations

import ipaddress
import re

_SERVICE = r"TCDEPLOY(?:_[A-Z0-9_]*[A-Z0-9])?"
# Names of variables, by the form of their value.
_HOST_NAME = re.compile(rf"{_SERVICE}_SERVICE_HOST")
_NUMBER_NAME = re.compile(rf"{_SERVICE}_SERVICE_PORT(?:_[A-Z0-9_]+)?")  # the suffix is the name of a port
_URL_NAME = re.compile(rf"{_SERVICE}_PORT")
_PORT_NAME = re.compile(rf"{_SERVICE}_PORT_(?P<port>[0-9]+)_(?P<protocol>TCP|UDP|SCTP)(?:_(?P<part>PROTO|PORT|ADDR))?")
_URL_VALUE = re.compile(r"(?P<protocol>tcp|udp|sctp)://(?P<host>[0-9.]+|\[[0-9a-f:.]+\]):(?P<port>[0-9]+)")


def is_service_variable(name: str, value: str) -> bool:
    """True for variables such as `TCDEPLOY_SERVICE_HOST=10.0.0.7` or `TCDEPLOY_PORT=tcp://10.0.0.7:8000`."""
    # One name can match several patterns: TCDEPLOY_SERVICE_PORT is a number for the Service tcdeploy, and a URL for the
    # Service tcdeploy-service.
    return (
        (_HOST_NAME.fullmatch(name) is not None and _is_address(value))
        or (_NUMBER_NAME.fullmatch(name) is not None and _is_port(value))
        or (_URL_NAME.fullmatch(name) is not None and _is_url(value))
        or _is_port_variable(name, value)
    )


def _is_port_variable(name: str, value: str) -> bool:
    match = _PORT_NAME.fullmatch(name)
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
