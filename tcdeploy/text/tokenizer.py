"""Loads a model's tokenizer before its weights, so that a model without one fails before it is compiled.

Slow tokenizers are refused, because the detokenizer cannot stream their text. transformers' errors rarely name the
broken file, so the files are checked after a failed load.

`describe_tokenizer` makes the description from which later starts build a tokenizer without transformers
(stored_tokenizer.py). That is impossible if the class of the tokenizer computes something in Python.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tcdeploy.errors import ModelError, TcdeployError
from tcdeploy.models import load_errors
from tcdeploy.models.hub import uses_local_files_only
from tcdeploy.models.json_files import LFS_HINT, LFS_PROBLEM, json_problem
from tcdeploy.models.load import quiet_transformers, resolve_model_path
from tcdeploy.models.location import local_folder
from tcdeploy.planning.plan import Plan
from tcdeploy.planning.recipe import Recipe
from tcdeploy.text.stored_tokenizer import TOKENIZER_FILE, TokenizerRecord, read_backend
from tcdeploy.text.tool_formats import response_template

TOKENIZER_FILES = (TOKENIZER_FILE, "tokenizer_config.json")
# Methods that a storable class may override, because they run only during construction or saving.
CONSTRUCTION_METHODS = {"__init__", "save_vocabulary", "update_post_processor"}


class TokenizerDescription(NamedTuple):
    """Exactly one of `record` and `problem` is set, if there is a tokenizer."""

    record: TokenizerRecord | None
    backend_json: str  # "" if the backend equals the model's tokenizer.json
    problem: str  # why transformers is needed for this tokenizer


def load_tokenizer(source: Plan | Recipe) -> Any:
    """The model's tokenizer. Raises ModelError if it has none, or a slow one, which cannot stream text."""
    try:
        with quiet_transformers():
            path = resolve_model_path(source.model)
            tokenizer = AutoTokenizer.from_pretrained(
                path, revision=source.revision, trust_remote_code=source.trust_remote_code,
                local_files_only=uses_local_files_only(path, source.revision),
            )  # fmt: skip
    except Exception as error:
        raise _translate(source.model, source.revision, error) from error
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(
            f"{source.model} has a slow tokenizer ({type(tokenizer).__name__}), which cannot stream text",
            "use a model with a tokenizer.json",
        )
    return tokenizer


def describe_tokenizer(tokenizer: Any, model_type: str, folder: Path) -> TokenizerDescription:
    """`folder`: of the model's files. `record.backend` is left empty; the caller stores `backend_json`."""
    try:
        _check_storable(tokenizer)
        backend, backend_json = tokenizer.backend_tokenizer, _serialize(tokenizer.backend_tokenizer)
        template = response_template(tokenizer, model_type)
        if not _is_json(template):
            raise ValueError("its response template has values that JSON does not have")
        cleans_bpe = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        is_cleaned_kind = type(backend.model).__name__ != "BPE" or getattr(tokenizer, cleans_bpe, False)
        record = TokenizerRecord(
            class_name=type(tokenizer).__name__,
            backend="",
            special_tokens=tokenizer.special_tokens_map,
            special_ids=tuple(tokenizer.all_special_ids),
            eos_token_id=tokenizer.eos_token_id,
            chat_template=tokenizer.chat_template,
            response_template=template,
            cleans_up_spaces=bool(tokenizer.clean_up_tokenization_spaces and is_cleaned_kind),
        )
        is_in_file = _is_in_file(folder / TOKENIZER_FILE, backend_json)
    except Exception as error:  # of the model's files or of its tokenizer's class; later starts can still load it
        reason = f"{type(tokenizer).__name__} cannot be stored: {load_errors.first_line(error)}"
        return TokenizerDescription(None, "", reason)
    return TokenizerDescription(record, "" if is_in_file else backend_json, "")


def _check_storable(tokenizer: Any) -> None:
    """Raises ValueError with the reason why a tokenizer needs transformers."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError("it is not a tokenizer of the tokenizers library")
    if overridden := overridden_methods(type(tokenizer)):
        raise ValueError(f"it overrides {', '.join(overridden)}")
    if tokenizer.split_special_tokens:
        raise ValueError("it splits special tokens")
    if not _is_json(tokenizer.chat_template):
        raise ValueError("its chat template is not text")


def overridden_methods(kind: type) -> list[str]:
    """Methods and properties of transformers' fast tokenizer that a subclass replaces by its own."""
    classes = kind.__mro__[: kind.__mro__.index(PreTrainedTokenizerFast)]
    members = {name: member for base in classes for name, member in vars(base).items()}
    return sorted(
        name
        for name, member in members.items()
        if hasattr(PreTrainedTokenizerFast, name)
        and (inspect.isroutine(member) or isinstance(member, property))
        and name not in CONSTRUCTION_METHODS
    )


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def _is_in_file(path: Path, backend_json: str) -> bool:
    try:
        return path.is_file() and read_backend(path).to_str() == backend_json
    except ModelError:  # transformers has made the backend of other files
        return False


def _serialize(backend: Tokenizer) -> str:
    """The backend's JSON, without truncation and padding, as `read_backend` reads it. Raises ValueError."""
    try:
        copied = Tokenizer.from_str(backend.to_str())
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError("a part of it is written in Python") from error
    copied.no_truncation()
    copied.no_padding()
    return copied.to_str()


def _translate(model: str, revision: str | None, error: Exception) -> TcdeployError:
    folder = local_folder(resolve_model_path(model), revision)
    if packages := _correct_packages(folder, load_errors.missing_packages(list(load_errors.exception_chain(error)))):
        return load_errors.missing_package_error(f"the tokenizer of {model}", packages)
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()] if folder else []
    for path in files:
        if problem := json_problem(path):
            return ModelError(
                f"{path} {problem}", LFS_HINT if problem == LFS_PROBLEM else "download the tokenizer's files again"
            )
    translated = load_errors.translate_error(model, error)
    if not translated.message.startswith(f"{model} cannot be loaded"):
        return translated
    if any("tokenizer" in str(link).lower() for link in load_errors.exception_chain(error)):
        names = ", ".join(TOKENIZER_FILES)
        return ModelError(f"{model} has no tokenizer that transformers can load", f"add its files: {names}")
    return ModelError(f"the tokenizer of {model} cannot be loaded: {load_errors.first_line(error)}", translated.hint)


def _correct_packages(folder: Path | None, packages: list[str]) -> list[str]:
    """transformers requires tiktoken if SentencePiece is missing. Files of SentencePiece begin with the byte 10."""
    if packages != ["tiktoken"] or folder is None or importlib.util.find_spec("sentencepiece"):
        return packages
    files = [path for path in folder.glob("*.model") if path.is_file()]
    return ["sentencepiece"] if any(path.open("rb").read(1) == b"\n" for path in files) else packages
