"""Retries of remote operations, their deadline, and the classification of storage errors.

Storage libraries share no error classes (botocore, aiohttp, httpx, requests, and OSErrors that fsspec derives from
them). An error is classified by the HTTP status or error code that it or its innermost cause carries, else by its
class: `auth`, `not_found` and `rejected` are final; everything else is `transient` and is tried MAX_ATTEMPTS times.
Pauses double and are jittered, so that jobs that failed together do not retry together. The libraries' own retries are
disabled where possible, since they multiply: s3fs on top of botocore would send 25 requests. Python errors such as
TypeError are bugs and propagate.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, TypeVar

from tcdeploy.errors import NetworkError, SpaceError, TcdeployError
from tcdeploy.host.regular_file import DISK_FULL
from tcdeploy.remote.address import Address

MAX_ATTEMPTS = 4
BACKOFF_SECONDS = 0.5  # before the second attempt; doubles after each; jitter takes off at most half
CONNECT_TIMEOUT_SECONDS = 10.0
READ_TIMEOUT_SECONDS = 30.0  # between two bytes
TOTAL_TIMEOUT_SECONDS = 900.0  # for one push, pull or find; also ends a transfer of one byte per second

ErrorKind = Literal["auth", "not_found", "rejected", "transient"]
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
    "s3": "renew the login: aws sso login, or set fresh AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN",
    "gs": "renew the login: gcloud auth application-default login",
    "gcs": "renew the login: gcloud auth application-default login",
    "hf": "renew the login: hf auth login, or set HF_TOKEN",
    "oci": "renew the login: docker login, with the host of this URL",
    "": "grant this user access: chmod, chown",
    "file": "grant this user access: chmod, chown",
}


class HttpStatusError(Exception):
    """An HTTP error status, raised by tcdeploy's own clients."""

    def __init__(self, status: int, code: str = "") -> None:
        super().__init__(f"{status} {code}".strip())
        self.status, self.error_code = status, code


class ClassifiedError(NamedTuple):
    kind: ErrorKind
    detail: str
    status: int | None = None


class Deadline:
    """The time limit of one push, pull or find, all attempts included."""

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = TOTAL_TIMEOUT_SECONDS if seconds is None else seconds
        self.start = time.monotonic()

    def remaining_seconds(self) -> float:
        """At least 0.1: libraries treat a timeout of 0 as no timeout."""
        return max(0.1, self.start + self.seconds - time.monotonic())

    def check(self) -> None:
        if time.monotonic() >= self.start + self.seconds:
            raise TimeoutError(f"not completed within {self.seconds:g} s")


def with_retries(operation: Callable[[], Result], address: Address, deadline: Deadline) -> Result:
    """Call `operation` until an attempt succeeds. Raises NetworkError, or SpaceError for a full disk."""
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            return operation()
        except TcdeployError:
            raise
        except Exception as error:
            if not _is_library_error(error):
                raise
            failure = classify_error(error)
            pause = BACKOFF_SECONDS * 2 ** (attempt - 1) * random.uniform(0.5, 1)
            is_last = attempt == MAX_ATTEMPTS or deadline.remaining_seconds() <= pause
            if is_last or failure.kind != "transient":
                raise translate_error(error, failure, address, attempt) from error
            time.sleep(pause)
    raise AssertionError("unreachable: the last attempt returns or raises")


def classify_error(error: BaseException) -> ClassifiedError:
    """Classify a storage error by its innermost cause that carries information."""
    for inner in reversed(list(_causes(error))):
        status, code = status_and_code(inner)
        if status is not None or code:
            status_text = f"HTTP {status}" if status else "error"
            return ClassifiedError(_error_kind(status, code), f"{status_text} {code}".rstrip(), status)
        name = type(inner).__name__
        if isinstance(inner, PermissionError) or name in AUTH_CLASSES:
            return ClassifiedError("auth", str(inner) or name)
        if name in REJECTED_CLASSES or getattr(inner, "errno", None) in (errno.EROFS, errno.ENOTDIR, errno.EISDIR):
            return ClassifiedError("rejected", str(inner))
        if isinstance(inner, TimeoutError) or "Timeout" in name:
            return ClassifiedError("transient", str(inner) or f"no response within {READ_TIMEOUT_SECONDS:g} s")
    kind: ErrorKind = "not_found" if isinstance(error, FileNotFoundError) and error.__cause__ is None else "transient"
    return ClassifiedError(kind, f"{type(error).__name__}: {error}")


def status_and_code(error: BaseException) -> tuple[int | None, str]:
    """The HTTP status (or None) and the store's error code (or "") of an error of any supported library."""
    response = getattr(error, "response", None)
    if type(error).__module__ == "aiohttp.http_exceptions":  # aiohttp's parser reports a truncated response as 400
        return None, ""
    if isinstance(response, dict):  # botocore
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode"), response.get("Error", {}).get("Code", "")
    for holder, name in ((error, "status"), (error, "code"), (response, "status_code")):
        status = getattr(holder, name, None)
        if isinstance(status, int):
            return status, getattr(error, "error_code", "")
    return None, ""


def translate_error(error: Exception, failure: ClassifiedError, address: Address, attempts: int) -> TcdeployError:
    """A tcdeploy error for a storage error; its message contains no secrets."""
    detail = address.scrub(" ".join(failure.detail.split()))[:300]
    if getattr(error, "errno", None) in DISK_FULL:
        return SpaceError(f"no space left at {address.redacted}", "free some space there and run again")
    if failure.kind == "auth":
        hint = AUTH_HINTS.get(address.scheme, "renew the login, or request access")
        return NetworkError(
            f"access to {address.redacted} was denied (wrong or expired login, or missing permission): {detail}", hint
        )
    if failure.kind == "not_found":
        return NetworkError(
            f"{address.redacted} does not exist",
            "check the URL; list a plan's bundles: tcdeploy cache find URL --plan KEY",
        )
    if failure.kind == "rejected":
        return NetworkError(
            f"{address.redacted} rejected the request: {detail}", "check the URL and the settings of the store"
        )
    times = "1 attempt" if attempts == 1 else f"{attempts} attempts"
    return NetworkError(
        f"{address.redacted} failed after {times}: {detail}", "check that the store is reachable, then run again"
    )


def _error_kind(status: int | None, code: str) -> ErrorKind:
    bare_400 = (status, code) == (400, "400")  # S3's answer to HEAD with an expired token: no body, so no code
    if status in (401, 403) or code in AUTH_CODES or bare_400:
        return "auth"
    if status in (404, 410):
        return "not_found"
    if status is None or code in TRANSIENT_CODES or status in TRANSIENT_STATUSES or not 400 <= status < 500:
        return "transient"
    return "rejected"


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _is_library_error(error: Exception) -> bool:
    """Whether a library or the operating system raised the error, rather than a bug in tcdeploy."""
    return isinstance(error, OSError | EOFError) or type(error).__module__ != "builtins"
