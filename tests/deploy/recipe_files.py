"""Reads recipes/deploy: YAML documents, manifests that kustomize renders, and settings of `tcdeploy serve`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from tcdeploy.cli.process import LOGGER_NAME
from tests.conftest import ROOT, TINY
from tests.test_workflows import run_tool

DEPLOY = ROOT / "recipes/deploy"
KUBERNETES = DEPLOY / "kubernetes"
Document = dict[str, Any]


def read_documents(path: Path) -> list[Document]:
    return list(yaml.safe_load_all(path.read_text()))


@functools.cache
def render(folder: Path) -> tuple[Document, ...]:
    """The documents of a kustomization, rendered by the kubectl that the extra `dev` installs."""
    done = run_tool("kubectl", "kustomize", str(folder))
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def of_kind(documents: tuple[Document, ...], kind: str) -> Document:
    [document] = [document for document in documents if document["kind"] == kind]
    return document


def read_variables(lines: str) -> dict[str, str]:
    """NAME=VALUE per line, as systemd and Compose read such a file."""
    pairs = (line.partition("=") for line in lines.splitlines() if line and not line.startswith("#"))
    return {name: value for name, _, value in pairs}


def check_settings(arguments: list[str], variables: dict[str, Any]) -> None:
    """Start `serve` with these flags and variables, and the embedded model, as far as its plan.

    It refuses unknown flags, unknown variables and invalid values.
    """
    from tcdeploy.cli.app import app

    own = {name: str(value) for name, value in variables.items() if name.startswith("TCDEPLOY_")}
    arguments = [TINY if argument.startswith("/") else argument for argument in arguments]  # the model's folder
    own = {name: TINY if name == "TCDEPLOY_MODEL" else value for name, value in own.items()}
    logger = logging.getLogger(LOGGER_NAME)
    level = logger.level
    try:
        result = CliRunner().invoke(app, ["serve", *arguments, "--dry-run", "--json"], env=own)
    finally:
        logger.setLevel(level)  # `serve` has set it, and later tests capture messages of lower levels
    assert result.exit_code == 0, result.exception or result.output


def query_metrics(text: str) -> Iterator[str]:
    """Names of tcdeploy's metrics in PromQL."""
    for word in text.replace("{", " ").replace("(", " ").split():
        if word.startswith("tcdeploy:"):
            yield word.removeprefix("tcdeploy:")
