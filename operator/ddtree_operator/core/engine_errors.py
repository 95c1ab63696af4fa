"""The one line of an engine's log tail that says why it ended."""

from __future__ import annotations

import re

from ddtree_operator.core.units import clip

# Waiting reasons of the kubelet for an image that it does not get.
NOT_PULLED = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})

_REFUSED = re.compile(r"ddtree(?:-cpu)?: refused: (.+)")
_ERROR = re.compile(r"\b([A-Z]\w*(?:Error|Exception)|OSError|error)\b\s*:")
# What follows an error in SGLang's log: the parent that lost its scheduler, the clean-up, the traceback's own lines.
_NOISE = re.compile(
    r"resource_tracker|KeyError: '/|Killed\b|leaked|SIGQUIT|exit code|died during init|EOFError|kill_process_tree"
    r"|^\s*(raise|File|at)\b|^\s*\^+\s*$"
)


def refusal(log_tail: str) -> str:
    """The engine's own refusal (a failed self-check, an unsupported flag), or ""."""
    found = _REFUSED.findall(log_tail)
    return clip(found[-1], 600) if found else ""


def error_line(log_tail: str) -> str:
    """The refusal, else the last line that looks like an error, else the last line. "" for an empty tail."""
    said = refusal(log_tail)
    if said:
        return said
    lines = [line.strip() for line in log_tail.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line) and not _NOISE.search(line)]
    if errors:
        return clip(errors[-1], 600)
    quiet = [line for line in lines if not _NOISE.search(line)]
    return clip((quiet or lines)[-1], 600) if lines else ""


def pull_failure(kubelet_says: str) -> str:
    """Which image cannot be pulled and why: the kubelet names the image four times, and the cause at the very end."""
    named = re.search(r'\bimage(?: tag| name)? "([^"]+)"', kubelet_says)
    cause = kubelet_says.rstrip().rsplit(": ", 1)
    image = f"the image {named[1]}" if named else "the image"
    return f"{image} cannot be pulled" + (f": {clip(cause[1], 200)}" if len(cause) > 1 else "")


def pods_refused(controller_says: str) -> str:
    """Why no pod can be made, without the made-up name that is another at each attempt."""
    return re.sub(r'^pods "[^"]*" is forbidden: ', "pods are refused: ", " ".join(controller_says.split()))
