"""recipes/deploy/compose: the files are valid and agree on ports, mounts, keys and Grafana's data source."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.recipe_files import DEPLOY, check_settings, read_documents, read_variables
from tests.test_workflows import LINT, run_tool

COMPOSE = DEPLOY / "compose"
PROVISIONING = COMPOSE / "grafana/provisioning"


@pytest.fixture(scope="module")
def variables() -> dict[str, str]:
    return read_variables((COMPOSE / "example.env").read_text())


@pytest.fixture(scope="module")
def services(variables: dict[str, str]) -> Any:
    """The services, with the variables of example.env. Compose would stop at one that is neither set nor optional."""
    text = (COMPOSE / "compose.yaml").read_text()
    for name, value in variables.items():
        for operator in (":?", ":-"):
            before, *parts = text.split(f"${{{name}{operator}")
            text = before + "".join(value + part.partition("}")[2] for part in parts)
    assert "${" not in text, "example.env lacks a variable"
    return yaml.safe_load(text)["services"]


@pytest.mark.parametrize("folder", ["compose", "kubernetes"])
def test_the_yaml_files_are_well_formed(folder: str) -> None:
    rules = LINT.replace("rules: {", "rules: {braces: {max-spaces-inside: 0}, ")
    linted = run_tool("yamllint", "--strict", "-d", rules, str(DEPLOY / folder))
    assert linted.returncode == 0, linted.stdout


def test_compose_yaml_follows_the_schema_of_compose(tmp_path: Path) -> None:
    text = (COMPOSE / "compose.yaml").read_text()
    for name, content, returncode in (("valid", text, 0), ("typo", text.replace("read_only:", "readonly:", 1), 1)):
        (tmp_path / f"{name}.yaml").write_text(content)
        arguments = ("--builtin-schema", "vendor.compose-spec", str(tmp_path / f"{name}.yaml"))
        checked = run_tool("check-jsonschema", *arguments)
        assert checked.returncode == returncode, checked.stdout


def test_docker_accepts_compose_yaml(tmp_path: Path) -> None:
    """Compose's own parser, which also expands the variables."""
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode
    ):
        pytest.skip("docker compose is not installed; the schema of Compose is tested")
    command = ["docker", "compose", "--env-file", str(COMPOSE / "example.env"), "-f", str(COMPOSE / "compose.yaml")]
    done = subprocess.run([*command, "config", "--quiet"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_settings_of_the_server_are_accepted(services: Any) -> None:
    server = services["server"]
    check_settings(server["command"], server["environment"])
    drain_s = float(server["command"][server["command"].index("--drain-timeout") + 1])
    assert float(server["stop_grace_period"].removesuffix("s")) >= drain_s + 10
    [tmp] = server["tmpfs"]
    assert server["read_only"] and "exec" in tmp.split(":")[1].split(","), "packages are loaded from /tmp"


def test_every_file_that_compose_mounts_exists(services: Any) -> None:
    mounts = [mount for service in services.values() for mount in service["volumes"] if mount["type"] == "bind"]
    own = [mount["source"] for mount in mounts if mount["source"].startswith("./")]
    assert len(own) == 3 and all((COMPOSE / source).exists() for source in own)


def test_prometheus_scrapes_the_port_of_the_server_with_its_key(services: Any) -> None:
    [config] = read_documents(COMPOSE / "prometheus.yml")
    [job] = config["scrape_configs"]
    [published] = services["server"]["ports"]
    assert job["static_configs"] == [{"targets": [f"server:{published.rsplit(':', 1)[1]}"]}]
    [secret] = services["prometheus"]["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    [document] = read_documents(COMPOSE / "compose.yaml")
    assert document["secrets"][secret] == {"environment": "TCDEPLOY_API_KEY"}


def test_promtool_accepts_the_configuration_of_prometheus(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool (Debian: apt-get install prometheus) is not installed")
    key, config = tmp_path / "api-key", tmp_path / "prometheus.yml"
    key.touch()
    text = (COMPOSE / "prometheus.yml").read_text().replace("/run/secrets/api-key", str(key))
    for content, returncode in ((text, 0), (text.replace("scrape_interval", "scrape_intervall"), 1)):
        config.write_text(content)
        checked = subprocess.run(["promtool", "check", "config", str(config)], capture_output=True, text=True)
        assert checked.returncode == returncode, checked.stdout + checked.stderr


def test_grafana_finds_prometheus_and_the_dashboard(services: Any) -> None:
    [sources] = read_documents(PROVISIONING / "datasources/prometheus.yaml")
    [source], interval = sources["datasources"], source_interval()
    assert source["url"] == "http://prometheus:9090" and "prometheus" in services
    assert source["jsonData"]["timeInterval"] == interval
    [folders] = read_documents(PROVISIONING / "dashboards/tcdeploy.yaml")
    [provider] = folders["providers"]
    targets = {mount["target"]: mount["source"] for mount in services["grafana"]["volumes"]}
    mounted = targets[f"{provider['options']['path']}/tcdeploy.json"]
    dashboard = json.loads((COMPOSE / mounted).read_text())
    [variable] = [item for item in dashboard["templating"]["list"] if item["type"] == "datasource"]
    assert variable["query"] == source["type"], "the dashboard selects the provisioned data source"
    assert targets[f"/etc/grafana/{PROVISIONING.name}"] == "./grafana/provisioning"


def source_interval() -> str:
    [config] = read_documents(COMPOSE / "prometheus.yml")
    return str(config["global"]["scrape_interval"])
