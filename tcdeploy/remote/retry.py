"""How often a remote is asked again, for how long, and what its errors mean.

The storage libraries share no class of errors (botocore, aiohttp, httpx, requests, and OSErrors that fsspec makes of
them), so an error is judged by the HTTP status or the code that it or its innermost cause carries, and else by its
class. Four verdicts: a login is refused or has expired, nothing is there, the request is refused: none of these gets
better by asking again. All else may pass, and is tried ATTEMPTS times, with pauses that double and jitter, so that jobs
which failed together do not come back together. The libraries' own retries are switched off where they let us: theirs
multiply with ours, and s3fs with botocore under it would ask 25 times. Errors of Python itself (a TypeError) are ours,
and pass through.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, TypeVar

from tcdeploy.errors import NetworkError, SpaceError, TcdeployError
from tcdeploy.remote.address import Address

MAX_ATTEMPTS = 4
BACKOFF_SECONDS = 0.5  # before the second attempt; each later pause doubles, and jitter halves it at most
CONNECT_TIMEOUT_SECONDS = 10.0
READ_TIMEOUT_SECONDS = 30.0  # without a byte
TOTAL_TIMEOUT_SECONDS = 900.0  # all attempts of one push, pull or find: a reader of one byte a second ends too

ErrorKind = Literal["login", "missing", "refused", "passing"]
Result = TypeVar("Result")

AUTH_CODES = frozenset(
    "ExpiredToken ExpiredTokenException InvalidToken TokenRefreshRequired InvalidAccessKeyId SignatureDoesNotMatch "
    "AccessDenied RequestTimeTooSkewed InvalidClientTokenId".split()
)
AUTH_CLASSES = frozenset(
    "NoCredentialsError PartialCredentialsError CredentialRetrievalError TokenRetrievalError SSOTokenLoadError "
    "UnauthorizedSSOTokenError ProfileNotFound DefaultCredentialsError RefreshError LocalTokenNotFoundError".split()
)
TRANSIENT_CODES = frozenset("RequestTimeout RequestTimeoutException SlowDown ConditionalRequestConflict".split())
TRANSIENT_STATUSES = (408, 409, 425, 429)
REJECTED_CLASSES = frozenset("ParamValidationError InvalidURL InvalidSchema SSLCertVerificationError".split())
AUTH_HINTS = {
    "s3": "log in again: aws sso login, or set fresh AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN",
    "gs": "log in again: gcloud auth application-default login",
    "gcs": "log in again: gcloud auth application-default login",
    "hf": "log in again: hf auth login, or set HF_TOKEN",
    "oci": "log in again: docker login, with the host of this URL",
    "": "let this user read and write there: chmod, chown",
    "file": "let this user read and write there: chmod, chown",
}


class HttpStatusError(Exception):
    """A store answered with an HTTP status that is no success; for clients of our own."""

    def __init__(self, status: int, code: str = "") -> None:
        super().__init__(f"{status} {code}".strip())
        self.status, self.error_code = status, code


class ClassifiedError(NamedTuple):
    kind: ErrorKind
    detail: str
    status: int | None = None


class Deadline:
    """The moment after which nothing is tried or waited for."""

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = TOTAL_TIMEOUT_SECONDS if seconds is None else seconds
        self.start = time.monotonic()

    def remaining_seconds(self) -> float:
        """Seconds, never below a tenth: a library takes 0 for no limit."""
        return max(0.1, self.start + self.seconds - time.monotonic())

    def is_expired(self) -> bool:
        return time.monotonic() >= self.start + self.seconds

    def check(self) -> None:
        if self.is_expired():
            raise TimeoutError(f"not done within {self.seconds:g} s")


def with_retries(work: Callable[[], Result], address: Address, deadline: Deadline) -> Result:
    """The work's result, from the first attempt that gives one. Raises NetworkError, or SpaceError for a full disk."""
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            return work()
        except TcdeployError:
            raise
        except Exception as error:
            if not _is_library_error(error):
                raise
            failure = classify_error(error)
            pause = BACKOFF_SECONDS * 2 ** (attempt - 1) * random.uniform(0.5, 1)
            last = attempt == MAX_ATTEMPTS or deadline.remaining_seconds() <= pause
            if last or failure.kind != "passing":
                raise translate_error(error, failure, address, attempt) from error
            time.sleep(pause)
    raise AssertionError("unreachable: the last attempt returns or raises")


def classify_error(error: BaseException) -> ClassifiedError:
    """What an error of a store means, by its innermost cause that says something."""
    for inner in reversed(list(_causes(error))):
        status, code = status_and_code(inner)
        if status is not None or code:
            return ClassifiedError(_error_kind(status, code), f"it answered {status or ''} {code}".rstrip(), status)
        name = type(inner).__name__
        if isinstance(inner, PermissionError) or name in AUTH_CLASSES:
            return ClassifiedError("login", str(inner) or name)
        if name in REJECTED_CLASSES or getattr(inner, "errno", None) in (errno.EROFS, errno.ENOTDIR, errno.EISDIR):
            return ClassifiedError("refused", str(inner))
        if isinstance(inner, TimeoutError) or "Timeout" in name:
            return ClassifiedError("passing", str(inner) or f"no answer within {READ_TIMEOUT_SECONDS:g} s")
    kind: ErrorKind = "missing" if isinstance(error, FileNotFoundError) and error.__cause__ is None else "passing"
    return ClassifiedError(kind, f"{type(error).__name__}: {error}")


def status_and_code(error: BaseException) -> tuple[int | None, str]:
    """The HTTP status and the store's own code of an error, of whichever library; None and "" where it has none."""
    response = getattr(error, "response", None)
    if type(error).__module__ == "aiohttp.http_exceptions":  # its parser calls an answer that was cut a 400
        return None, ""
    if isinstance(response, dict):  # botocore
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode"), response.get("Error", {}).get("Code", "")
    for holder, name in ((error, "status"), (error, "code"), (response, "status_code")):
        status = getattr(holder, name, None)
        if isinstance(status, int):
            return status, getattr(error, "error_code", "")
    return None, ""


def translate_error(error: Exception, failure: ClassifiedError, address: Address, attempts: int) -> TcdeployError:
    """Our error for a store's, in words that hold no secret."""
    detail = address.scrub(" ".join(failure.detail.split()))[:300]
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return SpaceError(f"no room at {address.redacted}", "free some room there, and run again")
    if failure.kind == "login":
        hint = AUTH_HINTS.get(address.scheme, "log in again, or ask for access")
        return NetworkError(f"{address.redacted} lets nobody in with this login, wrong or expired: {detail}", hint)
    if failure.kind == "missing":
        return NetworkError(
            f"nothing is there: {address.redacted}", "check the address; find lists the bundles of a plan"
        )
    if failure.kind == "refused":
        return NetworkError(f"{address.redacted} refuses the request: {detail}", "check the address and its settings")
    times = "once" if attempts == 1 else f"{attempts} times"
    return NetworkError(
        f"{address.redacted} did not answer as it should, tried {times}: {detail}", "run again when it does"
    )


def _error_kind(status: int | None, code: str) -> ErrorKind:
    bare_400 = (status, code) == (400, "400")  # S3 to a HEAD with an expired token: no body, so no code either
    if status in (401, 403) or code in AUTH_CODES or bare_400:
        return "login"
    if status in (404, 410):
        return "missing"
    if status is None or code in TRANSIENT_CODES or status in TRANSIENT_STATUSES or not 400 <= status < 500:
        return "passing"
    return "refused"


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _is_library_error(error: Exception) -> bool:
    """An error of a library or of the system below it, not of our own programming."""
    return isinstance(error, OSError | EOFError) or type(error).__module__ != "builtins"
