"""Latency optimizations of the request path that bypass simpler code, one function each, and a switch for each.

Every function here has a simpler equivalent, which runs if its switch in `HotPath` (settings.py) is off. The switches
exist for benchmarks: `TCDEPLOY_HOT_PATH_OFF=direct_routes,wait_for_launch tcdeploy serve ...`, or `scripts/bench-serve
--hot-path-off`. They are not command-line flags, because no deployment should need them.

Milliseconds that are saved refer to the first token of one client (8B shape, H100), which takes 13.2 ms.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import fields, replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tcdeploy.engine.schedule.sequence import NewToken
from tcdeploy.engine.step.launch_timer import LaunchLock
from tcdeploy.errors import UsageError
from tcdeploy.server.settings import HOT_PATH_VARIABLE, HotPath

FIRST_TOKEN_SLEEP_S = 0.0002
SWITCH_INTERVAL_S = 0.0005
MAX_LAUNCH_WAIT_S = 0.02
MAX_YIELD_S = 0.01  # a launch with 256 rows took up to 7 ms (8B shape, H100)


def hot_path_from_environment(environ: Mapping[str, str]) -> HotPath:
    """All switches on, except those named in TCDEPLOY_HOT_PATH_OFF. Raises UsageError for an unknown name."""
    disabled = [name.strip() for name in environ.get(HOT_PATH_VARIABLE, "").split(",") if name.strip()]
    known = [field.name for field in fields(HotPath)]
    if unknown := [name for name in disabled if name not in known]:
        raise UsageError(f"{HOT_PATH_VARIABLE} contains {unknown[0]!r}", f"known names: {', '.join(known)}")
    return replace(HotPath(), **dict.fromkeys(disabled, False))


def direct_route(
    endpoint: Callable[[Request], Awaitable[Response]], error_response: Callable[[Exception, str], Response]
) -> ASGIApp:
    """`direct_routes`: an ASGI app that calls `endpoint` without Starlette's router and exception middleware.

    Saves the route matching and the two nested exception handlers that Starlette runs around every request. If the
    switch is off, these endpoints are ordinary Starlette routes with the same error responses. A request takes 0.03
    instead of 0.09 ms outside of its endpoint.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await endpoint(Request(scope, receive, send))
        except Exception as error:
            response = error_response(error, scope["path"])
        await response(scope, receive, send)

    return app


def sleep_after_first_token(tokens: Iterable[NewToken]) -> None:
    """`first_token_sleep`: release the GIL for FIRST_TOKEN_SLEEP_S after a step that produced first tokens.

    The engine thread calls it, so that the event loop can send the first tokens at once. If the switch is off, the
    thread goes on to launch the next step, and the event loop waits for Python's switch interval (5 ms) or the next
    call that releases the GIL. Its effect on one client is within the noise.
    """
    if any(token.queue_seconds is not None for token in tokens):  # set on the first token of a request
        time.sleep(FIRST_TOKEN_SLEEP_S)


def seconds_until_launch(due: float | None, hot_path: HotPath) -> float:
    """`delayed_launch`: seconds for which the engine thread accepts requests before it launches the next step.

    `due`: time of the launch, in seconds of time.perf_counter; None: at once. engine/step/launch_timer.py explains why.
    If the switch is off, each step is launched at once, and a new request waits for the step in flight and the next
    one.
    """
    return max(0.0, due - time.perf_counter()) if due is not None and hot_path.delayed_launch else 0.0


def shorten_switch_interval() -> None:
    """`short_switch_interval`: set Python's switch interval to 0.5 ms.

    The engine thread has to launch a step in time while the event loop sends the tokens of the previous one. Each time
    it releases the GIL, it may wait a switch interval to reacquire it. If the switch is off, the default of 5 ms stays.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)


async def wait_for_launch(wait: Callable[[float], Awaitable[None]]) -> None:
    """`wait_for_launch`: after a submit, yield the GIL until the engine has launched a step, or MAX_LAUNCH_WAIT_S.

    The engine thread needs the GIL to launch the prefill, and would compete with the event loop for it. `wait` returns
    when the launch is reported or the time is over. If the switch is off, the event loop prepares the response at once,
    and the first token comes 0.4 ms later.
    """
    await wait(MAX_LAUNCH_WAIT_S)


def yield_to_launch(launch_lock: LaunchLock, hot_path: HotPath) -> None:
    """`yield_to_launch`: block the event loop while the engine thread launches a step, at most MAX_YIELD_S per launch.

    A launch releases the GIL repeatedly. An event loop with tokens to send acquires it each time, for a switch
    interval. With the switch off, a launch with 256 requests at once took 10.7 ms instead of 3.1, and the throughput
    was 4% lower (8B shape, H100, 2026-11-24).
    """
    if hot_path.yield_to_launch:
        launch_lock.wait(MAX_YIELD_S)
