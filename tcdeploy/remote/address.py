"""Where a bundle lives: a folder-like URL, the name of a bundle below it, and that URL as it may be shown.

A bundle's name is its content, PLANKEY-SHA256.tcb, so a name that is taken holds either the same bytes or damaged
ones, and whoever pulls can check what came without asking anyone. A URL may carry secrets (user:password@, a signature
in the query); `Address.redacted` leaves them out, and it is the only form that messages use.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from tcdeploy.errors import UsageError

BUNDLE_SUFFIX = ".tcb"
NON_SECRET_QUERIES = ("insecure",)  # a switch, no secret: without it the URL would not work
CHUNK_BYTES = 1 << 20
LOCAL_SCHEMES = ("", "file", "local")
SCHEMES_WITHOUT_USERINFO = (
    *LOCAL_SCHEMES,
    "memory",
    "hf",
    "abfs",
    "abfss",
)  # an @ in these is no login: a path, a revision, an account


class BundleName(NamedTuple):
    """What a bundle is called wherever it is stored."""

    plan_key: str
    sha256: str  # hex

    def __str__(self) -> str:
        return f"{self.plan_key}-{self.sha256}{BUNDLE_SUFFIX}"


def bundle_name_of(file: Path, plan_key: str) -> BundleName:
    """Read the whole file for its digest. Raises UsageError when it cannot be read or the key is none."""
    check_plan_key(plan_key)
    try:
        with open(file, "rb") as opened:
            return BundleName(plan_key, hashlib.file_digest(opened, "sha256").hexdigest())
    except OSError as error:
        raise UsageError(f"the bundle {file} cannot be read: {error.strerror}", "pack one first") from error


def check_plan_key(plan_key: str) -> None:
    if not re.fullmatch("[0-9a-f]{16}", plan_key):
        raise UsageError(
            f"{plan_key!r} is no plan key: 16 digits of 0-9 and a-f", "`warm --json` prints the plan's key"
        )


def parse_bundle_name(text: str) -> BundleName | None:
    """The name's parts, or None where the text names no bundle."""
    match = re.fullmatch(rf"([0-9a-f]{{16}})-([0-9a-f]{{64}}){re.escape(BUNDLE_SUFFIX)}", text)
    return BundleName(match[1], match[2]) if match else None


@dataclass(frozen=True)
class Address:
    """A URL in its parts. `host_and_path` is host and path as one; `userinfo` and `query` may be secret."""

    scheme: str  # "" for a plain path
    userinfo: str
    host_and_path: str
    query: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """Raises UsageError for an empty one, and for what is no URL."""
        match = re.fullmatch(r"(?:([A-Za-z][\w+.:-]*)://)?(.*)", url, re.DOTALL)
        scheme, rest = (match[1] or "").lower() if match else "", match[2] if match else ""
        host_and_path, _, query = (rest, "", "") if scheme in LOCAL_SCHEMES else rest.partition("?")
        host, slash, path = host_and_path.partition("/")
        userinfo, _, host = ("", "", host) if scheme in SCHEMES_WITHOUT_USERINFO else host.rpartition("@")
        host_and_path = host + slash + path
        if scheme not in LOCAL_SCHEMES:
            try:
                urlsplit(f"{scheme}://{host_and_path}")
            except ValueError as error:
                raise UsageError(
                    f"{scheme}://{host_and_path} is no URL: {error}", "such as s3://bucket/folder"
                ) from error
        if not url or (scheme not in (*LOCAL_SCHEMES, "memory") and not host):
            raise UsageError(
                f"{scheme}://{host_and_path} names no place", "a URL such as s3://bucket/folder, or a folder"
            )
        return cls(scheme, userinfo, host_and_path, query)

    @cached_property
    def url(self) -> str:
        """As it was given, secrets and all: for the store, never for a message."""
        return self._format(f"{self.userinfo}@" if self.userinfo else "", self.query)

    @cached_property
    def redacted(self) -> str:
        """Without user, password and query."""
        return self._format("", self.query if self.query in NON_SECRET_QUERIES else "")

    def child(self, name: str) -> Address:
        return Address(self.scheme, self.userinfo, f"{self.host_and_path.rstrip('/')}/{name}", self.query)

    def split(self) -> tuple[Address, BundleName]:
        """The folder and the bundle in it. Raises UsageError when the last part names no bundle."""
        folder, _, last = self.host_and_path.rpartition("/")
        name = parse_bundle_name(last)
        if name is None:
            raise UsageError(
                f"{self.redacted} is no bundle: its last part must be PLANKEY-SHA256{BUNDLE_SUFFIX}",
                "give the URL that push returned, or one that find lists",
            )
        if not folder:
            folder = "/" if self.host_and_path.startswith("/") else "."
        return Address(self.scheme, self.userinfo, folder, self.query), name

    def scrub(self, text: str) -> str:
        """A foreign message without this URL's secrets, or any other URL's."""
        for secret in filter(None, (self.userinfo, *self.userinfo.split(":"), self.query)):
            text = text.replace(secret, "***")
        return re.sub(r"//[^/\s@]*@", "//", re.sub(r"\?[^\s'\"<>)]*", "", text))

    def _format(self, userinfo: str, query: str) -> str:
        return (
            (f"{self.scheme}://" if self.scheme else "")
            + userinfo
            + self.host_and_path
            + (f"?{query}" if query else "")
        )
