"""Puts wheels into a folder and checks each against its sha256. Runs in a builder Job, before the builder.

usage: fetch.py OUT_FOLDER
$WHEELS is a JSON list of {"name", "sha256", "from"}: ``from`` is an http(s) address, a path of a mounted volume, or
oci://host/repository:tag-or-@digest of an artefact that holds the wheel as a file (as ``oras push`` makes them).
$INSECURE lists registries spoken to over plain http, $DOCKER_CONFIG names a folder with credentials in config.json.
Standard library only. Problems end as one line, also left in the file $MESSAGE: with exit status 10 where trying again
is pointless, else 11.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import IO, Any

PERMANENT, TRANSIENT = 10, 11
CHUNK = 1 << 20
TIMEOUT = 60.0  # seconds without a byte
TITLE = "org.opencontainers.image.title"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


class RefusedError(Exception):
    """One sentence, and whether trying again may help."""

    def __init__(self, sentence: str, *, heals: bool = False) -> None:
        super().__init__(sentence)
        self.heals = heals


def save(source: IO[bytes], out: Path, name: str, sha256: str) -> None:
    """Copy a stream into a file, which is there only when its content is what was asked for."""
    sha, size, part = hashlib.sha256(), 0, out.with_suffix(".part")
    with part.open("wb") as file:
        while chunk := source.read(CHUNK):
            sha.update(chunk)
            size += len(chunk)
            file.write(chunk)
    if sha.hexdigest() != sha256:
        raise RefusedError(
            f"the wheel {name} has sha256 {sha.hexdigest()} ({size} bytes), but {sha256} is asked for; "
            "correct the sha256 or the address"
        )
    part.rename(out)
    print(f"fetched {name}: {size} bytes", flush=True)


def copy(path: Path, out: Path, name: str, sha256: str) -> None:
    """Take a wheel from a mounted volume."""
    try:
        with path.open("rb") as source:
            save(source, out, name, sha256)
    except FileNotFoundError:
        there = sorted(p.name for p in path.parent.glob("*.whl")) if path.parent.is_dir() else []
        raise RefusedError(f"the wheel {name} is not in the wheelhouse ({listed(there)}); put it there") from None
    except (PermissionError, IsADirectoryError) as error:
        raise RefusedError(
            f"the wheel {name} in the wheelhouse cannot be read ({error.strerror}); let user 65532 read it"
        ) from None


def download(url: str, out: Path, name: str, sha256: str) -> None:
    """Fetch a wheel from a web server."""
    host = urllib.parse.urlsplit(url).netloc
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
            save(answer, out, name, sha256)
    except urllib.error.HTTPError as error:
        if error.code in (404, 410):
            raise RefusedError(
                f"the wheel {name} is not there ({error.code}); correct its address or put it into the wheelhouse"
            ) from None
        if error.code in (401, 403):
            raise RefusedError(
                f"the server refuses to hand out {name} ({error.code}); put it where no credentials are needed"
            ) from None
        raise RefusedError(f"the server of {name} answers {error.code}", heals=error.code >= 500) from None
    except (http.client.HTTPException, OSError) as error:
        raise RefusedError(f"the wheel {name} cannot be fetched from {host}: {why(error)}", heals=True) from None


class Registry:
    """Reads artefacts of one registry."""

    def __init__(self, host: str, *, insecure: bool, user: str = "") -> None:
        self.host, self.scheme, self.user = host, "http" if insecure else "https", user
        self.authorization = ""

    def open(self, path: str, accept: str = "*/*") -> Any:
        """An answer; raises RefusedError, and KeyError where nothing is there."""
        for attempt in (1, 2):
            request = urllib.request.Request(f"{self.scheme}://{self.host}/v2/{path}", headers={"Accept": accept})
            if self.authorization:
                # Never handed on to the store that a registry redirects to.
                request.add_unredirected_header("Authorization", self.authorization)
            try:
                return urllib.request.urlopen(request, timeout=TIMEOUT)
            except urllib.error.HTTPError as error:
                if error.code == 404:
                    raise KeyError(path) from None
                if error.code == 401 and attempt == 1 and self.authorize(error.headers.get("WWW-Authenticate", "")):
                    continue
                if error.code in (401, 403):
                    raise RefusedError(
                        f"the registry {self.host} denies access to {path.partition('/manifests/')[0]}; "
                        "check push.secretRef and its rights"
                    ) from None
                raise RefusedError(f"the registry {self.host} answers {error.code}", heals=True) from None
            except (http.client.HTTPException, OSError) as error:
                raise RefusedError(f"the registry {self.host} cannot be reached: {why(error)}", heals=True) from None
        raise AssertionError("two attempts")

    def authorize(self, challenge: str) -> bool:
        """Answer a challenge; False when there is nothing to offer."""
        basic = "Basic " + base64.b64encode(self.user.encode()).decode() if self.user else ""
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic":
            self.authorization = basic
            return bool(basic)
        fields = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        realm = fields.pop("realm", "")
        if scheme.lower() != "bearer" or not realm.startswith(f"{self.scheme}://"):
            return False
        request = urllib.request.Request(f"{realm}?{urllib.parse.urlencode(fields)}")
        if basic:
            request.add_unredirected_header("Authorization", basic)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                told = json.load(answer)
            self.authorization = f"Bearer {told.get('token') or told['access_token']}"
        except (OSError, ValueError, KeyError):
            return False
        return True


def pull(reference: str, out: Path, name: str, sha256: str) -> None:
    """Take a wheel out of an artefact. Its layers are files: their digest is the sha256 that is asked for."""
    host, _, rest = reference.partition("/")
    path, _, version = rest.rpartition("@") if "@" in rest else rest.rpartition(":")
    insecure = host in os.environ.get("INSECURE", "").split()
    registry = Registry(host, insecure=insecure, user=credentials(host))
    try:
        with registry.open(f"{path}/manifests/{version}", MANIFEST) as answer:
            manifest = json.load(answer)
    except KeyError:
        raise RefusedError(f"the artefact {reference} is not in its registry; push it there") from None
    except ValueError:
        raise RefusedError(f"{host} answers something that is no manifest for {reference}") from None
    layers = {(layer.get("annotations") or {}).get(TITLE, ""): layer["digest"] for layer in manifest.get("layers", [])}
    digest = layers.get(name) or next((d for d in layers.values() if d == f"sha256:{sha256}"), "")
    if not digest:
        raise RefusedError(f"the artefact {reference} holds no {name} ({listed(sorted(layers))}); add it")
    try:
        with registry.open(f"{path}/blobs/{digest}") as answer:
            save(answer, out, name, sha256)
    except KeyError:
        raise RefusedError(f"the registry {host} has lost {name} of the artefact {reference}; push it again") from None
    except (http.client.HTTPException, OSError) as error:
        raise RefusedError(f"the wheel {name} cannot be fetched from {host}: {why(error)}", heals=True) from None


def credentials(host: str) -> str:
    """``user:password`` for a registry from Docker's configuration; "" without."""
    folder = os.environ.get("DOCKER_CONFIG")
    try:
        auths = json.loads(Path(folder or "/nowhere", "config.json").read_text())["auths"]
        entry = next(v for k, v in auths.items() if re.sub(r"^https?://", "", k).split("/")[0] == host)
        if entry.get("auth"):
            return base64.b64decode(entry["auth"]).decode()
        return f"{entry['username']}:{entry['password']}"
    except (OSError, ValueError, KeyError, StopIteration):
        return ""


def listed(names: list[str]) -> str:
    """What is there instead, in words."""
    return f"which holds {', '.join(names[:5])}{' …' if len(names) > 5 else ''}" if names else "which holds no wheel"


def why(error: BaseException) -> str:
    """The reason within a network error."""
    reason = getattr(error, "reason", error)
    return str(getattr(reason, "strerror", None) or reason or type(error).__name__).lower()


def main(folder: str) -> None:
    """Fetch every wheel."""
    for wheel in json.loads(os.environ["WHEELS"]):
        name, sha256, source = wheel["name"], wheel["sha256"], wheel["from"]
        out = Path(folder, name)
        if source.startswith("oci://"):
            pull(source.removeprefix("oci://"), out, name, sha256)
        elif source.startswith("/"):
            copy(Path(source), out, name, sha256)
        else:
            download(source, out, name, sha256)


if __name__ == "__main__":
    os.umask(0o022)
    try:
        main(sys.argv[1])
    except RefusedError as error:
        sentence = f"ddtree-{'fetch' if error.heals else 'build'}: error: {error}"
        print(sentence, file=sys.stderr, flush=True)
        if os.environ.get("MESSAGE"):
            Path(os.environ["MESSAGE"]).write_text(sentence)
        sys.exit(TRANSIENT if error.heals else PERMANENT)
    except OSError as error:
        sys.exit(f"ddtree-fetch: error: the wheels cannot be written: {error.strerror}")
