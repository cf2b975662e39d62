"""Ports for servers that cannot report the port that they have chosen."""

from __future__ import annotations

import contextlib
import random
import socket

# Below the range from which the kernel chooses ports: another process could get a port between the choice and its use.
# Above the ports of Ray's workers.
RANGE = (20_000, 32_000)


def free_port() -> int:
    """A port of 127.0.0.1 on which nothing listens now."""
    numbers = random.SystemRandom()  # tests seed `random`
    while True:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", numbers.randrange(*RANGE))) as listener:
            return int(listener.getsockname()[1])
