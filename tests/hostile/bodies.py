"""Hostile request bodies and heads: sends them to a server under load, and measures delays and memory.

The server of the embedded model generates two streams during the attack. CONNECTIONS attackers send bodies and heads
that are random, but reproducible with the seed. A separate client process, the canary, measures the latency of other
clients: it tokenizes a short text repeatedly. (A completion would wait for a decode row: the server has four, and many
attacks are valid requests for a thousand tokens.) A task in the server's process sleeps repeatedly and measures how
late it wakes, which is how long the event loop was blocked.

Other processes compete for the CPU, so each delay is measured in three ways. `wall` is the whole delay. `block`
excludes the time in which the loop's thread was ready to run but had no CPU (/proc/self/task/N/schedstat); it includes
waits for the GIL. `cpu` is the CPU time of that thread between two wake-ups, so it includes only work of the event
loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.conftest import TINY, TINY_FLAGS, cli_command, cli_environment
from tests.server.conftest import ServerProcess, serving

DEFAULT_COUNT = 10_000
CONNECTIONS = 8
RESPONSE_TIMEOUT_S = 60
MAX_CANARY_P99_MS = 100
MAX_LOOP_CPU_MS = 20
MAX_GROWTH_BYTES = 512 << 20  # of the server's resident memory
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT, MESSAGES = '{"max_tokens":1,"prompt":"a",', '{"max_tokens":1,"messages":'  # valid beginnings of hostile bodies
LARGE_SHARE = 0.03  # the share of bodies of 1 to 8 MiB; the others have at most 100 kB

# Runs in the server's process. Every 0.2 s, writes the largest delays so far to a file: [wall, block, cpu] in ms.
INSTRUMENT = """
import asyncio, json, os, threading, time
from tcdeploy.server.http import request_body; from tcdeploy.server import run
from tcdeploy.torch_compat.uvicorn import protocol as uvicorn_protocol
uvicorn_protocol.REQUEST_TIMEOUT_S = request_body.BODY_TIMEOUT_S = 5.0  # incomplete requests do not wait 60 s
run_server = run._Process.run
async def measure(path):
    with open(f"/proc/self/task/{threading.get_native_id()}/schedstat") as schedstat:
        def run_delay():
            schedstat.seek(0)
            return int(schedstat.read().split()[1]) / 1e9
        worst, delays, written = [0.0, 0.0, 0.0], [], time.perf_counter()
        while True:
            start, waited, cpu = time.perf_counter(), run_delay(), time.thread_time()
            await asyncio.sleep(0.002)
            late = time.perf_counter() - start - 0.002
            sample = (late, late - (run_delay() - waited), time.thread_time() - cpu)
            worst = [max(old, new) for old, new in zip(worst, sample)]
            if start - written > 0.2:
                with open(path + ".new", "w") as file:
                    json.dump([1000 * value for value in worst], file)
                os.replace(path + ".new", path)
                written = start
                if os.path.exists(path + ".reset"):
                    os.unlink(path + ".reset")
                    worst = [0.0, 0.0, 0.0]
async def run_measured(self):
    task = asyncio.create_task(measure(PATH))
    try:
        return await run_server(self)
    finally:
        task.cancel()
run._Process.run = run_measured
"""

CANARY = """
import http.client, json, sys, time
host, port = sys.argv[1].split(":")
body = json.dumps({"prompt": "What is a list?"})
connection = http.client.HTTPConnection(host, int(port), timeout=60)
while True:
    start = time.perf_counter()
    connection.request("POST", "/tokenize", body, {"content-type": "application/json"})
    response = connection.getresponse()
    response.read()
    print(response.status, 1000 * (time.perf_counter() - start), flush=True)
    time.sleep(0.02)
"""


def instrument(path: Path) -> str:
    return INSTRUMENT.replace("PATH)", f"{str(path)!r})")


# Bodies. Each attack is a function (source of randomness, size) -> path, body of about `size` bytes.


def repeated(prefix: str, item: str, suffix: str, path: str = COMPLETIONS) -> Callable[[random.Random, int], Any]:
    """Attacks with a long list of equal items."""

    def body(_: random.Random, size: int) -> tuple[str, bytes]:
        return path, (prefix + ",".join([item] * max(1, size // (len(item) + 1))) + suffix).encode()

    return body


def keys(prefix: str, value: str, suffix: str, path: str = COMPLETIONS) -> Callable[[random.Random, int], Any]:
    """Attacks with an object of many keys."""

    def body(_: random.Random, size: int) -> tuple[str, bytes]:
        items = ",".join(f'"k{number}":{value}' for number in range(max(1, size // (len(value) + 9))))
        return path, (prefix + items + suffix).encode()

    return body


def text(source: random.Random, size: int) -> tuple[str, bytes]:
    """A long text that repeats one piece, in one of the fields that contain text."""
    piece = source.choice(
        ["a", "lorem ipsum ", " ", "\n", "\u6f22", "\U0001f469\u200d", "1,", "\\u0041", "\\ud83d\\ude00", "{}<|end|>"]
    )
    content = f'"{piece * (size // len(piece.encode()))}"'.replace("\n", "\\n")
    path, template = source.choice(
        [
            (COMPLETIONS, '{"max_tokens":1,"prompt":%s}'), ("/tokenize", '{"prompt":%s}'),
            ("/tokenize", TEXT + '"x":%s}'),
            (CHAT, MESSAGES + '[{"role":"user","content":%s}]}'),
            (CHAT, MESSAGES + '[{"role":"user","content":[{"type":"text","text":%s}]}]}'),
            (CHAT, MESSAGES + '[{"role":%s,"content":"a"}]}'), (COMPLETIONS, TEXT + '"stop":%s}'),
            (COMPLETIONS, TEXT + '"model":%s}'), (COMPLETIONS, TEXT + '%s:1}'),
            (COMPLETIONS, '{"prompt":["a",%s],"max_tokens":1}'),
        ]
    )  # fmt: skip
    return path, (template % content).encode()


def token_ids(source: random.Random, size: int) -> tuple[str, bytes]:
    """A long list of token ids, valid or invalid, flat or nested."""
    numbers = [str(source.randrange(source.choice([10, 1000, 2**40]))) for _ in range(64)] * (size // 400 + 1)
    flat = "[" + ",".join(numbers) + source.choice(["]", ",true]", ',"a"]', ",1.5]"])
    path, template = source.choice(
        [
            (COMPLETIONS, '{"max_tokens":1,"prompt":%s}'), ("/detokenize", '{"tokens":%s}'),
            (COMPLETIONS, '{"max_tokens":1,"prompt":[%s,[5]]}'), (COMPLETIONS, TEXT + '"stop_token_ids":%s}'),
            (CHAT, MESSAGES + '%s}'), (COMPLETIONS, TEXT + '"unknown":%s}'),
        ]
    )  # fmt: skip
    return path, (template % flat).encode()


def mutated(source: random.Random, size: int) -> tuple[str, bytes]:
    """One of the other bodies, with random edits or truncated."""
    path, body = source.choice(BODIES[:-1])(source, size)
    edited = bytearray(body)
    for _ in range(source.randint(1, 4)):
        at = source.randrange(len(edited) + 1)
        edited[at : at + source.randrange(9)] = source.choice(
            [b"\xff", b'"', b"\\ud800", b"[" * 300, b"}", b"NaN", b""]
        )
    return path, bytes(edited[: source.choice([len(edited), len(edited), len(edited) // 2])])


def costly(source: random.Random, _: int) -> tuple[str, bytes]:
    """A small valid request that causes much work."""
    biases = {str(number): 1 for number in range(source.choice([10, 500]))}
    fields = source.choice(
        [
            {"n": 128}, {"n": 128, "logit_bias": biases, "seed": 1}, {"n": 16, "logprobs": 5},
            {"echo": True, "logprobs": 5},
            {"response_format": {"type": "json_object"}}, {"prompt": ["a"] * 200}, {"prompt": [[5]] * 250, "n": 1},
            {"stop": ["a" * 1000] * 16}, {"max_tokens": 2**62}, {"temperature": 1e308},
            {"prompt": "a" * 5000, "n": 128},
        ]
    )  # fmt: skip
    return COMPLETIONS, json.dumps({"prompt": [5, 6], "max_tokens": 2, **fields}).encode()


TOOL = '{"type":"function","function":{"name":"f"}}'
CALL = '{"function":{"name":"f","arguments":"{}"}}'
SCHEMA = TEXT + '"response_format":{"type":"json_schema","json_schema":{"schema":{"properties":{'
BODIES: list[Callable[[random.Random, int], tuple[str, bytes]]] = [
    text, token_ids, costly, text, token_ids,
    keys(TEXT + '', "1", "}"), keys(TEXT + '"logit_bias":{', '"x"', "}}"),
    keys(SCHEMA, "{}", "}}}}}"),
    repeated('{"prompt":[', "[]", "]}"), repeated('{"prompt":[', '""', "]}"), repeated('{"prompt":[', "[1]", "]}"),
    repeated(TEXT + '"x":[', "{}", "]}"), repeated(TEXT + '"x":[', "1.5", "]}"),
    repeated(TEXT + '"x":[', "9" * 4000, "]}"), repeated(TEXT + '"x":', "[" * 9000, ""),
    repeated(MESSAGES + '[{"role":"user","content":[', '{"type":"text","text":"a"}', "]}]}", CHAT),
    repeated(MESSAGES + '[', '{"role":"user","content":"a"}', "]}", CHAT), repeated(MESSAGES + '[', "1", "]}", CHAT),
    repeated(MESSAGES + '[', '{"role":"user","content":[{"type":"text","text":"a"}]}', "]}", CHAT),
    repeated(MESSAGES + '[{"role":"user","content":"a"}],"tools":[', TOOL, "]}", CHAT),
    repeated(MESSAGES + '[{"role":"assistant","tool_calls":[', CALL, "]}]}", CHAT),
    repeated(MESSAGES + '[{"role":"user","content":"a"}],"chat_template_kwargs":{"x":[', "[1]", "]}}", CHAT),
    repeated(TEXT + '"stop":[', '"a"', "]}"), repeated('{"prompt":', " " * 999, ""), mutated, mutated,
]  # fmt: skip


# Heads


def post(path: str, body: bytes, *lines: str) -> bytes:
    head = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", *lines]
    if not any(line.lower().startswith(("content-length", "transfer-encoding")) for line in lines):
        head.append(f"content-length: {len(body)}")
    return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + body


def chunked(parts: list[bytes], trailers: bytes = b"", extension: bytes = b"") -> bytes:
    chunks = b"".join(b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in parts)
    return post("/tokenize", chunks + b"0\r\n" + trailers + b"\r\n", "transfer-encoding: chunked")


def hostile_head(source: random.Random) -> bytes:
    tokenize = b'{"prompt":"a"}'
    many = source.choice([100, 5_000, 30_000])
    length = source.choice(
        ["-1", "9223372036854775807", "18446744073709551616", "1e3", "5, 6", "+5", "0x10", "", "8388609"]
    )
    heads: list[Callable[[], bytes]] = [
        lambda: post("/tokenize", tokenize, f"content-length: {length}"),
        lambda: post("/tokenize", tokenize, "content-length: 14", f"content-length: {length}"),
        lambda: post("/tokenize", tokenize, "content-length: 14", "transfer-encoding: chunked"),
        lambda: post("/tokenize", tokenize, "transfer-encoding: " + source.choice(["gzip", "chunked, gzip", "x"])),
        lambda: post("/tokenize", tokenize, *[f"h{n}: v" for n in range(many)]),
        lambda: post("/tokenize", tokenize, *["a:"] * many),
        lambda: post("/tokenize", tokenize, "x-long: " + "a" * many * 4),
        lambda: post("/tokenize?" + "a" * many * 4, tokenize),
        lambda: post("/" + "%41" * many, tokenize),
        lambda: post("/tokenize", tokenize, "x-request-id: " + "\xff\t" * (many % 30_000)),
        lambda: post("/tokenize", tokenize, "expect: 100-continue", "connection: upgrade", "upgrade: websocket"),
        lambda: chunked([tokenize], b"".join(b"t%d: %s\r\n" % (n, b"v" * 50) for n in range(many))),
        lambda: chunked([tokenize], b"t: " + b"v" * many * 4 + b"\r\n"),
        lambda: chunked([bytes([byte]) for byte in b'{"prompt":"' + b"a" * many + b'"}']),
        lambda: chunked([tokenize], extension=b";x=" + b"y" * many * 4),
        lambda: b"GET /version HTTP/1.1\r\n\r\n" * (many // 10),
        lambda: b"\r\n" * many,
        lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        lambda: b"\x16\x03\x01\x02\x00" + source.randbytes(500),
        lambda: source.randbytes(source.randrange(1, 3000)),
        lambda: b"BREW /tokenize HTTP/1.1\r\n\r\n",
        lambda: b"GET /tokenize HTTP/9.9\r\nhost: x\r\n\r\n",
        lambda: b"GET http://[:: HTTP/1.1\r\nhost: x\r\n\r\n",
        lambda: post("/tokenize", tokenize)[: source.randrange(1, 90)],
    ]
    return source.choice(heads)()


def attack(source: random.Random) -> bytes:
    """One attack: the bytes to send on a new connection."""
    if source.random() < 0.3:
        return hostile_head(source)
    size = (
        source.randrange(1 << 20, 8 << 20)
        if source.random() < LARGE_SHARE
        else source.choice([100, 3_000, 20_000, 100_000])
    )
    return post(*source.choice(BODIES)(source, size))


# The run


async def send(address: tuple[str, int], data: bytes, aborts: bool) -> str:
    """Send `data` on a new connection. Returns the first response's status, or what happened instead.

    `aborts`: close the connection without waiting for a response.
    """
    reader, writer = await asyncio.open_connection(*address)
    try:
        async with asyncio.timeout(RESPONSE_TIMEOUT_S):
            writer.write(data)
            if aborts:
                return "cut"
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            response = await reader.read(1 << 16)
            status = response.split(b" ", 2)[1:2]
            while status and status[0] >= b"400" and not response.endswith(b"}"):  # the body may be in another packet
                part = await reader.read(1 << 16)
                if not part:
                    break
                response += part
            return outcome(response, status)
    except ConnectionError:
        return "closed"
    except TimeoutError:
        return "no response"
    finally:
        writer.transport.abort()


def outcome(response: bytes, status: list[bytes]) -> str:
    """The status, with a remark if an error response has no OpenAI error object."""
    if not response:
        return "closed"
    code = status[0].decode("latin-1")
    if int(code) >= 400:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            body = json.loads(response.partition(b"\r\n\r\n")[2])
            if set(body["error"]) == {"message", "type", "param", "code"}:
                return code
        return f"{code} without an error object"
    return code


async def attack_all(address: tuple[str, int], source: random.Random, count: int, statuses: Counter[str]) -> list[str]:
    """Run the attacks, count their `statuses`, and return those that were not answered correctly."""
    numbers, failures = iter(range(count)), []

    async def attacker() -> None:
        for number in numbers:
            data = await asyncio.to_thread(attack, source)
            status = await send(address, data, aborts=source.random() < 0.05)
            statuses[status] += 1
            is_server_error = status[0] == "5" and status not in ("501", "503")
            if is_server_error or "without" in status or status == "no response":
                failures.append(f"{number}: {status}: {data[:200]!r}")

    await asyncio.gather(*(attacker() for _ in range(CONNECTIONS)))
    return failures


@contextlib.contextmanager
def canary(address: str) -> Iterator[list[tuple[int, float]]]:
    """Send short /tokenize requests from another process. Yields a list that receives (status, latency in ms)."""
    command = [sys.executable, "-c", CANARY, address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    samples: list[tuple[int, float]] = []
    assert process.stdout is not None
    lines = process.stdout
    reader = threading.Thread(
        target=lambda: samples.extend((int(line.split()[0]), float(line.split()[1])) for line in lines), daemon=True
    )
    reader.start()
    try:
        yield samples
    finally:
        process.kill()
        process.wait()
        reader.join(5)


@contextlib.contextmanager
def background_streams(server: ServerProcess, count: int = 2) -> Iterator[None]:
    """Run `count` clients that each read one stream after another."""
    stop = threading.Event()
    body = json.dumps({"prompt": [5, 6], "max_tokens": 300, "ignore_eos": True, "stream": True}).encode()

    def read_streams() -> None:
        while not stop.is_set():
            with server.connect() as connection, contextlib.suppress(OSError):
                connection.sendall(post(COMPLETIONS, body, "connection: close"))
                while not stop.is_set() and connection.recv(1 << 16):
                    pass

    threads = [threading.Thread(target=read_streams, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def attack_server(
    server: ServerProcess,
    figures: Path,
    source: random.Random,
    count: int,
    max_loop_cpu_ms: float = MAX_LOOP_CPU_MS,
) -> dict[str, Any]:
    """Attack a server that was started with `instrument(figures)`."""
    host, port = server.address.removeprefix("http://").split(":")
    statuses: Counter[str] = Counter()
    peak = before = server.resident_bytes
    is_done = threading.Event()

    def watch_memory() -> None:
        nonlocal peak
        while not is_done.wait(0.05):
            peak = max(peak, server.resident_bytes)

    watcher = threading.Thread(target=watch_memory)
    begin = time.monotonic()
    with background_streams(server), canary(f"{host}:{port}") as samples:
        baseline_ms, baseline_p99_ms = measure_without_attack(figures, samples)
        num_baseline = len(samples)
        watcher.start()
        failures = asyncio.run(attack_all((host, int(port)), source, count, statuses))
        canary_samples = list(samples[num_baseline:])
        time.sleep(0.5)
        worst_ms = json.loads(figures.read_text())
    is_done.set()
    watcher.join()
    idle_seconds = server.wait_until_idle(60)
    time.sleep(1)
    latencies = [ms for _, ms in canary_samples]
    kinds = ("wall", "block", "cpu")
    result: dict[str, Any] = {
        "attacks": count,
        "seconds": round(time.monotonic() - begin),
        "statuses": dict(sorted(statuses.items())),
        "loop_delay_ms": dict(zip(kinds, (round(ms, 1) for ms in worst_ms), strict=True)),
        "loop_delay_ms_without_attack": dict(zip(kinds, (round(ms, 1) for ms in baseline_ms), strict=True)),
        "rss_mib": {"before": before >> 20, "highest": peak >> 20, "after": server.resident_bytes >> 20},
        "canary": "POST /tokenize, 15 characters",
        "canary_statuses": dict(Counter(str(status) for status, _ in canary_samples)),
        "canary_count": len(latencies),
        "canary_ms": {f"p{share}": round(percentile(latencies, share / 100), 1) for share in (50, 90, 99, 100)},
        "canary_p99_ms_without_attack": round(baseline_p99_ms, 1),
        "connections_left": open_connections(server),
        "idle_after_s": round(idle_seconds, 1),
    }
    result["succeeded"] = failures + exceeded_limits(result, server, max_loop_cpu_ms)
    return result


def measure_without_attack(figures: Path, samples: list[tuple[int, float]]) -> tuple[list[float], float]:
    """The largest delays of the event loop and the canary's p99, in ms, during 2.5 s without an attack.

    Then resets the delays.
    """
    time.sleep(1)
    figures.with_name(figures.name + ".reset").touch()
    start = len(samples)
    time.sleep(2.5)
    delays, p99 = json.loads(figures.read_text()), percentile([ms for _, ms in samples[start:]], 0.99)
    figures.with_name(figures.name + ".reset").touch()
    time.sleep(0.5)
    return delays, p99


def exceeded_limits(result: dict[str, Any], server: ServerProcess, max_loop_cpu_ms: float) -> list[str]:
    problems = []
    if result["loop_delay_ms"]["cpu"] > max_loop_cpu_ms:
        problems.append(f"the event loop used {result['loop_delay_ms']['cpu']} ms of CPU time between two wake-ups")
    if result["rss_mib"]["highest"] - result["rss_mib"]["before"] > MAX_GROWTH_BYTES >> 20:
        problems.append(f"the server's memory grew by over {MAX_GROWTH_BYTES >> 20} MiB: {result['rss_mib']}")
    if server.process.poll() is not None:
        problems.append("the server exited")
    if result["connections_left"] > 2:
        problems.append(f"{result['connections_left']} connections are open after the attack")
    if set(result["canary_statuses"]) - {"200", "503"}:
        problems.append(f"the canary got the statuses {result['canary_statuses']}")
    return problems


def open_connections(server: ServerProcess) -> int:
    """Established TCP connections of the server's port."""
    port = int(server.address.rsplit(":", 1)[1])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(1 for row in rows if int(row[1].split(":")[1], 16) == port and row[3] == "01")


def run(source: random.Random, count: int) -> dict[str, Any]:
    """Start a server and attack it. A p99 of the canary above MAX_CANARY_P99_MS counts as a successful attack."""
    with tempfile.TemporaryDirectory() as folder:
        home, cache, figures = Path(folder), Path(folder) / "cache", Path(folder) / "figures.json"
        warm = [*cli_command("warm", TINY, *TINY_FLAGS, "--programs", "jit", "--cache-dir", str(cache))]
        subprocess.run(
            warm, env=cli_environment(home), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        with serving(home, cache, script=instrument(figures)) as server:
            result = attack_server(server, figures, source, count)
    if result["canary_ms"]["p99"] > MAX_CANARY_P99_MS:
        result["succeeded"].append(f"the canary's p99 is {result['canary_ms']['p99']} ms")
    return result
