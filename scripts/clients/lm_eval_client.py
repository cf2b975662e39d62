"""lm-eval's local-completions on a task of two questions, which needs no download."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import MODEL, MODEL_FOLDER, URL, check, run_checks

folder = Path(tempfile.mkdtemp())
QUESTIONS = [
    {"question": "A list is", "choices": [" a sequence", " a number"], "answer": 0},
    {"question": "A dict is", "choices": [" a mapping", " a number"], "answer": 0},
]
(folder / "data.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
(folder / "task.yaml").write_text(
    f"""task: local_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder / "data.jsonl"}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
"""
)


@check("completions: log-likelihoods of a prompt")
def evaluate() -> None:
    arguments = f"model={MODEL},base_url={URL}/v1/completions,tokenizer={MODEL_FOLDER},tokenized_requests=True"
    command = [
        str(Path(sys.executable).parent / "lm_eval"), "run", "--model", "local-completions", "--model_args", arguments,
        "--tasks", "local_choice", "--include_path", str(folder), "--output_path", str(folder / "results"),
    ]  # fmt: skip
    completed = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert completed.returncode == 0, completed.stderr[-800:]
    [path] = (folder / "results").rglob("results_*.json")
    assert 0 <= json.loads(path.read_text())["results"]["local_choice"]["acc,none"] <= 1


run_checks()
