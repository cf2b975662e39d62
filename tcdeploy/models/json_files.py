"""Reads JSON files of a model, and recognises Git LFS pointers. Imports no model library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tcdeploy.errors import ModelError

LFS_POINTER = "version https://git-lfs"
LFS_PROBLEM, LFS_HINT = "is a Git LFS pointer, not the file itself", "git lfs pull"
HINT = "download the model again, or correct the file"


def read_json_object(path: Path) -> dict[str, Any]:
    """Raises ModelError."""
    if problem := json_problem(path):
        raise ModelError(f"{path} {problem}", LFS_HINT if problem == LFS_PROBLEM else HINT)
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


def json_problem(path: Path) -> str:
    """Why a file is not a JSON object: a phrase that follows its name; "" if it is one."""
    try:
        text = path.read_text(encoding="utf-8")
        if text.startswith(LFS_POINTER):
            return LFS_PROBLEM
        return "" if isinstance(json.loads(text), dict) else "is not a JSON object"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        return f"is not JSON: {error}" if path.stat().st_size else "is empty"
