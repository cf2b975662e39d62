"""The page at / and /docs: one file, readable in both colour schemes, and usable with an API key."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
import time

import httpx
import pytest

from tcdeploy.server.observe import status
from tcdeploy.server.observe.status import CAPACITY, INTERVAL_S, RecentStats, ServerFigures, StatusHistory
from tests.server.conftest import ServerProcess
from tests.server.test_api import loading_state, send_request
from tests.server.test_figures import FIGURES

MIN_CONTRAST = 4.5  # WCAG 2.2, level AA
SCHEMES = re.findall(r":root \{([^}]*)\}", status.page())
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def _luminance(color: str) -> float:
    """Relative luminance of #rrggbb, as WCAG defines it."""
    channels = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(first: str, second: str) -> float:
    darker, lighter = sorted((_luminance(first), _luminance(second)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", SCHEMES, ids=["light", "dark"])
def test_each_text_color_has_enough_contrast(scheme: str) -> None:
    colors = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", scheme))
    for back in ("back", "panel"):
        for text in ("text", "dim", "good", "bad", "accent"):
            assert _contrast(colors[text], colors[back]) >= MIN_CONTRAST, (text, back)
    assert _contrast(colors["back"], colors["accent"]) >= MIN_CONTRAST, "text of the main button"


def test_colors_come_only_from_the_two_schemes() -> None:
    style = re.findall(r"<style>(.*?)</style>", status.page(), re.DOTALL)[0]
    assert len(SCHEMES) == 2
    assert not re.findall(r"#[0-9a-f]{3,8}\b|rgb|hsl", re.sub(r":root \{[^}]*\}", "", style))


def test_the_page_loads_nothing_from_elsewhere_and_may_run_only_its_own_script() -> None:
    page = status.page()
    addresses = re.findall(r"https?://[^\"'\s)]+", page)
    assert set(addresses) == {"http://www.w3.org/2000/svg"}, "a namespace, which is not loaded"
    assert not re.findall(r"<script [^>]*src|<link(?! rel=\"icon\" href=\"data:,\")|@import|url\(", page)
    assert "innerHTML" not in page and "insertAdjacentHTML" not in page
    script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = status.page_headers(page)["content-security-policy"]
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_the_page_opens_without_the_key_and_its_data_does_not(path: str) -> None:
    state = loading_state(api_keys=("secret",))
    response = send_request(state, "GET", path, None)
    assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert response.headers["content-security-policy"] and response.text == status.page()
    for data in ("/status", "/openapi.json", "/v1/models"):
        assert send_request(state, "GET", data, None).status_code == 401
        assert send_request(state, "GET", data, None, authorization="Bearer secret").status_code != 401


def test_the_history_has_one_sample_per_interval_and_the_newest_are_returned() -> None:
    history, recent = StatusHistory(), RecentStats()
    for number in range(CAPACITY + 3):
        recent.tokens += number
        for seconds in (0.5, 0.25, 0.75) if number == CAPACITY + 2 else ():
            recent.first_tokens += 1
            recent.time_to_first_token.append(seconds)
        history.sample(FIGURES, recent)
    document = history.json(10_000)
    assert (document["end"], len(document["samples"]), document["interval_seconds"]) == (CAPACITY + 3, CAPACITY, 2.0)
    assert document["samples"][0]["tokens_per_second"] == 3 / INTERVAL_S
    assert document["samples"][-1] == {
        "tokens_per_second": (CAPACITY + 2) / INTERVAL_S, "first_token_p50": 0.5, "kv_cache_usage": 0.5,
    }  # fmt: skip
    assert document["samples"][-2]["first_token_p50"] is None
    assert history.json(2)["samples"] == document["samples"][-2:] and history.json(0)["samples"] == []


def test_the_history_of_a_loading_server_has_no_kv_cache() -> None:
    history = StatusHistory()
    history.sample(ServerFigures("tiny", "loading", 1.0, FIGURES.scheduler, {}, None), RecentStats())
    assert history.json(1)["samples"] == [{"tokens_per_second": 0, "first_token_p50": None, "kv_cache_usage": 0}]


@pytest.mark.parametrize("value", ["-1", "x", "1e3", "", "9" * 10])
def test_an_invalid_number_of_samples_is_refused(value: str) -> None:
    response = send_request(loading_state(), "GET", f"/status?history={value}", None)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "history")


def test_a_server_samples_its_history(server: ServerProcess) -> None:
    server.client.completions.create(model="builtin:tiny", prompt="Hello", max_tokens=4)
    while not (history := httpx.get(f"{server.address}/status?history=1").json()["history"])["samples"]:
        time.sleep(0.1)
    assert history["end"] >= 1 and history["samples"][0]["tokens_per_second"] >= 0


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize(("path", "shown"), [("", "prefill:"), ("docs", "POST /v1/chat/completions")])
def test_a_browser_shows_the_page(server: ServerProcess, path: str, shown: str) -> None:
    assert CHROMIUM is not None
    dom = subprocess.run(
        [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom",
         f"{server.address}/{path}"],
        capture_output=True, text=True, timeout=120, check=True,
    ).stdout  # fmt: skip
    assert '<h1 id="model">builtin:tiny</h1>' in dom and 'class="good"' in dom and shown in dom
