"""Recognises common causes of a failed load in the exceptions of transformers and of modelling code.

A missing package, modelling code that cannot be imported, a model type that is newer than transformers, and invalid
values in config.json are raised as many types, often with the fact in the middle of a long text. `recognise` returns a
ModelError with the cause and the command that fixes it, or None.
"""

from __future__ import annotations

import importlib.util
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import transformers

from tcdeploy.errors import ModelError

# Names on PyPI of modules that are imported under another name. "_" and "-" are the same to pip.
PIP_NAMES = {
    "PIL": "pillow", "cv2": "opencv-python", "sklearn": "scikit-learn", "google": "protobuf", "yaml": "pyyaml",
    "flash_attn": "flash-attn", "causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm", "skimage": "scikit-image",
    "fla": "flash-linear-attention", "bs4": "beautifulsoup4",
}  # fmt: skip
REMOTE_CODE = "transformers_modules"  # the package in which transformers imports code of model repositories
CODE_HINT = "the code may need another version of transformers; TCDEPLOY_DEBUG=1 shows the traceback"
DOWNLOAD_HINT = "download the model again, with all its files"


def exception_chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, with the second if the first ends in a colon."""
    lines = [line.strip() for line in str(error).strip().split("\n")]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return text[:300] or type(error).__name__


def recognise(model: str, error: BaseException) -> ModelError | None:
    """The error to raise instead of `error`. `model`: the name in the message, and a folder or Hub id."""
    chain = list(exception_chain(error))
    text = " ".join(str(link) for link in chain)
    if packages := missing_packages(chain):
        return missing_package_error(model, packages)
    if unknown := re.search(r"model type `(.+?)` but Transformers does not recognize", text):
        return ModelError(
            f"transformers {transformers.__version__} does not know the model type {unknown[1]} of {model}",
            "a newer version may: pip install -U transformers; or check model_type in config.json",
        )
    if "Should have a `model_type` key" in text:
        return ModelError(
            f"config.json of {model} has no model_type", "use the config.json that transformers saved with the model"
        )
    if lacking := re.search(r"not appear to have a file named (\S+\.py)\b", text):
        return ModelError(f"{model} lacks {lacking[1]}, which auto_map of its config.json names", DOWNLOAD_HINT)
    if is_failed_conversion(error):
        return ModelError(
            f"transformers cannot convert the tensors of {model} to those that config.json describes",
            "use the config.json that belongs to these weights, or download the model again",
        )
    return _failed_files(model, chain) or _failed_code(model, chain)


def is_failed_conversion(error: BaseException) -> bool:
    """Whether transformers could not stack or split tensors of a checkpoint. It names them only in a log message."""
    return "issues during automatic conversion" in str(error)


def missing_package_error(model: str, packages: list[str]) -> ModelError:
    names = " ".join(PIP_NAMES.get(package, package) for package in packages)
    verb = "is" if len(packages) == 1 else "are"
    return ModelError(f"{model} requires {' and '.join(packages)}, which {verb} not installed", f"pip install {names}")


def missing_packages(chain: list[BaseException]) -> list[str]:
    """Modules that an import lacks, or packages that transformers asks for."""
    for link in chain:
        text = str(link)
        if names := re.search(r"packages that were not found in your environment: (.+?)\. Run", text):
            return names[1].split(", ")
        if not isinstance(link, ImportError):
            continue
        if module := re.search(r"No module named '(\w+)", text):
            # a missing part of an installed package is not a missing package
            return [] if importlib.util.find_spec(module[1]) else [module[1]]
        if pip_name := re.search(r"pip install (?:-U |--upgrade )?([\w.-]*\w)", text):
            return [pip_name[1]]
        if library := re.search(r"requires the (\w+) library but it was not found", text):
            return [library[1].lower()]
    return []


def _failed_files(model: str, chain: list[BaseException]) -> ModelError | None:
    """The error of an index that lacks a key, or of a weight file that is missing, found only while loading."""
    for link in chain:
        functions = {frame.name for frame in traceback.extract_tb(link.__traceback__)}
        if isinstance(link, KeyError) and "get_checkpoint_shard_files" in functions:
            return ModelError(f"the index of the weight files of {model} has no {link.args[0]}", DOWNLOAD_HINT)
        if isinstance(link, FileNotFoundError) and str(link.filename).endswith((".bin", ".safetensors")):
            return ModelError(f"{model} lacks {Path(link.filename).name}", DOWNLOAD_HINT)
    return None


def _failed_code(model: str, chain: list[BaseException]) -> ModelError | None:
    """The error of modelling code that fails while it is imported, or lacks the class that auto_map names."""
    for link in chain:
        if isinstance(link, SyntaxError):
            return ModelError(
                f"the modelling code of {model} is not valid Python: {link.msg} (line {link.lineno})", CODE_HINT
            )
        if lacking := re.search(rf"module '{REMOTE_CODE}\.\S*?(\w+)' has no attribute '(\w+)'", str(link)):
            return ModelError(
                f"{lacking[1]}.py of {model} has no class {lacking[2]}, which auto_map of its config.json names",
                DOWNLOAD_HINT,
            )
        frames = [frame for frame in traceback.extract_tb(link.__traceback__) if REMOTE_CODE in frame.filename]
        imported = [frame for frame in frames if frame.name == "<module>"]
        if imported:
            where = f"{Path(imported[-1].filename).name}, line {imported[-1].lineno}"
            problem = f"{type(link).__name__}: {first_line(link)} ({where})"
            return ModelError(f"the modelling code of {model} cannot be imported: {problem}", CODE_HINT)
    return None
