"""Bundles in a container registry: oci://HOST[:PORT]/REPOSITORY, one artifact per bundle.

The bundle is the only layer of an OCI image manifest whose tag is the bundle's name without its suffix; the config is
the empty document. Media types are our own, so a container runtime that is given the tag refuses it.

Blobs are addressed by content and checked by the registry when they arrive, so two jobs that push the same bytes cannot
harm each other. A tag has no exclusive write: it is looked at, then put. Two that pass the look together put manifests
that differ in their time only. What a tag points at is compared by digest, without a download; a registry whose own
disk was tampered with is found out by the pull.

https always, but for loopback hosts and where the URL asks: oci://HOST/REPOSITORY?insecure. Plain requests and not
oras: oras 0.2 gives its requests no timeout, reads a blob into memory to upload it, and retries behind our back.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin

from tcdeploy.errors import IntegrityError, UsageError
from tcdeploy.remote import retry as retry
from tcdeploy.remote.address import BUNDLE_SUFFIX, CHUNK_BYTES, Address, BundleName, parse_bundle_name
from tcdeploy.remote.fsspec_folder import missing_library_error
from tcdeploy.remote.registry_login import answer_challenge, stored_login
from tcdeploy.remote.retry import Deadline, HttpStatusError
from tcdeploy.remote.store import Body, ObjectInfo, StoredBundle

if TYPE_CHECKING:
    from requests import PreparedRequest, Response

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
ARTIFACT_TYPE = "application/vnd.tcdeploy.bundle.v1"
LAYER_TYPE = "application/vnd.tcdeploy.bundle.v1+zstd"
CONFIG_TYPE = "application/vnd.tcdeploy.config.v1+json"
EMPTY_CONFIG = b"{}"
CREATED_ANNOTATION = "org.opencontainers.image.created"
TITLE_ANNOTATION = "org.opencontainers.image.title"
MAX_JSON_BYTES = 4 << 20
MAX_TAG_PAGES = 1000
TAGS_PER_PAGE = 1000
LOOPBACK = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?")


def open_repository(address: Address, deadline: Deadline) -> OciRepository:
    """Raises UsageError for a URL that names no repository, or without the library."""
    host, _, repository = address.host_and_path.partition("/")
    if address.userinfo:
        raise UsageError(f"{address.redacted}: a login does not belong in a URL", f"docker login {host}")
    if address.query not in ("", "insecure"):
        raise UsageError(f"{address.redacted}: the only query of an oci:// URL is ?insecure", "leave it out")
    if not re.fullmatch(r"[a-z0-9]+([._/-]+[a-z0-9]+)*", repository):
        raise UsageError(f"{address.redacted} names no repository", "oci://HOST[:PORT]/REPOSITORY, in lower case")
    try:
        import requests
    except ImportError as error:
        raise missing_library_error(address, "tcdeploy[oci]", str(error)) from error
    plain = address.query == "insecure" or LOOPBACK.fullmatch(host)
    return OciRepository(address, f"{'http' if plain else 'https'}://{host}", repository, requests.Session(), deadline)


class OciRepository:
    """One repository of a registry, and the login that it asked for, kept from one request to the next."""

    def __init__(self, address: Address, origin: str, repository: str, session: Any, deadline: Deadline) -> None:
        self.address, self.origin, self.session, self.deadline = address, origin, session, deadline
        self.repository_url = f"{origin}/v2/{repository}"
        self.authorization = ""

    def stat(self, name: BundleName) -> ObjectInfo | None:
        """None also where the tag stands but its blob is gone: then a push makes it whole."""
        try:
            layer, _ = self._fetch_manifest(name)
            self._request("HEAD", f"{self.repository_url}/blobs/{layer['digest']}").close()
        except HttpStatusError as error:
            if error.status == 404:
                return None
            raise
        return ObjectInfo(layer["size"], layer["digest"].removeprefix("sha256:"))

    @contextlib.contextmanager
    def read(self, name: BundleName) -> Iterator[Body]:
        layer, _ = self._fetch_manifest(name)
        if layer["digest"] != f"sha256:{name.sha256}":
            raise self._damaged_error(name, f"its manifest names {layer['digest']}")
        with self._request("GET", f"{self.repository_url}/blobs/{layer['digest']}") as response:
            yield Body(layer["size"], iter(lambda: response.raw.read1(CHUNK_BYTES), b""))

    def write(self, name: BundleName, file: Path) -> None:
        """Blobs first: a manifest that the registry takes is one that can be pulled."""
        blob, config = f"sha256:{name.sha256}", f"sha256:{hashlib.sha256(EMPTY_CONFIG).hexdigest()}"
        self._put_blob(blob, file)
        self._put_blob(config, EMPTY_CONFIG)
        layer = {
            "mediaType": LAYER_TYPE,
            "digest": blob,
            "size": file.stat().st_size,
            "annotations": {TITLE_ANNOTATION: str(name)},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": ARTIFACT_TYPE,
            "config": {"mediaType": CONFIG_TYPE, "digest": config, "size": len(EMPTY_CONFIG)},
            "layers": [layer],
            "annotations": {CREATED_ANNOTATION: datetime.now(UTC).isoformat(timespec="milliseconds")},
        }
        headers = {"Content-Type": MANIFEST_TYPE}
        self._request("PUT", self._manifest_url(name), json.dumps(manifest).encode(), headers).close()

    def list(self, plan_key: str) -> list[StoredBundle]:
        names = [parse_bundle_name(f"{tag}{BUNDLE_SUFFIX}") for tag in self._list_tags()]
        found = [name for name in names if name and name.plan_key == plan_key]
        return [StoredBundle(name, _created_time(self._fetch_manifest(name)[1])) for name in found]

    def _list_tags(self) -> Iterator[str]:
        url = f"{self.repository_url}/tags/list?n={TAGS_PER_PAGE}"
        for _ in range(MAX_TAG_PAGES):
            try:
                with self._request("GET", url) as response:
                    yield from _read_json(response).get("tags") or []
                    following = response.links.get("next", {}).get("url")
            except HttpStatusError as error:
                if error.status == 404:
                    return
                raise
            if not following:
                return
            url = urljoin(url, following)

    def _fetch_manifest(self, name: BundleName) -> tuple[dict[str, Any], dict[str, str]]:
        """The bundle's layer and the manifest's annotations. Raises Answer, and IntegrityError for another artifact."""
        with self._request("GET", self._manifest_url(name), headers={"Accept": MANIFEST_TYPE}) as response:
            document = _read_json(response)
        try:
            [layer] = document["layers"]
            if layer["mediaType"] != LAYER_TYPE or not isinstance(layer["size"], int):
                raise self._damaged_error(name, f"it holds {layer['mediaType']}")
            return {"digest": str(layer["digest"]), "size": layer["size"]}, document.get("annotations") or {}
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged_error(name, "its manifest is not one of ours") from error

    def _put_blob(self, digest: str, content: Path | bytes) -> None:
        try:
            self._request("HEAD", f"{self.repository_url}/blobs/{digest}").close()
            return
        except HttpStatusError as error:
            if error.status != 404:
                raise
        with self._request("POST", f"{self.repository_url}/blobs/uploads/") as response:
            place = urljoin(f"{self.repository_url}/blobs/uploads/", response.headers.get("Location", ""))
        place += ("&" if "?" in place else "?") + f"digest={digest}"
        self._request("PUT", place, content, {"Content-Type": "application/octet-stream"}).close()

    def _request(
        self, method: str, url: str, content: Path | bytes | None = None, headers: dict[str, str] | None = None
    ) -> Response:
        """One request, and a second when the first is asked who it is. Raises Answer for a status of 400 and more."""
        response = self._request_once(method, url, content, headers)
        if response.status_code == 401:
            with response:
                challenge = response.headers.get("WWW-Authenticate", "")
            login = stored_login(self.origin.partition("//")[2])
            self.authorization = answer_challenge(self.session, challenge, login, self.origin)
            response = self._request_once(method, url, content, headers)
        if response.status_code >= 400:
            with response:
                raise HttpStatusError(response.status_code, _error_code(response))
        return response

    def _request_once(
        self, method: str, url: str, content: Path | bytes | None, headers: dict[str, str] | None
    ) -> Response:
        self.deadline.check()
        with contextlib.ExitStack() as stack:
            data = stack.enter_context(open(content, "rb")) if isinstance(content, Path) else content
            response: Response = self.session.request(
                method,
                url,
                data=data,
                headers={"Accept-Encoding": "identity", **(headers or {})},
                auth=self._authorize,
                stream=True,
                timeout=(retry.CONNECT_TIMEOUT_SECONDS, retry.READ_TIMEOUT_SECONDS),
            )
        return response

    def _authorize(self, request: PreparedRequest) -> PreparedRequest:
        """The login goes to the registry alone, wherever an upload is sent; and no .netrc takes its place."""
        if self.authorization and (request.url or "").startswith(f"{self.origin}/"):
            request.headers["Authorization"] = self.authorization
        return request

    def _manifest_url(self, name: BundleName) -> str:
        return f"{self.repository_url}/manifests/{str(name).removesuffix(BUNDLE_SUFFIX)}"

    def _damaged_error(self, name: BundleName, detail: str) -> IntegrityError:
        where = self.address.child(str(name)).redacted
        return IntegrityError(f"{where} is not the bundle of that name: {detail}", "remove the tag, and push it again")


def _read_json(response: Response) -> dict[str, Any]:
    """A JSON object of bounded size. Raises ConnectionError for anything else."""
    try:
        document = json.loads(response.raw.read(MAX_JSON_BYTES))
        if isinstance(document, dict):
            return document
    except (ValueError, RecursionError) as error:
        raise ConnectionError("its answer is no JSON") from error
    raise ConnectionError("its answer is no JSON object")


def _error_code(response: Response) -> str:
    """The registry's own word for a refusal: DENIED, MANIFEST_INVALID; or nothing."""
    with contextlib.suppress(Exception):  # only a word in a message: whatever stands there, the status is known
        return str(_read_json(response)["errors"][0]["code"])[:60]
    return ""


def _created_time(annotations: dict[str, str]) -> float | None:
    with contextlib.suppress(KeyError, ValueError, TypeError):
        return datetime.fromisoformat(annotations[CREATED_ANNOTATION]).timestamp()
    return None
