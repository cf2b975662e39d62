"""Settings of `tcdeploy serve` beside the recipe. Frozen; the defaults are also those of the command's options."""

from __future__ import annotations

from dataclasses import dataclass

from tcdeploy.server.hot_path import HotPath


@dataclass(frozen=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None  # None: no authentication
    model: str = ""  # the model's name in the API
    max_queued: int = 256  # choices that may wait for a decode row
    drain_timeout: float = 30.0  # seconds
    stall_timeout: float = 30.0  # seconds
    max_body_bytes: int = 8 << 20
    hot_path: HotPath = HotPath()
