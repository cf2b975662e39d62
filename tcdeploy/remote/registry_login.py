"""Container registry authentication: docker's stored logins, and the Basic and Bearer challenges.

A registry answers 401 with a challenge: Basic, or a Bearer token from a token service, which accepts the same user and
password, or none for a public repository. Logins come from docker's file, $DOCKER_CONFIG/config.json or
~/.docker/config.json: its `auths`, or the helper in `credHelpers` or `credsStore`. The file is never written. Identity
tokens (a refresh token in place of a password, as Azure uses) are not supported.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tcdeploy.remote import retry
from tcdeploy.remote.retry import HttpStatusError

if TYPE_CHECKING:
    from requests import Session

DOCKER_HUB = ("docker.io", "registry-1.docker.io", "index.docker.io")
DOCKER_HUB_AUTH_KEY = "https://index.docker.io/v1/"
MAX_TOKEN_RESPONSE_BYTES = 1 << 20


def stored_login(host: str) -> str | None:
    """The host's user:password in base64, as stored by `docker login`, or None. An invalid file counts as missing."""
    folder = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    keys = (DOCKER_HUB_AUTH_KEY, *DOCKER_HUB) if host in DOCKER_HUB else (host, f"https://{host}", f"http://{host}")
    for key in keys:
        inline = config.get("auths", {}).get(key, {}).get("auth")
        helper = config.get("credHelpers", {}).get(key) or config.get("credsStore")
        login = inline or (_run_credential_helper(helper, key) if helper else None)
        if login:
            return str(login)
    return None


def answer_challenge(session: Session, challenge: str, login: str | None, origin: str) -> str:
    """The Authorization header for a WWW-Authenticate challenge. Raises HttpStatusError(401) without a usable login."""
    scheme, _, parameters = challenge.partition(" ")
    if scheme.lower() == "basic" and login:
        return f"Basic {login}"
    challenge_params = dict(re.findall(r'(\w+)="([^"]*)"', parameters))
    realm = challenge_params.get("realm", "")
    if scheme.lower() != "bearer" or not realm.startswith("https://" if origin.startswith("https://") else "http"):
        raise HttpStatusError(401, f"(unsupported challenge {scheme!r})" if login else "(no login stored for it)")
    return f"Bearer {_fetch_token(session, realm, challenge_params, login)}"


def _fetch_token(session: Session, realm: str, challenge_params: dict[str, str], login: str | None) -> str:
    user, _, password = _decode_login(login).partition(":")
    response = session.get(
        realm,
        params={key: challenge_params[key] for key in ("service", "scope") if key in challenge_params},
        auth=(user, password) if login else None,
        timeout=(retry.CONNECT_TIMEOUT_SECONDS, retry.READ_TIMEOUT_SECONDS),
        stream=True,
    )
    with response:
        if response.status_code != 200:
            raise HttpStatusError(response.status_code, "(from its token service)")
        try:
            document = json.loads(response.raw.read(MAX_TOKEN_RESPONSE_BYTES, decode_content=True))
            return str(document.get("token") or document["access_token"])
        except (ValueError, KeyError, AttributeError) as error:
            raise ConnectionError("the token service returned no token") from error


def _decode_login(login: str | None) -> str:
    try:
        return base64.b64decode(login or "").decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise HttpStatusError(401, "(the login stored by docker is unreadable)") from error


def _run_credential_helper(helper: Any, host: str) -> str | None:
    try:
        completed = subprocess.run(
            [f"docker-credential-{helper}", "get"], input=host, text=True, capture_output=True, check=True,
            timeout=retry.READ_TIMEOUT_SECONDS,
        )  # fmt: skip
        credentials = json.loads(completed.stdout)
        return base64.b64encode(f"{credentials['Username']}:{credentials['Secret']}".encode()).decode()
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return None
