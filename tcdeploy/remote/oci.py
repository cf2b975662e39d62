"""Bundles in a container registry: oci://HOST[:PORT]/REPOSITORY, one artifact per bundle.

The bundle is the only layer of an OCI image manifest. The tag is the bundle's name without its suffix, and the config
is the empty document. The media types are tcdeploy's own, so a container runtime rejects the artifact.

A registry verifies blobs by their digest on upload, so concurrent pushes of the same bytes cannot harm each other. Tags
have no exclusive write: a push checks the tag, then puts it. Two pushes that pass the check at once put manifests that
differ only in their timestamp. A push compares an existing tag by digest, without downloading it; if the registry's
storage was tampered with, the pull detects it.

https, except for loopback hosts and URLs with ?insecure. Uses requests instead of oras: oras 0.2 sends requests without
a timeout, reads a blob into memory to upload it, and retries on its own.
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
from tcdeploy.remote import retry
from tcdeploy.remote.address import BUNDLE_SUFFIX, CHUNK_BYTES, Address, BundleName, parse_bundle_name
from tcdeploy.remote.fsspec_folder import missing_library_error
from tcdeploy.remote.registry_login import answer_challenge, stored_login
from tcdeploy.remote.retry import Deadline, HttpStatusError
from tcdeploy.remote.store import Body, ObjectInfo, RemoteBundle

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
    """Raises UsageError for an invalid repository URL or if `requests` is not installed."""
    host, _, repository = address.host_and_path.partition("/")
    if address.userinfo:
        raise UsageError(f"{address.redacted}: credentials are not allowed in an oci:// URL", f"docker login {host}")
    if address.query not in ("", "insecure"):
        raise UsageError(f"{address.redacted}: an oci:// URL accepts no query except ?insecure", "remove it")
    if not re.fullmatch(r"[a-z0-9]+([._/-]+[a-z0-9]+)*", repository):
        raise UsageError(
            f"{address.redacted} has no valid repository name", "use oci://HOST[:PORT]/REPOSITORY, in lower case"
        )
    try:
        import requests
    except ImportError as error:
        raise missing_library_error(address, "oci", str(error)) from error
    scheme = "http" if address.query == "insecure" or LOOPBACK.fullmatch(host) else "https"
    return OciRepository(address, f"{scheme}://{host}", repository, requests.Session(), deadline)


class OciRepository:
    """One repository of a registry. Keeps its Authorization header between requests."""

    def __init__(self, address: Address, origin: str, repository: str, session: Any, deadline: Deadline) -> None:
        self.address, self.origin, self.session, self.deadline = address, origin, session, deadline
        self.repository_url = f"{origin}/v2/{repository}"
        self.authorization = ""

    def stat(self, name: BundleName) -> ObjectInfo | None:
        """None also if the tag exists but its blob does not, so that a push repairs it."""
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
            raise self._damaged_error(name, f"its manifest refers to {layer['digest']}")
        with self._request("GET", f"{self.repository_url}/blobs/{layer['digest']}") as response:
            yield Body(layer["size"], iter(lambda: response.raw.read1(CHUNK_BYTES), b""))

    def write(self, name: BundleName, file: Path) -> None:
        """Upload blobs before the manifest: a manifest that the registry accepts can be pulled."""
        blob, config = f"sha256:{name.sha256}", f"sha256:{hashlib.sha256(EMPTY_CONFIG).hexdigest()}"
        self._put_blob(blob, file)
        self._put_blob(config, EMPTY_CONFIG)
        layer = {"mediaType": LAYER_TYPE, "digest": blob, "size": file.stat().st_size}
        manifest = {
            "schemaVersion": 2, "mediaType": MANIFEST_TYPE, "artifactType": ARTIFACT_TYPE,
            "config": {"mediaType": CONFIG_TYPE, "digest": config, "size": len(EMPTY_CONFIG)},
            "layers": [{**layer, "annotations": {TITLE_ANNOTATION: str(name)}}],
            "annotations": {CREATED_ANNOTATION: datetime.now(UTC).isoformat(timespec="milliseconds")},
        }  # fmt: skip
        headers = {"Content-Type": MANIFEST_TYPE}
        self._request("PUT", self._manifest_url(name), json.dumps(manifest).encode(), headers).close()

    def list(self, plan_key: str) -> list[RemoteBundle] | None:
        try:
            names = [parse_bundle_name(f"{tag}{BUNDLE_SUFFIX}") for tag in self._list_tags()]
        except HttpStatusError as error:
            if error.status == 404:  # the repository does not exist
                return None
            raise
        plan_names = [name for name in names if name and name.plan_key == plan_key]
        return [RemoteBundle(name, _created_time(self._fetch_manifest(name)[1])) for name in plan_names]

    def _list_tags(self) -> Iterator[str]:
        url = f"{self.repository_url}/tags/list?n={TAGS_PER_PAGE}"
        for _ in range(MAX_TAG_PAGES):
            with self._request("GET", url) as response:
                yield from _read_json(response).get("tags") or []
                next_url = response.links.get("next", {}).get("url")
            if not next_url:
                return
            url = urljoin(url, next_url)

    def _fetch_manifest(self, name: BundleName) -> tuple[dict[str, Any], dict[str, str]]:
        """The layer and the annotations of a bundle's manifest. Raises HttpStatusError and IntegrityError."""
        with self._request("GET", self._manifest_url(name), headers={"Accept": MANIFEST_TYPE}) as response:
            document = _read_json(response)
        try:
            [layer] = document["layers"]
            if layer["mediaType"] != LAYER_TYPE or not isinstance(layer["size"], int):
                raise self._damaged_error(name, f"its layer has media type {layer['mediaType']}")
            return {"digest": str(layer["digest"]), "size": layer["size"]}, document.get("annotations") or {}
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged_error(name, "its manifest does not describe a bundle") from error

    def _put_blob(self, digest: str, content: Path | bytes) -> None:
        try:
            self._request("HEAD", f"{self.repository_url}/blobs/{digest}").close()
            return
        except HttpStatusError as error:
            if error.status != 404:
                raise
        with self._request("POST", f"{self.repository_url}/blobs/uploads/") as response:
            upload_url = urljoin(f"{self.repository_url}/blobs/uploads/", response.headers.get("Location", ""))
        upload_url += ("&" if "?" in upload_url else "?") + f"digest={digest}"
        self._request("PUT", upload_url, content, {"Content-Type": "application/octet-stream"}).close()

    def _request(
        self, method: str, url: str, content: Path | bytes | None = None, headers: dict[str, str] | None = None
    ) -> Response:
        """Send a request; log in and repeat it after a 401. Raises HttpStatusError for a status of 400 or above."""
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
                method, url, data=data, headers={"Accept-Encoding": "identity", **(headers or {})},
                auth=self._authorize, stream=True, timeout=(retry.CONNECT_TIMEOUT_SECONDS, retry.READ_TIMEOUT_SECONDS),
            )  # fmt: skip
        return response

    def _authorize(self, request: PreparedRequest) -> PreparedRequest:
        """Send the login to the registry only, not to upload hosts. Also keeps requests from using .netrc."""
        if self.authorization and (request.url or "").startswith(f"{self.origin}/"):
            request.headers["Authorization"] = self.authorization
        return request

    def _manifest_url(self, name: BundleName) -> str:
        return f"{self.repository_url}/manifests/{str(name).removesuffix(BUNDLE_SUFFIX)}"

    def _damaged_error(self, name: BundleName, detail: str) -> IntegrityError:
        url = self.address.child(str(name)).redacted
        return IntegrityError(f"{url} does not match its name: {detail}", "delete the tag and push the bundle again")


def _read_json(response: Response) -> dict[str, Any]:
    """Read a JSON object of bounded size. Raises ConnectionError for anything else."""
    try:
        document = json.loads(response.raw.read(MAX_JSON_BYTES))
        if isinstance(document, dict):
            return document
    except (ValueError, RecursionError) as error:
        raise ConnectionError("the response is not JSON") from error
    raise ConnectionError("the response is not a JSON object")


def _error_code(response: Response) -> str:
    """The registry's error code, such as DENIED or MANIFEST_INVALID, or an empty string."""
    with contextlib.suppress(Exception):  # only refines a message: the status is known
        return str(_read_json(response)["errors"][0]["code"])[:60]
    return ""


def _created_time(annotations: dict[str, str]) -> float | None:
    with contextlib.suppress(KeyError, ValueError, TypeError):
        return datetime.fromisoformat(annotations[CREATED_ANNOTATION]).timestamp()
    return None
