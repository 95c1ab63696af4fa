"""Turns a builder's log into one sentence, and says whether trying again may help. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a build failed: one sentence, and whether it may heal by itself."""

    sentence: str
    heals: bool


# Words (extended regular expressions that grep knows too) after which trying again is pointless. The Job's script
# greps its own log for them, so that Kubernetes gives up at once; what is not listed is retried.
PERMANENT = (
    "ddtree-patches: error:",
    "ddtree-build: error:",
    "digest mismatch",
    "invalid response status 4(00|01|03|04|05|10|51)",
    "401 Unauthorized",
    "403 Forbidden",
    "insufficient_scope",
    "pull access denied",
    "failed to resolve source metadata for .*: not found",
    "manifest unknown",
    "405 Method Not Allowed",
    "server gave HTTP response to HTTPS client",
    "tls: failed to verify certificate",
    "dockerfile parse error",
    "python3: not found",
    "python3: command not found",
    'exec: "/bin/sh"',
    "/bin/sh: no such file",
    "exec format error",
)

_NOISE = re.compile(
    r"^(#\d+ (DONE|CACHED|CANCELED|\[|sha256:|\d+\.\d+ *$|extracting|resolve|exporting|pushing)|-+$|\s*$|>>>|"
    r"\s*\d+ \||Dockerfile:\d+|time=|\s*--------------------)"
)
_SHA = r"sha256:([0-9a-f]{64})"


def failure_sentence(log_tail: str, exit_code: int | None = None) -> str:
    """One sentence for the end of a builder's log; see ``diagnose``."""
    return diagnose(log_tail, exit_code).sentence


def diagnose(log_tail: str, exit_code: int | None = None) -> Failure:
    """Recognise what went wrong in the last lines of a builder's log.

    Falls back to the last line that says something. ``exit_code`` is that of the builder's container, None unknown.
    """
    log = log_tail.replace("\r", "\n")
    for look in _LOOKS:
        found = look(log)
        if found is not None:
            return Failure(_bounded(found.sentence), found.heals)
    if exit_code == 137:
        return Failure("the builder's container was killed (exit 137), most likely for memory", True)
    last = _last_line(log)
    permanent = any(re.search(words, log) for words in PERMANENT)
    if last:
        return Failure(_bounded(f"the build failed: {last}"), not permanent)
    suffix = f" with exit status {exit_code}" if exit_code is not None else ""
    return Failure(f"the build failed{suffix} and left no log", True)


def _own_line(log: str) -> Failure | None:
    """Our tools end with one line that already is the sentence."""
    patches = re.findall(r"ddtree-patches: error: (.+)", log)
    if patches:
        return Failure(f"the patch series does not apply: {_clean(patches[0])}", False)
    built = re.findall(r"ddtree-build: error: (.+)", log)
    if built:
        return Failure(_clean(built[0]), False)
    return None


def _fetch(log: str) -> Failure | None:
    """What the step that fetches wheels says of what may heal."""
    found = re.findall(r"ddtree-fetch: error: (.+)", log)
    return Failure(_clean(found[0]), True) if found else None


def _buildah(log: str) -> Failure | None:
    """Pulling the base and pushing the image, in buildah's words."""
    base = re.search(r"initializing source docker://(\S+?@sha256:[0-9a-f]{64}): ([^\n]+)", log)
    if base:
        image, rest = base[1], base[2]
        if re.search(r"manifest unknown|name unknown|not found", rest):
            return Failure(f"the base image {image} is not in its registry; correct baseImage or push it there", False)
        return _registry(rest, image.split("/")[0], f"the base image {image}")
    push = re.search(r'pushing image "[^"]+" to "docker://([^"]+)": ([^\n]+)', log)
    if push:
        return _registry(push[2], push[1].split("/")[0], f"the image {push[1]}")
    if re.search(r"fork/exec /bin/sh: no such file|stat /bin/sh: no such file", log):
        return Failure("the base image has no shell (/bin/sh); use one with a shell, Python and torch", False)
    return None


def _checksum(log: str) -> Failure | None:
    found = re.search(rf"digest mismatch {_SHA}:? {_SHA}", log)
    if not found:
        return None
    name = _wheel_before(log, found.start())
    return Failure(
        f"{name} has sha256 {found[1]}, but {found[2]} is asked for; correct the sha256 or the address", False
    )


def _wheel_missing(log: str) -> Failure | None:
    found = re.search(r"invalid response status (\d{3})", log)
    if not found:
        return None
    name = _wheel_before(log, found.start())
    status = found[1]
    if status in ("404", "410"):
        return Failure(f"{name} is not there ({status}); correct its address or put it into the wheelhouse", False)
    if status in ("401", "403"):
        return Failure(
            f"the server refuses to hand out {name} ({status}); put it where no credentials are needed", False
        )
    return Failure(f"the server of {name} answers {status}", status.startswith("5") or status == "429")


def _http_fetch(log: str) -> Failure | None:
    found = re.search(r'(?:Get|Head) "(https?://[^"\s]+\.whl[^"\s]*)": ([^\n]+)', log)
    if not found:
        return None
    return Failure(f"{_file(found[1])} cannot be fetched from {_host(found[1])}: {_network(found[2])}", True)


def _space(log: str) -> Failure | None:
    if "no space left on device" not in log:
        return None
    pushing = re.search(r"(pushing|upload|blob)[^\n]*no space left on device", log)
    where = "the registry" if pushing else "the builder"
    return Failure(f"no space left on the disk of {where}; free some, or give it a larger volume", True)


def _base_missing(log: str) -> Failure | None:
    found = re.search(
        r"failed to resolve source metadata for ([^\s:]+(?::\d+)?[^\s]*?@sha256:[0-9a-f]{64}): ([^\n]+)", log
    )
    if not found:
        return None
    image, rest = found[1], found[2]
    host = image.split("/")[0]
    if re.search(r"not found|manifest unknown", rest):
        return Failure(f"the base image {image} is not in its registry; correct baseImage or push it there", False)
    return _registry(rest, host, f"the base image {image}") or Failure(
        f"the base image {image} cannot be read: {rest}", True
    )


def _push(log: str) -> Failure | None:
    found = re.search(r"failed to (?:push|do request|copy|fetch anonymous token|authorize)[^\n]*", log)
    if not found:
        return None
    host = re.search(r"https?://([^/\s\"]+)", found[0]) or re.search(r"failed to push ([^/\s:]+(?::\d+)?)/", log)
    target = re.search(r"failed to push ([^\s]+?):(?:\s|$)", log)
    what = f"the image {target[1]}" if target else "the image"
    return _registry(found[0], host[1] if host else "", what)


def _registry(text: str, host: str, what: str) -> Failure | None:
    registry = f"the registry {host}" if host else "the registry"
    if re.search(r"HTTP response to HTTPS client", text):
        return Failure(f"{registry} speaks plain http; add it to the operator's insecureRegistries", False)
    if re.search(r"certificate", text):
        return Failure(f"{registry} has a certificate the builder does not trust: {_network(text)}", False)
    if re.search(r"\b(401|403)\b|denied|insufficient_scope|unauthorized|Unauthorized|Forbidden", text):
        return Failure(f"{registry} denies access to {what}; check push.secretRef and its rights", False)
    if re.search(
        r"connection refused|no such host|i/o timeout|no route to host|network is unreachable|EOF|"
        r"connection reset|deadline exceeded|handshake timeout",
        text,
    ):
        return Failure(f"{registry} cannot be reached for {what}: {_network(text)}", True)
    status = re.search(r"\b(5\d\d|429)\b", text)
    if status:
        return Failure(f"{registry} answers {status[1]} for {what}", True)
    if re.search(r"\b405\b|read.?only|UNSUPPORTED", text):
        return Failure(f"{registry} is read-only, so {what} cannot be pushed", False)
    return None


def _builder_down(log: str) -> Failure | None:
    found = re.search(r"(failed to list workers|listing workers for Build|dial (?:tcp|unix) \S+)[^\n]*", log)
    if not found or not re.search(
        r"connection refused|no such host|no such file|Unavailable|i/o timeout|deadline|no route|EOF", found[0]
    ):
        return None
    if "certificate" in found[0]:
        return Failure(
            "the builder shows a certificate of another authority; the Secret builder.tlsSecret must hold the ca.crt "
            "that signed it",
            False,
        )
    if re.search(r"EOF|connection reset", found[0]):
        return Failure("the builder hangs up; it may want a client certificate (chart value builder.tlsSecret)", True)
    return Failure(f"the builder cannot be reached: {_network(found[0])}; is buildkitd running?", True)


def _wheel_before(log: str, position: int) -> str:
    """The wheel that the step in question fetched."""
    line_start = log.rfind("\n", 0, position) + 1
    line = log[line_start : log.find("\n", position) if "\n" in log[position:] else len(log)]
    step = re.match(r"#(\d+) ", line)
    if step:
        head = re.findall(rf"^#{step[1]} \[[^\]]*\] ADD .*?([A-Za-z0-9._+%-]+\.whl)", log, re.M)
        if head:
            return f"the wheel {head[-1]}"
    failed = re.findall(r"^ > \[[^\]]*\] ADD .*?([A-Za-z0-9._+%-]+\.whl)", log, re.M)
    near = re.findall(r"([A-Za-z0-9._+%-]+\.whl)", line)
    names = near or failed
    return f"the wheel {names[-1]}" if names else "a wheel"


def _step(log: str) -> Failure | None:
    """What keeps a step of ours from running in the base image at all."""
    if re.search(r"python3: (?:command )?not found", log):
        return Failure("the base image has no python3 on its PATH; use one with Python and torch", False)
    if 'exec: "/bin/sh"' in log:
        return Failure("the base image has no shell (/bin/sh); use one with a shell, Python and torch", False)
    if "exec format error" in log:
        return Failure("the base image is for another processor than the builder's; use one for that platform", False)
    if re.search(r"did not complete successfully: exit code: 137", log):
        return Failure("a build step was killed, most likely for memory; give the builder more", True)
    return None


def _network(text: str) -> str:
    """The part of a Go network error that says why."""
    found = re.search(r"(dial tcp|lookup|read tcp|write tcp|context deadline|EOF|x509|tls)[^\n\"]*", text)
    return _clean(found[0] if found else text)[:200]


def _last_line(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if not _NOISE.match(line)]
    errors = [line for line in lines if re.match(r"(error|ERROR)\b", line)]
    chosen = errors[-1:] or lines[-1:]
    return _clean(re.sub(r"^(#\d+ (\d+\.\d+ )?|error: (failed to solve: )?)", "", chosen[0])) if chosen else ""


def _file(url: str) -> str:
    return "the wheel " + url.rsplit("/", 1)[-1]


def _host(url: str) -> str:
    return url.split("/")[2]


def _clean(text: str) -> str:
    return re.sub(r"\s+", " ", "".join(c if c.isprintable() else " " for c in text)).strip()


def _bounded(text: str, limit: int = 700) -> str:
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


_LOOKS = (
    _own_line,
    _fetch,
    _checksum,
    _space,
    _base_missing,
    _buildah,
    _wheel_missing,
    _http_fetch,
    _push,
    _builder_down,
    _step,
)
