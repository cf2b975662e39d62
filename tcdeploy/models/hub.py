"""Checks whether the Hub can be reached before transformers requests files from it.

huggingface_hub repeats a failed request five times within 23 s, with two lines on stderr each time. It does that for
each file that is not in its cache, and transformers looks for several files that a model need not have. So this module
sends one request itself. If it gets no answer, the model's files are only looked up in the Hub's cache
(`local_files_only`), where a missing file is an error at once.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

from tcdeploy.models.location import local_folder

RETRY_WAITS_S = (1.0, 2.0)  # a container's network may be ready only moments after the container
NO_ANSWER = "TransportError"  # a base class in httpx, and in httpx2, which newer versions use
UNREACHABLE_S = 30.0  # after which the Hub is asked again
log = logging.getLogger("tcdeploy.models")
_answers: dict[
    tuple[str, str | None], tuple[float, str | None]
] = {}  # when the Hub was asked, and why it is unreachable


def uses_local_files_only(model: str, revision: str | None) -> bool:
    """Whether to read a model's files from this machine only, because the Hub cannot be reached.

    False for a folder, and with HF_HUB_OFFLINE=1, which huggingface_hub obeys itself.
    """
    return not constants.HF_HUB_OFFLINE and not Path(model).is_dir() and not _is_reachable(model, revision)


def _is_reachable(model: str, revision: str | None) -> bool:
    """The answer is kept: for UNREACHABLE_S if it is no."""
    asked_at, reason = _answers.get((model, revision), (0.0, None))
    if reason is None or (reason and time.monotonic() - asked_at > UNREACHABLE_S):
        reason = _reason_unreachable(model, revision)
        _answers[model, revision] = time.monotonic(), reason
        if reason and local_folder(model, revision) is not None:
            log.warning(
                "cannot reach the Hub (%s); the downloaded files of %s are used. HF_HUB_OFFLINE=1 skips this check",
                reason, model,
            )  # fmt: skip
    return not reason


def _reason_unreachable(model: str, revision: str | None) -> str:
    """Empty if the Hub answers, with any status."""
    waits = list(RETRY_WAITS_S)
    while True:
        try:
            get_hf_file_metadata(hf_hub_url(model, "config.json", revision=revision))
        except Exception as error:  # huggingface_hub raises many types
            kinds = {kind.__name__ for kind in type(error).__mro__}
            if NO_ANSWER not in kinds:
                return ""
            if "TimeoutException" in kinds or not waits:  # a timeout takes 10 s
                return str(error) or type(error).__name__
            time.sleep(waits.pop(0))
        else:
            return ""
