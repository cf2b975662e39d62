"""Recognises the variables that Kubernetes sets in each container for the Services of its namespace.

For a Service named tcdeploy or tcdeploy-server, the names of these variables start with `TCDEPLOY_`, as those of recipe
keys do. A variable is ignored if both its name and its value have the form that the kubelet writes (pkg/kubelet/envvars
in Kubernetes): the value is an IP address, a port number, or a URL that repeats the port and the protocol in the name.
Other variables with the prefix are recipe keys, for example `TCDEPLOY_PORT=8000`, which Kubernetes does not write.
"""

from __future__ import annotations

import ipaddress
import re

_ADDRESS = r"(?P<address>[0-9a-f:.]+)"
_NUMBER = "(?P<number>[1-9][0-9]{0,4})"
_LINK = "PORT_(?P<port>[0-9]+)_(?P<protocol>TCP|UDP|SCTP)"
_FORMS = [  # a name can have several: TCDEPLOY_SERVICE_PORT is a number for tcdeploy, and a URL for tcdeploy-service
    re.compile(rf"TCDEPLOY(?:_[A-Z0-9_]*[A-Z0-9])?_{form}")
    for form in (
        rf"SERVICE_HOST={_ADDRESS}",
        rf"SERVICE_PORT(?:_[A-Z0-9_]+)?={_NUMBER}",  # the suffix is the name of a port
        rf"PORT=(?:tcp|udp|sctp)://\[?{_ADDRESS}\]?:{_NUMBER}",
        rf"{_LINK}=(?P<scheme>tcp|udp|sctp)://\[?{_ADDRESS}\]?:(?P<number>(?P=port))",
        rf"{_LINK}_PROTO=(?P<scheme>tcp|udp|sctp)",
        rf"{_LINK}_PORT=(?P<number>(?P=port))",
        rf"{_LINK}_ADDR={_ADDRESS}",
    )
]


def is_service_variable(name: str, value: str) -> bool:
    """True for variables such as `TCDEPLOY_SERVICE_HOST=10.0.0.7` or `TCDEPLOY_PORT=tcp://10.0.0.7:8000`."""
    matches = [match.groupdict() for form in _FORMS if (match := form.fullmatch(f"{name}={value}"))]
    return any(_has_valid_parts(**match) for match in matches)


def _has_valid_parts(
    address: str = "::", number: str = "1", scheme: str = "", protocol: str = "", port: str = ""
) -> bool:
    """Whether the number is a port, the address an IP address, and the scheme that of the name."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return 0 < int(number) <= 65535 and scheme in ("", protocol.lower())
