"""GitHub's workflows and actions: valid, pinned by digest, no secret or write permission where code is unreviewed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT, RunCLI

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
ACTIONS = sorted((ROOT / ".github/actions").glob("*/action.yml"))
FORMS = [ROOT / ".github/ISSUE_TEMPLATE" / name for name in ("bug.yml", "feature.yml")]
FORM_SETTINGS = ROOT / ".github/ISSUE_TEMPLATE/config.yml"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINT = "{extends: default, rules: {line-length: {max: 120}, truthy: {check-keys: false}, document-start: disable,"
LINT += " comments: {min-spaces-from-content: 1}}}"
Job = dict[str, Any]


def jobs(workflow: Path) -> dict[str, Job]:
    loaded: dict[str, Job] = yaml.safe_load(workflow.read_text())["jobs"]
    return loaded


ALL_JOBS = [pytest.param(job, id=f"{path.stem}-{name}") for path in WORKFLOWS for name, job in jobs(path).items()]


def run_tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program that a package of the development requirements contains."""
    return subprocess.run([Path(sys.executable).parent / name, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize(
    "check",
    [
        ("yamllint", "--strict", "-d", LINT, str(ROOT / ".github")),
        ("check-jsonschema", "--builtin-schema", "vendor.github-actions", *map(str, ACTIONS)),
        ("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *map(str, WORKFLOWS)),
        ("check-jsonschema", "--builtin-schema", "vendor.github-issue-forms", *map(str, FORMS)),
        ("check-jsonschema", "--builtin-schema", "vendor.github-issue-config", str(FORM_SETTINGS)),
        ("zizmor", "--offline", "--quiet", "--no-progress", "--strict-collection", str(ROOT / ".github")),
    ],
    ids=["yamllint", "action schema", "workflow schema", "form schema", "form settings", "zizmor"],
)
def test_the_linters_find_nothing(check: tuple[str, ...]) -> None:
    done = run_tool(*check)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_linters_find_an_invalid_action_and_an_injected_expression(tmp_path: Path) -> None:
    text = ACTIONS[0].read_text()
    (tmp_path / "action.yml").write_text(text.replace("using: composite", "using: magic"))
    check = ("check-jsonschema", "--builtin-schema", "vendor.github-actions", str(tmp_path / "action.yml"))
    assert run_tool(*check).returncode == 1
    injected = text.replace('WARM"', '{{ inputs.warm }}"').replace("run: |", "run: |\n        echo ${{ inputs.warm }}")
    (tmp_path / "action.yml").write_text(injected)
    found = run_tool("zizmor", "--offline", "--no-progress", str(tmp_path / "action.yml"))
    assert found.returncode != 0 and "template-injection" in found.stdout


@pytest.mark.parametrize("path", [*WORKFLOWS, *ACTIONS, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_actions_of_others_are_pinned_by_digest_with_the_version_beside_it(path: Path) -> None:
    pinned = re.compile(r"[\w.-]+(/[\w.-]+)+@([0-9a-f]{40} # v\d+\.\d+\.\d+|DIGEST # vVERSION)")
    used = [line.strip() for line in re.findall(r"^[ -]*uses: *(.+)$", path.read_text(), re.MULTILINE)]
    assert not [line for line in used if not line.startswith("./") and not pinned.fullmatch(line)]


@pytest.mark.parametrize("job", ALL_JOBS)
def test_secrets_and_write_permissions_are_only_in_jobs_with_an_environment(job: Job) -> None:
    text = yaml.dump(job)
    if "environment" not in job:
        assert not re.search(r"secrets\b|github\.token", text) and job["permissions"] == {"contents": "read"}
    assert not re.search(r"\$\{\{", " ".join(step.get("run", "") for step in job["steps"]))
    checkouts = [step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_a_report_of_a_bug_asks_for_the_findings_of_doctor_and_the_plan() -> None:
    """They are not required, because an installation may fail before either can run."""
    parts = {part["id"]: part for part in yaml.safe_load(FORMS[0].read_text())["body"] if "id" in part}
    assert "tcdeploy doctor --json" in str(parts["doctor"]) and "--dry-run" in str(parts["plan"])
    assert [name for name, part in parts.items() if part.get("validations", {}).get("required")] == ["problem"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_the_default_token_has_no_permission_and_forks_get_no_secret(workflow: Path) -> None:
    document = yaml.safe_load(workflow.read_text())
    triggers = document[True]  # YAML 1.1 reads the key `on` as true
    assert document["permissions"] == {} and "env" not in document
    assert not set(triggers) & {"pull_request_target", "workflow_run", "issue_comment"}


def test_bundles_are_signed_only_on_main_after_the_warm_job() -> None:
    (workflow,) = (path for path in WORKFLOWS if path.stem == "prewarm")
    warm, publish = jobs(workflow)["warm"], jobs(workflow)["publish"]
    assert publish["needs"] == "warm" and publish["environment"] == "compile-caches"
    assert "github.ref == 'refs/heads/main' && github.event_name != 'pull_request'" in publish["if"]
    assert "github.event.pull_request.head.repo.full_name == github.repository" in warm["if"]
    assert "github.ref == 'refs/heads/main' && 'gpu-main' || 'gpu-unreviewed'" in warm["runs-on"]["group"]
    signing = [step for step in publish["steps"] if "sign-and-push" in step["uses"]]
    assert [step["with"]["key"] for step in signing] == ["${{ secrets.TCDEPLOY_SIGNING_KEY }}"]
    assert (ROOT / "recipes/llama-3.1-8b.yaml").exists()


def test_bundles_for_other_gpus_are_signed_only_on_main_and_not_after_a_failed_start() -> None:
    (workflow,) = (path for path in WORKFLOWS if path.stem == "prewarm-without-gpu")
    build, verify, publish = (jobs(workflow)[name] for name in ("build", "verify", "publish"))
    on_main = "github.ref == 'refs/heads/main' && github.event_name != 'pull_request'"
    assert build["runs-on"] == "ubuntu-24.04" and "if" not in build, "also for pull requests of forks"
    assert verify["if"] == f"vars.TCDEPLOY_GPU_RUNNERS && {on_main}" and verify["runs-on"]["group"] == "gpu-main"
    assert publish["environment"] == "compile-caches" and set(publish["needs"]) == {"build", "verify"}
    needed = (
        "!cancelled() && needs.build.result == 'success' && "
        """contains(fromJSON('["success", "skipped"]'), needs.verify.result)"""
    )
    assert publish["if"] == f"{needed} && {on_main}"
    assert build["strategy"]["matrix"] == publish["strategy"]["matrix"]
    names = [
        step["with"]["name"] for job in (build, verify, publish) for step in job["steps"] if "artifact@" in step["uses"]
    ]
    assert names == ["bundle-${{ matrix.gpu }}"] * 3, "built, read by the start, signed"


def test_the_bundles_for_other_gpus_have_plans_that_fit_the_gpus(run_cli: RunCLI) -> None:
    (workflow,) = (path for path in WORKFLOWS if path.stem == "prewarm-without-gpu")
    build, verify = jobs(workflow)["build"], jobs(workflow)["verify"]
    arguments = {
        step["with"]["warm"] for job in (build, verify) for step in job["steps"] if "actions/prewarm" in step["uses"]
    }
    (warm,) = arguments  # the start must be of the plan that was built
    for gpu in build["strategy"]["matrix"]["gpu"]:
        shape = str(ROOT / "scripts/configs/llama-3.1-8b")  # the recipe's model is not in the repository
        planned = run_cli("warm", shape, *warm.split(), "--target-gpu", gpu, "--dry-run", "--json")
        assert planned.returncode == 0, planned.stderr
        assert json.loads(planned.stdout)["findings"] == [], gpu


@pytest.mark.parametrize("job", ALL_JOBS)
def test_the_workflows_pass_inputs_that_the_actions_declare(job: Job) -> None:
    for step in job["steps"]:
        if step.get("uses", "").startswith("./"):
            declared = yaml.safe_load((ROOT / step["uses"] / "action.yml").read_text())["inputs"]
            assert set(step["with"]) <= set(declared)
            assert {name for name, item in declared.items() if item.get("required")} <= set(step["with"])


@pytest.mark.parametrize("action", ACTIONS, ids=lambda path: path.parent.name)
def test_the_steps_of_the_actions_have_no_expression_in_a_script(action: Path) -> None:
    steps = yaml.safe_load(action.read_text())["runs"]["steps"]
    assert steps and all(step["shell"] == "bash" and "${{" not in step["run"] for step in steps)
