"""A small OpenAI-like server that records its requests and streams one event per token, on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tcdeploy.bench import serving
from tcdeploy.bench.serve_settings import ServeSettings
from tcdeploy.bench.serving import ServeRow

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
MODELS = b'{"data": [{"id": "fake"}]}'


@dataclass
class FakeServer:
    """`token_seconds` is the time per token. More than `max_running` requests at a time wait for each other."""

    token_seconds: float = 0.001
    max_running: int = 1000
    bodies: list[dict[str, Any]] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)  # arrival and end of each request, s

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.lower().split(b"\r\n")
                lengths = [int(line.split()[1]) for line in lines if line.startswith(b"content-length")]
                body = await reader.readexactly(sum(lengths))
                if head.startswith(b"GET"):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(MODELS) + MODELS)
                else:
                    await self._complete(json.loads(body), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        arrival = time.perf_counter()
        self.bodies.append(body)
        writer.write(HEAD)
        async with self._slots:
            for _ in range(body["max_tokens"]):
                await asyncio.sleep(self.token_seconds)
                self._send(writer, {"choices": [{"text": "a"}]})
        usage = {
            "completion_tokens": body["max_tokens"],
            "prompt_tokens": len(body["prompt"]),
            "prompt_tokens_details": {"cached_tokens": len(body["prompt"]) // 2},
        }
        self._send(writer, {"choices": [], "usage": usage})
        writer.write(b"0\r\n\r\n")
        self.spans.append((arrival, time.perf_counter()))

    @staticmethod
    def _send(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        data = b"data: " + json.dumps(event).encode() + b"\n\n"
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    async def start(self) -> tuple[asyncio.Server, str]:
        self._slots = asyncio.Semaphore(self.max_running)
        server = await asyncio.start_server(self, "127.0.0.1", 0)
        return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def run_load(fake: FakeServer, **settings: Any) -> list[ServeRow]:
    """The rows of a load on `fake`, with client and server in one event loop."""

    async def run() -> list[ServeRow]:
        server, url = await fake.start()
        rows = await serving.run_load(ServeSettings(url=url, **settings))
        server.close()
        return rows

    with asyncio.Runner(loop_factory=serving.LOOP_FACTORY) as runner:
        return runner.run(run())


@contextlib.contextmanager
def run_in_thread(fake: FakeServer) -> Iterator[str]:
    """The server's URL, for clients in other event loops and processes."""
    loop = asyncio.new_event_loop()
    server, url = loop.run_until_complete(fake.start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        loop.close()
