"""Wheels by name and content: file name rules, addresses, tags. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from .errors import BuildError
from .reference import parse_reference

# PEP 427: name-version[-build]-python-abi-platform.whl
_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._]*[A-Za-z0-9])?)-(?P<version>[A-Za-z0-9._+!]+)(?:-(?P<build>\d[A-Za-z0-9._]*))?"
    r"-(?P<python>[A-Za-z0-9_.]+)-(?P<abi>[A-Za-z0-9_.]+)-(?P<platform>[A-Za-z0-9_.]+)\.whl"
)
INSIDE = ("pvc://", "configmap://", "oci://")  # addresses that only the Job can read, not the builder
_NAMED = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")  # of an object
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class WheelName:
    """The parts of a wheel's file name; ``name`` is normalised (lower case, dashes)."""

    name: str
    version: str
    python: frozenset[str]
    abi: frozenset[str]
    platform: frozenset[str]


@dataclass(frozen=True, slots=True)
class WheelRef:
    """A wheel to fetch: where it is, what its content hashes to, and the file name it must carry."""

    url: str
    sha256: str
    filename: str

    @property
    def scheme(self) -> str:
        """http, https, pvc, configmap or oci."""
        return self.url.partition("://")[0]

    @property
    def place(self) -> str:
        """What holds the wheel: a claim, a ConfigMap, or the reference of an artefact; of an http address the host."""
        rest = self.url.partition("://")[2]
        return rest.rpartition("/")[0] if self.scheme == "oci" else rest.partition("/")[0]

    @property
    def member(self) -> str:
        """Path of the wheel in a volume. A ConfigMap's keys take no ``+``: ``_`` stands for it there."""
        path = self.url.partition("://")[2].partition("/")[2]
        return path.replace("+", "_") if self.scheme == "configmap" else path


def parse_wheel_name(filename: str) -> WheelName:
    """Take a wheel's file name apart. Raises BuildError with one sentence when it is not one."""
    match = _NAME.fullmatch(filename)
    if match is None:
        raise BuildError(
            f"{filename!r} is not the file name of a wheel (name-version-python-abi-platform.whl); "
            "keep the name the wheel was published with"
        )
    return WheelName(
        name=re.sub(r"[-_.]+", "-", match["name"]).lower(),
        version=match["version"],
        python=frozenset(match["python"].split(".")),
        abi=frozenset(match["abi"].split(".")),
        platform=frozenset(match["platform"].split(".")),
    )


def wheel_ref(url: str, sha256: str, *, wheelhouse: str, where: str) -> WheelRef:
    """Turn what a user wrote into a WheelRef.

    ``url`` is an address (http(s), pvc, configmap, oci) or a bare file name, joined to ``wheelhouse``, which is such an
    address without the file's name; ``where`` is the field, for errors.
    """
    if not SHA256.fullmatch(sha256):
        raise BuildError(f"{where}.sha256 is not 64 lower case hex digits: {sha256[:80]!r}")
    scheme = url.partition("://")[0] if "://" in url else ""
    if not scheme and "/" not in url:
        if not wheelhouse:
            raise BuildError(
                f"{where}.url is the file name {url!r}, but the operator has no wheelhouse; give the whole address"
            )
        inside = wheelhouse.startswith(INSIDE)
        url = f"{wheelhouse.rstrip('/')}/{url if inside else url.replace('+', '%2B')}"
        scheme = url.partition("://")[0]
    if scheme in ("pvc", "configmap", "oci"):
        filename = _inside(url, scheme, where)
    elif scheme in ("http", "https"):
        parts = urlsplit(url)
        if not parts.hostname or any(c.isspace() for c in url):
            raise BuildError(f"{where}.url is not a usable address: {url!r}")
        if parts.username or parts.password:
            raise BuildError(
                f"{where}.url carries credentials; put the wheel where it needs none, such as the wheelhouse"
            )
        filename = unquote(parts.path.rsplit("/", 1)[-1])
    else:
        raise BuildError(
            f"{where}.url must be http(s)://…, pvc://claim/…, configmap://name/…, oci://repository:tag/… "
            f"or a bare file name under the wheelhouse, not {url!r}"
        )
    try:
        parse_wheel_name(filename)
    except BuildError as error:
        raise BuildError(f"{where}.url: {error}") from None
    return WheelRef(url=url, sha256=sha256, filename=filename)


def _inside(url: str, scheme: str, where: str) -> str:
    """File name in an address inside the cluster. Raises BuildError."""
    rest = url.partition("://")[2]
    place, slash, path = rest.partition("/")
    if scheme == "oci":
        reference, slash, filename = rest.rpartition("/")
        try:
            found = parse_reference(reference)
        except BuildError as error:
            raise BuildError(f"{where}.url: {error}") from None
        if not found.tag and not found.digest:
            raise BuildError(f"{where}.url names an artefact without tag or digest: {url!r}; write oci://host/path:tag")
        return filename
    example = "pvc://claim/folder/file.whl" if scheme == "pvc" else "configmap://name/file.whl"
    if not _NAMED.fullmatch(place) or not slash or not path:
        raise BuildError(f"{where}.url is not a usable address: {url!r}; write it as {example}")
    if scheme == "configmap" and "/" in path:
        raise BuildError(f"{where}.url: a ConfigMap has no folders: {url!r}; write it as {example}")
    if any(part in ("", ".", "..") for part in path.split("/")):
        raise BuildError(f"{where}.url has a path that leads elsewhere: {url!r}")
    return path.rsplit("/", 1)[-1]


def check_python(filename: str, python: str, *, where: str) -> None:
    """Refuse a wheel whose Python tag cannot run on ``python`` (such as cp311), with both named."""
    tags = parse_wheel_name(filename)
    minor = int(python.removeprefix("cp3"))
    for tag in tags.python:
        if tag in (python, "py3", "py2.py3", f"py3{minor}"):
            return
        older = re.fullmatch(r"cp3(\d+)", tag)
        if older and "abi3" in tags.abi and int(older[1]) <= minor:
            return
        pure = re.fullmatch(r"py3(\d+)", tag)
        if pure and int(pure[1]) <= minor:
            return
    raise BuildError(
        f"{where}: the wheel {filename} is for {'.'.join(sorted(tags.python))}, but the base image has {python}; "
        "use the wheel of that Python, or another base image"
    )
