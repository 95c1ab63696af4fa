"""The few requests that a node makes of its own API server."""

from __future__ import annotations

import http.client
import json
import ssl
from pathlib import Path
from typing import Any

from .settings import API_PORT


class Api:
    """A client with the admin's certificate; every method raises OSError when the server cannot be reached."""

    def __init__(self, pki: Path, port: int = API_PORT, host: str = "127.0.0.1") -> None:
        self._host, self._port = host, port
        self._tls = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        self._tls.load_cert_chain(str(pki / "admin.crt"), str(pki / "admin.key"))

    def request(self, method: str, path: str, body: object = None) -> tuple[int, str]:
        """HTTP status and text of one request; the body of a PATCH is a JSON merge patch."""
        connection = http.client.HTTPSConnection(self._host, self._port, context=self._tls, timeout=10)
        try:
            kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
            headers = {"Content-Type": kind} if body is not None else {}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except http.client.HTTPException as e:
            raise ConnectionError(str(e)) from e
        finally:
            connection.close()

    def get(self, path: str) -> dict[str, Any] | None:
        """An object, or None when there is none (yet)."""
        status, text = self.request("GET", path)
        if status != 200:
            return None
        found: dict[str, Any] = json.loads(text)
        return found
