"""Reads an image's run-time settings from its Dockerfile, so that they are written down once.

Only the instructions that become settings are read (ENV, LABEL, USER, WORKDIR, ENTRYPOINT, CMD, EXPOSE); what COPY and
RUN do is done by the recipe of the same name.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Settings:
    """The run-time part of an image configuration."""

    env: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    user: str = ""
    workdir: str = ""
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None
    ports: list[str] = field(default_factory=list)


class DockerfileError(ValueError):
    """A line that cannot be read; the text says which."""


def parse(text: str) -> Settings:
    """The settings of a Dockerfile's last stage. Raises DockerfileError for a malformed setting."""
    settings = Settings()
    for number, instruction, rest in _instructions(text):
        try:
            match instruction:
                case "FROM":
                    settings = Settings()
                case "ENV":
                    settings.env.update(_pairs(rest))
                case "LABEL":
                    settings.labels.update(_pairs(rest))
                case "USER":
                    settings.user = rest
                case "WORKDIR":
                    settings.workdir = rest
                case "EXPOSE":
                    settings.ports += [port if "/" in port else f"{port}/tcp" for port in rest.split()]
                case "ENTRYPOINT":
                    settings.entrypoint, settings.cmd = list(json.loads(rest)), None
                case "CMD":
                    settings.cmd = list(json.loads(rest))
        except ValueError as error:
            raise DockerfileError(
                f"line {number}: {instruction} {rest!r} is not in the form used here: {error}"
            ) from error
    return settings


def _instructions(text: str) -> list[tuple[int, str, str]]:
    found, pending, start = [], "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if line.startswith("#") or (not line and not pending):
            continue
        start = start if pending else number
        if line.endswith("\\"):
            pending += line[:-1] + " "
            continue
        word, _, rest = (pending + line).partition(" ")
        found.append((start, word.upper(), rest.strip()))
        pending = ""
    return found


def _pairs(rest: str) -> dict[str, str]:
    pairs = {}
    for word in shlex.split(rest):
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{word!r} is not key=value")
        pairs[key] = value
    return pairs


def image_config(
    settings: Settings, base: dict[str, Any] | None, layers: list[tuple[str, str]], created: str
) -> dict[str, Any]:
    """The OCI image configuration: the base's settings with these on top, and all layers.

    `layers` are (diff id, what it holds). History counts: builders refuse a base whose history and layers disagree.
    """
    config: dict[str, Any] = dict((base or {}).get("config", {}))
    env = dict(item.split("=", 1) for item in config.get("Env", []))
    for key, value in settings.env.items():
        env[key] = _expand(value, env)
    if env:
        config["Env"] = [f"{key}={value}" for key, value in env.items()]
    if settings.labels or config.get("Labels"):
        config["Labels"] = {**config.get("Labels", {}), **settings.labels}
    if settings.user:
        config["User"] = settings.user
    if settings.workdir:
        config["WorkingDir"] = settings.workdir
    if settings.entrypoint is not None:
        config["Entrypoint"] = settings.entrypoint
        config.pop("Cmd", None)
    if settings.cmd is not None:
        config["Cmd"] = settings.cmd
    if settings.ports:
        config["ExposedPorts"] = {port: {} for port in settings.ports}
    inherited = list((base or {}).get("rootfs", {}).get("diff_ids", []))
    return {
        "architecture": "amd64",
        "os": "linux",
        "created": created,
        "config": config,
        "history": list((base or {}).get("history", []))
        + [{"created": created, "created_by": f"dev/images: {about}"} for _, about in layers],
        "rootfs": {"type": "layers", "diff_ids": inherited + [diff_id for diff_id, _ in layers]},
    }


def _expand(value: str, env: dict[str, str]) -> str:
    """`$NAME` and `${NAME}` from the environment so far, as a builder does."""
    for name in sorted(env, key=len, reverse=True):
        value = value.replace(f"${{{name}}}", env[name]).replace(f"${name}", env[name])
    return value
