"""Bundle addresses: the URL of a folder of bundles, the name of a bundle in it, and the URL without secrets.

A bundle is named after its content, PLANKEY-SHA256.tcb. An existing name therefore holds either the same bytes or
damaged ones, and a pull verifies its bytes against the URL alone. A URL may carry secrets (user:password@, a signature
in the query). `Address.redacted` omits them; messages use no other form.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from tcdeploy.errors import UsageError
from tcdeploy.host.regular_file import open_regular

BUNDLE_SUFFIX = ".tcb"
NON_SECRET_QUERIES = ("insecure",)  # not a secret, and the URL does not work without it
CHUNK_BYTES = 1 << 20
LOCAL_SCHEMES = ("", "file", "local")
# Schemes in which an @ belongs to the path, a revision or an account, not to a login.
SCHEMES_WITHOUT_USERINFO = (*LOCAL_SCHEMES, "memory", "hf", "abfs", "abfss")


@dataclass(frozen=True)
class CacheSource:
    """Where a start fetches its cache from, and which bundles it accepts there."""

    source: str  # path or URL of a bundle, or of a folder of bundles
    allow_unsigned: bool = False  # accept a bundle without a trusted signature; its code runs on this machine
    allow_rollback: bool = False  # accept a bundle that is older than the one it replaces


class BundleName(NamedTuple):
    """A bundle's file name in every store: PLANKEY-SHA256.tcb."""

    plan_key: str
    sha256: str  # hex

    def __str__(self) -> str:
        return f"{self.plan_key}-{self.sha256}{BUNDLE_SUFFIX}"


def bundle_name_of(file: Path, plan_key: str) -> BundleName:
    """Hash the file. Raises UsageError if it cannot be read or `plan_key` is invalid."""
    check_plan_key(plan_key)
    try:
        with open_regular(file, follows_links=True) as content:
            return BundleName(plan_key, hashlib.file_digest(content, "sha256").hexdigest())  # type: ignore[arg-type]  # IO lacks readinto
    except OSError as error:
        raise unreadable_bundle_error(file, error) from error


def unreadable_bundle_error(file: Path, error: OSError) -> UsageError:
    return UsageError(
        f"the bundle {file} cannot be read: {error.strerror}", "create one: tcdeploy cache pack MODEL -o FILE.tcb"
    )


def check_plan_key(plan_key: str) -> None:
    if not re.fullmatch("[0-9a-f]{16}", plan_key):
        raise UsageError(
            f"{plan_key!r} is not a plan key (16 digits of 0-9 and a-f)",
            "list the plans of a cache folder: tcdeploy cache ls FOLDER",
        )


def parse_bundle_name(text: str) -> BundleName | None:
    """The parts of a bundle name, or None if `text` is not one."""
    match = re.fullmatch(rf"([0-9a-f]{{16}})-([0-9a-f]{{64}}){re.escape(BUNDLE_SUFFIX)}", text)
    return BundleName(match[1], match[2]) if match else None


@dataclass(frozen=True)
class Address:
    """The parts of a URL. `userinfo` and `query` may hold secrets."""

    scheme: str  # "" for a plain path
    userinfo: str
    host_and_path: str
    query: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """Raises UsageError for an empty or invalid URL."""
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
                    f"{scheme}://{host_and_path} is not a valid URL: {error}", "a URL such as s3://bucket/folder"
                ) from error
        if not url or (scheme not in (*LOCAL_SCHEMES, "memory") and not host):
            raise UsageError(
                f"{scheme}://{host_and_path} has no host or folder", "a URL such as s3://bucket/folder, or a folder"
            )
        return cls(scheme, userinfo, host_and_path, query)

    @cached_property
    def url(self) -> str:
        """The complete URL with its secrets: for the store, never for a message."""
        return self._format(f"{self.userinfo}@" if self.userinfo else "", self.query)

    @cached_property
    def redacted(self) -> str:
        """The URL without user, password and query."""
        return self._format("", self.query if self.query in NON_SECRET_QUERIES else "")

    def child(self, name: str) -> Address:
        return replace(self, host_and_path=f"{self.host_and_path.rstrip('/')}/{name}")

    def split(self) -> tuple[Address, BundleName]:
        """The folder and the bundle name. Raises UsageError if the last component is not a bundle name."""
        folder, _, last = self.host_and_path.rpartition("/")
        name = parse_bundle_name(last)
        if name is None:
            raise UsageError(
                f"{self.redacted} is not a bundle URL: its last component must be PLANKEY-SHA256{BUNDLE_SUFFIX}",
                "use a URL that `tcdeploy cache push` or `tcdeploy cache find` printed",
            )
        if not folder:
            folder = "/" if self.host_and_path.startswith("/") else "."
        return replace(self, host_and_path=folder), name

    def scrub(self, text: str) -> str:
        """Remove the secrets of this URL, and logins and queries of any URL, from a library's message."""
        for secret in filter(None, (self.userinfo, *self.userinfo.split(":"), self.query)):
            text = text.replace(secret, "***")
        return re.sub(r"//[^/\s@]*@", "//", re.sub(r"\?[^\s'\"<>)]*", "", text))

    def _format(self, userinfo: str, query: str) -> str:
        prefix = f"{self.scheme}://" if self.scheme else ""
        return prefix + userinfo + self.host_and_path + (f"?{query}" if query else "")
