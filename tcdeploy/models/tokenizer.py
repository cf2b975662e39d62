"""Loads a model's tokenizer before its weights, so that a model without one fails before it is compiled.

Slow tokenizers are refused, because the detokenizer cannot stream their text. transformers' errors rarely name the
broken file, so the files are checked after a failed load.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tcdeploy.errors import ModelError, TcdeployError
from tcdeploy.models.checkpoint import model_folder
from tcdeploy.models.config_file import LFS_HINT, LFS_PROBLEM, json_problem
from tcdeploy.models.load import quiet_transformers, resolve_model_path, translate_error
from tcdeploy.models.load_errors import exception_chain, first_line, missing_package_error, missing_packages
from tcdeploy.planning.plan import Plan
from tcdeploy.planning.recipe import Recipe

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def load_tokenizer(source: Plan | Recipe) -> Any:
    """The model's tokenizer. Raises ModelError if it has none, or a slow one, which cannot stream text."""
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(
                resolve_model_path(source.model), revision=source.revision, trust_remote_code=source.trust_remote_code
            )
    except Exception as error:
        raise _translate(source.model, source.revision, error) from error
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(
            f"{source.model} has a slow tokenizer ({type(tokenizer).__name__}), which cannot stream text",
            "use a model with a tokenizer.json",
        )
    return tokenizer


def tokenizer_stop_ids(tokenizer: Any) -> tuple[int, ...]:
    """The id of the tokenizer's `eos_token`; () if it has none."""
    token_id = tokenizer.eos_token_id
    return () if token_id is None else (token_id,)


def _translate(model: str, revision: str | None, error: Exception) -> TcdeployError:
    folder = model_folder(resolve_model_path(model), revision)
    if packages := _correct_packages(folder, missing_packages(list(exception_chain(error)))):
        return missing_package_error(f"the tokenizer of {model}", packages)
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()] if folder else []
    for path in files:
        if problem := json_problem(path):
            return ModelError(
                f"{path} {problem}", LFS_HINT if problem == LFS_PROBLEM else "download the tokenizer's files again"
            )
    translated = translate_error(model, error)
    if not translated.message.startswith(f"{model} cannot be loaded"):
        return translated
    if any("tokenizer" in str(link).lower() for link in exception_chain(error)):
        names = ", ".join(TOKENIZER_FILES)
        return ModelError(f"{model} has no tokenizer that transformers can load", f"add its files: {names}")
    return ModelError(f"the tokenizer of {model} cannot be loaded: {first_line(error)}", translated.hint)


def _correct_packages(folder: Path | None, packages: list[str]) -> list[str]:
    """`packages`, corrected: transformers asks for tiktoken if SentencePiece is not installed.

    A SentencePiece model is a protobuf message that starts with its first field, the byte 10.
    """
    if packages != ["tiktoken"] or folder is None or importlib.util.find_spec("sentencepiece"):
        return packages
    files = [path for path in folder.glob("*.model") if path.is_file()]
    return ["sentencepiece"] if any(path.open("rb").read(1) == b"\n" for path in files) else packages
