"""Translates exceptions of transformers, huggingface_hub and modelling code to errors with the next command.

They raise many types for one fact, such as a missing package, modelling code that cannot be imported, or a model type
that is newer than transformers, often with the fact in the middle of a long text.
"""

from __future__ import annotations

import importlib.util
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import transformers

from tcdeploy.errors import ModelError, NetworkError, TcdeployError, UnknownModelError

# Names on PyPI of modules that are imported under another name. "_" and "-" are the same to pip.
PIP_NAMES = {
    "PIL": "pillow", "cv2": "opencv-python", "sklearn": "scikit-learn", "google": "protobuf", "yaml": "pyyaml",
    "flash_attn": "flash-attn", "causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm", "skimage": "scikit-image",
    "fla": "flash-linear-attention", "bs4": "beautifulsoup4",
}  # fmt: skip
REMOTE_CODE = "transformers_modules"  # the package in which transformers imports code of model repositories
CODE_HINT = "the code may need another version of transformers; TCDEPLOY_DEBUG=1 shows the traceback"
DOWNLOAD_HINT = "download the model again, with all its files"
OFFLINE = (
    r"\b(?:Connect(?:ion)?Error|ConnectTimeout|LocalEntryNotFoundError|OfflineModeIsEnabled): |couldn't connect"
    "|(?i:offline mode)"
)
NO_REPOSITORY, NO_REVISION = r"\bRepositoryNotFoundError: ", r"\bRevisionNotFoundError: "
NO_HUB_ID = r"Repo id must|\bHFValidationError: "
CONVERSION = "issues during automatic conversion"  # it could not stack or split tensors, and names them only in a log
# A pattern of the exceptions' types and texts, the message with the pattern's groups, and the hint.
Causes = tuple[tuple[str, str, str], ...]
HUB_CAUSES: Causes = (
    (r"\bGatedRepoError: ", "{model} is gated", "accept the licence of {model} on the hub, then: hf auth login"),
    (NO_REPOSITORY, "the hub has no model {model}, or it is private",
        "check the id; for a private model: hf auth login"),
    (NO_REVISION, "{model} has no such revision", "leave --revision out for the default branch"),
    (OFFLINE, "{model} is not a local folder, and the hub cannot be reached",
        "check the network, or pass a local folder or builtin:tiny as MODEL"),
)  # fmt: skip
MODEL_CAUSES: Causes = (
    ("model type `(.+?)` but Transformers does not recognize",
        "transformers {version} does not know the model type {0} of {model}",
        "a newer version may: pip install -U transformers; or check model_type in config.json"),
    ("Should have a `model_type` key", "config.json of {model} has no model_type",
        "use the config.json that transformers saved with the model"),
    (r"not appear to have a file named (\S+\.py)\b", "{model} lacks {0}, which auto_map of its config.json names",
        DOWNLOAD_HINT),
    (CONVERSION, "transformers cannot convert the tensors of {model} to those that config.json describes",
        "use the config.json that belongs to these weights, or download the model again"),
)  # fmt: skip
OTHER_CAUSES: Causes = (
    (NO_HUB_ID, "{model} is neither a local folder nor a hub id",
        "check the path, or pass an id such as Qwen/Qwen2.5-7B"),
    ("trust_remote_code", "{model} requires modelling code from its repository",
        "review that code, then: --trust-remote-code"),
    ("Weights only load failed|PytorchStreamReader", "the .bin weights of {model} are damaged, or are not tensors",
        "download them again"),
    # Without \A, a long text would be searched from each of its positions.
    (r"\A(?=[\s\S]*safetensors)[\s\S]*(?:no file named|not appear to have a file named)",
        "{model} has a config but no weights", "--load-format dummy runs it with random weights"),
)  # fmt: skip

ERROR_KINDS: dict[str, type[TcdeployError]] = {
    OFFLINE: NetworkError, NO_REPOSITORY: UnknownModelError, NO_REVISION: UnknownModelError,
    NO_HUB_ID: UnknownModelError,
}  # fmt: skip


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


def translate_error(model: str, error: Exception) -> TcdeployError:
    """The error to raise instead of one of a library. `model`: its name in the message, and a folder or Hub id."""
    return (
        _find_cause(HUB_CAUSES, model, error)
        or recognise(model, error)
        or _find_cause(OTHER_CAUSES, model, error)
        or ModelError(f"{model} cannot be loaded: {first_line(error)}", "TCDEPLOY_DEBUG=1 shows the traceback")
    )


def recognise(model: str, error: BaseException) -> TcdeployError | None:
    """The error for a known problem of the model's files or code; None for any other."""
    chain = list(exception_chain(error))
    if packages := missing_packages(chain):
        return missing_package_error(model, packages)
    return _find_cause(MODEL_CAUSES, model, error) or _failed_files(model, chain) or _failed_code(model, chain)


def _find_cause(causes: Causes, model: str, error: BaseException) -> TcdeployError | None:
    text = " ".join(f"{type(link).__name__}: {link}" for link in exception_chain(error))
    for pattern, message, hint in causes:
        if match := re.search(pattern, text):
            message = message.format(*match.groups(), model=model, version=transformers.__version__)
            return ERROR_KINDS.get(pattern, ModelError)(message, hint.format(model=model))
    return None


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
            message = f"the modelling code of {model} is not valid Python: {link.msg} (line {link.lineno})"
            return ModelError(message, CODE_HINT)
        if lacking := re.search(rf"module '{REMOTE_CODE}\.\S*?(\w+)' has no attribute '(\w+)'", str(link)):
            message = f"{lacking[1]}.py of {model} has no class {lacking[2]}, which auto_map of its config.json names"
            return ModelError(message, DOWNLOAD_HINT)
        frames = [frame for frame in traceback.extract_tb(link.__traceback__) if REMOTE_CODE in frame.filename]
        if imported := [frame for frame in frames if frame.name == "<module>"]:
            where = f"{Path(imported[-1].filename).name}, line {imported[-1].lineno}"
            problem = f"{type(link).__name__}: {first_line(link)} ({where})"
            return ModelError(f"the modelling code of {model} cannot be imported: {problem}", CODE_HINT)
    return None
