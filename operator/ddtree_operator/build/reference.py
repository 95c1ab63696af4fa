"""Image references: ``host[:port]/path[:tag][@sha256:…]``. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import BuildError

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:\d{1,5})?|\[[0-9a-fA-F:]+\](:\d{1,5})?")
_PATH = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Reference:
    """An image in a registry; ``registry`` always has a host, ``tag`` and ``digest`` may be empty."""

    registry: str
    path: str
    tag: str = ""
    digest: str = ""

    @property
    def repository(self) -> str:
        """``host[:port]/path``."""
        return f"{self.registry}/{self.path}"

    @property
    def version(self) -> str:
        """What to ask the registry for: the digest where one is given, else the tag."""
        return self.digest or self.tag or "latest"

    def __str__(self) -> str:
        return self.repository + (f":{self.tag}" if self.tag else "") + (f"@{self.digest}" if self.digest else "")


def parse_reference(text: str) -> Reference:
    """Take a reference apart. Raises BuildError with one sentence when it is none, or names no registry host."""
    rest, _, digest = text.partition("@")
    if "@" in text and not _DIGEST.fullmatch(digest):
        raise BuildError(f"image {text!r} has a digest that is not sha256:<64 hex digits>")
    host, slash, path = rest.partition("/")
    if not slash or not (set(host) & set(".:") or host == "localhost"):
        raise BuildError(
            f"image {text!r} names no registry; write it as host/path, for example registry.example/team/engine"
        )
    if not _HOST.fullmatch(host):
        raise BuildError(f"image {text!r} has a registry host that is not a host name: {host!r}")
    path, colon, tag = path.partition(":")
    if colon and not _TAG.fullmatch(tag):
        raise BuildError(f"image {text!r} has a tag that no registry accepts: {tag!r}")
    if not _PATH.fullmatch(path):
        raise BuildError(
            f"image {text!r} has a path that no registry accepts: {path!r} (lower case letters, digits, . _ - and /)"
        )
    return Reference(host, path, tag, digest)
