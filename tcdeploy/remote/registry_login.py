"""Who we are to a container registry: docker's stored logins, and the two challenges that registries make.

A registry answers 401 and says what it wants: Basic, or a Bearer token from a realm, which takes the same user and
password, or none for a public repository. They come from docker's own file, $DOCKER_CONFIG/config.json or
~/.docker/config.json: its `auths`, or the helper named by `credHelpers` or `credsStore`. Nothing is written there, and
identity tokens (a refresh token in place of a password, as Azure's) are not spoken.
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

from tcdeploy.remote import retry as retry
from tcdeploy.remote.retry import HttpStatusError

if TYPE_CHECKING:
    from requests import Session

DOCKER_HUB = ("docker.io", "registry-1.docker.io", "index.docker.io")
DOCKER_HUB_AUTH_KEY = "https://index.docker.io/v1/"
MAX_TOKEN_RESPONSE_BYTES = 1 << 20


def stored_login(host: str) -> str | None:
    """The host's user:password in base64, as docker login left it, or None. A file that is none counts as none."""
    folder = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    for key in (
        (DOCKER_HUB_AUTH_KEY, *DOCKER_HUB) if host in DOCKER_HUB else (host, f"https://{host}", f"http://{host}")
    ):
        inline = config.get("auths", {}).get(key, {}).get("auth")
        helper = config.get("credHelpers", {}).get(key) or config.get("credsStore")
        found = inline or (_run_credential_helper(helper, key) if helper else None)
        if found:
            return str(found)
    return None


def answer_challenge(session: Session, challenge: str, login: str | None, origin: str) -> str:
    """The Authorization header that a WWW-Authenticate asks for. Raises Answer(401) when we have none to give."""
    kind, _, rest = challenge.partition(" ")
    if kind.lower() == "basic" and login:
        return f"Basic {login}"
    challenge_params = dict(re.findall(r'(\w+)="([^"]*)"', rest))
    realm = challenge_params.get("realm", "")
    if kind.lower() != "bearer" or not realm.startswith("https://" if origin.startswith("https://") else "http"):
        raise HttpStatusError(401, "and no login for it is stored" if not login else f"asking for {kind}")
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
            raise HttpStatusError(response.status_code, "from the service that gives its tokens")
        try:
            document = json.loads(response.raw.read(MAX_TOKEN_RESPONSE_BYTES, decode_content=True))
            return str(document.get("token") or document["access_token"])
        except (ValueError, KeyError, AttributeError) as error:
            raise ConnectionError("the service that gives its tokens gave none") from error


def _decode_login(login: str | None) -> str:
    try:
        return base64.b64decode(login or "").decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise HttpStatusError(401, "and the login that docker stored is unreadable") from error


def _run_credential_helper(helper: Any, host: str) -> str | None:
    try:
        done = subprocess.run(
            [f"docker-credential-{helper}", "get"],
            input=host,
            text=True,
            capture_output=True,
            timeout=retry.READ_TIMEOUT_SECONDS,
            check=True,
        )
        found = json.loads(done.stdout)
        return base64.b64encode(f"{found['Username']}:{found['Secret']}".encode()).decode()
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return None
