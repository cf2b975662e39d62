"""The text for a bug report has versions and findings, and no secrets, names of users or hosts, or paths of home."""

from __future__ import annotations

import socket
from dataclasses import asdict, replace

import pytest

from tcdeploy import __version__
from tcdeploy.doctor import report
from tcdeploy.doctor.report import bug_report, redact
from tcdeploy.doctor.result import Request, finding, ok
from tcdeploy.doctor.torch_probe import TorchProbe
from tests.machines import H100


@pytest.fixture(autouse=True)
def someone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/data/people/ada")
    monkeypatch.setattr(report, "_user_name", lambda: "ada")
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-box-7")


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("/data/people/ada/.cache/tcdeploy", "~/.cache/tcdeploy"),
        ("/data/people/adalbert/x", "/data/people/adalbert/x"),
        ("/home/bob/models: no file", "/home/USER/models: no file"),
        ("/scratch/ada/models", "/scratch/USER/models"),
        ("on gpu-box-7 and gpu-box-77", "on HOST and gpu-box-77"),
        ("it belongs to the user bob, and", "it belongs to the user NAME, and"),
        ("s3://key:secret@bucket/x", "s3://bucket/x"),
        ("https://host/x?signature=abc next", "https://host/x?... next"),
        ("torch has metadata", "torch has metadata"),
    ],
)
def test_names_and_secrets_are_replaced(text: str, redacted: str) -> None:
    assert redact(text) == redacted


def test_the_report_names_variables_but_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "HF_TOKEN": "hf_abcdef", "TCDEPLOY_API_KEY": "sk-123", "TCDEPLOY_MODEL": "/data/people/ada/model",
        "HTTPS_PROXY": "http://ada:pw@proxy.corp:3128", "TORCHINDUCTOR_MAX_AUTOTUNE": "1", "OTHER": "private-value",
        "TCDEPLOY_SERVICE_HOST": "10.1.2.3", "PYTHONPATH": f"/{'x' * 90}:/data/people/ada/y", "HF_ENDPOINT": "https://hub.corp",
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    cache = replace(finding("the cache folder /data/people/ada/.cache cannot be written", "cure"), check="cache folder")
    sections = {
        "environment": asdict(H100), "torch": {"version": "2.13.0+cu130", "cuda": "13.0"},
        "driver": {"gpus": [{"driver_version": "580.95.05"}]},
    }  # fmt: skip
    text = bug_report(
        Request(run_probe=lambda: TorchProbe(sections, {})), [cache, replace(ok("2 cores"), check="host")]
    )
    for hidden in (
        "hf_abcdef",
        "sk-123",
        "/data",
        "ada",
        "corp",
        "private-value",
        "10.1.2.3",
        "OTHER",
        "gpu-box",
    ):
        assert hidden not in text, hidden
    for shown in (
        f"tcdeploy {__version__}, CPython 3.", "TORCHINDUCTOR_MAX_AUTOTUNE=1", "HF_TOKEN is set",
        "TCDEPLOY_API_KEY is set",
        "TCDEPLOY_MODEL=~/model", "HTTPS_PROXY is set", "; 2 cores", "torch: 2.13.0+cu130, CUDA 13.0",
        "GPU: NVIDIA H100 80GB HBM3; driver 580.95.05",
        "finding: cache folder: the cache folder ~/.cache cannot be written",
    ):  # fmt: skip
        assert shown in text, shown
