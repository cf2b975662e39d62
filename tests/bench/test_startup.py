"""`bench startup` with small commands in place of tcdeploy's. tests/start/test_packaged_start.py runs the real ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tcdeploy.bench import startup
from tcdeploy.bench.report import PLAN_FIELDS
from tcdeploy.bench.settings import StartupSettings
from tcdeploy.bench.startup import StartupRow, command, default_environment, recipe_flags, started_server
from tcdeploy.errors import NetworkError, TcdeployError
from tcdeploy.host.progress import NullProgress
from tcdeploy.planning.recipe import Recipe, build_recipe

# A server that is not ready for its first three GETs, and then streams a token, or answers with the status argv[2].
SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    gets = 0

    def answer(self, status, body=b""):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        Handler.gets += 1
        self.answer(503 if Handler.gets <= 3 else 200, b'{"data": [{"id": "m"}]}')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        print(json.dumps(DOCUMENT | {"prompt": body["prompt"], "gets": Handler.gets}), flush=True)
        self.answer(int(sys.argv[2]), b": waiting\\n\\ndata: {}\\n\\n")

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
PLAN = {**dict.fromkeys(PLAN_FIELDS, ""), "buckets": [{"phase": "decode", "size": 4, "min_size": 0}]}
DOCUMENT = {
    "stage_seconds": {"import": 0.0625, "load": 0.0}, "import_seconds": {"torch": 0.8}, "plan": PLAN,
    "weights_read": {"num_bytes": 8, "seconds": 0.6},
}  # fmt: skip


def server(status: int = 200) -> list[str]:
    return [sys.executable, "-c", f"DOCUMENT = {DOCUMENT!r}\n{SERVER}", "{port}", str(status)]


def test_recipe_flags_round_trip_without_those_of_defaults() -> None:
    recipe = Recipe(model="m", batch_sizes=(1, 4), trust_remote_code=True, compile=False, context=64, region="layer")
    words = recipe_flags(recipe)
    assert words == ["--trust-remote-code", "--batch-sizes", "1,4", "--context", "64", "--no-compile"]
    flags = {"model": "m", "trust_remote_code": True, "batch_sizes": words[2], "context": words[4], "compile": False}
    assert build_recipe(flags, environ={}) == recipe


def test_the_commands_are_those_of_the_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCDEPLOY_API_KEY", "secret")
    monkeypatch.setenv("TCDEPLOY_DEBUG", "1")
    assert command("warm", Recipe(model="m"))[1:] == ["-m", "tcdeploy", "warm", "m", "--json"]
    assert "TCDEPLOY_API_KEY" not in default_environment() and default_environment()["TCDEPLOY_DEBUG"] == "1"


def test_the_seconds_of_packages_are_a_stage_of_warm() -> None:
    words = [sys.executable, "-c", f"print({json.dumps({**DOCUMENT, 'packages': {'seconds': 41.5}})!r})"]
    assert startup._measure_warm(words).stage_seconds == {**DOCUMENT["stage_seconds"], "packages": 41.5}


@pytest.fixture
def recipes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Recipe]]:
    """Name and recipe of each command, which the small ones replace."""
    started: list[tuple[str, Recipe]] = []

    def command(name: str, recipe: Recipe, *flags: str) -> list[str]:
        started.append((name, recipe))
        return server() if name == "serve" else [sys.executable, "-c", f"print({json.dumps(DOCUMENT)!r})"]

    monkeypatch.setattr(startup, "command", command)
    return started


def test_warm_and_then_two_starts_of_serve_share_a_temporary_folder(recipes: list[tuple[str, Recipe]]) -> None:
    report = startup.run(Recipe(model="m", cache_dir="mine"), StartupSettings(), NullProgress())
    assert [name for name, _ in recipes] == ["warm", "serve", "serve"]
    [folder] = {recipe.cache_dir for _, recipe in recipes}
    assert folder and folder != "mine" and not Path(folder).exists()
    cold, *warm = [row for row in report.rows if isinstance(row, StartupRow)]
    assert cold.process_seconds and cold.ready_seconds is cold.first_token_seconds is None
    assert cold.stage_seconds == DOCUMENT["stage_seconds"]
    for row in warm:
        assert row.ready_seconds and row.first_token_seconds and row.ready_seconds < row.first_token_seconds
        assert list(row.stage_seconds) == ["import", "load", "other", "first token"]
        assert sum(row.stage_seconds.values()) == pytest.approx(row.first_token_seconds)
        assert row.import_seconds == {"torch": 0.8} and row.weights_seconds == 0.6
    assert report.plan["buckets"] == ["decode:4"]


def test_starts_from_a_filled_cache_use_the_folder_of_the_recipe(recipes: list[tuple[str, Recipe]]) -> None:
    recipe = Recipe(model="m", cache_dir="mine")
    startup.run(recipe, StartupSettings(source="cache", warm_runs=1), NullProgress())
    assert recipes == [("serve", recipe)]


def test_the_first_token_follows_ready(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w+") as out, started_server(server(), range(5, 7), out) as started:
        assert started.process.poll() is None and 0 < started.ready_seconds < started.first_token_seconds
    document = json.loads((tmp_path / "out").read_text())
    assert document["prompt"] == [5, 6] and document["gets"] == 5, "three refused, /ready, /v1/models"
    assert started.process.returncode


@pytest.mark.parametrize(
    ("words", "error", "message", "exit_code"),
    [
        ([sys.executable, "-c", "import sys; sys.exit(7)"], TcdeployError, "ended with exit code 7", 7),
        ([sys.executable, "-c", ""], TcdeployError, "ended with exit code 0", 1),
        (server(400), NetworkError, "HTTP 400", NetworkError.exit_code),
    ],
)
def test_a_server_without_a_token_is_an_error(
    words: list[str], error: type[TcdeployError], message: str, exit_code: int, tmp_path: Path
) -> None:
    with (
        (tmp_path / "out").open("w") as out,
        pytest.raises(error, match=message) as raised,
        started_server(words, [5], out),
    ):
        pass
    assert raised.value.exit_code == exit_code
