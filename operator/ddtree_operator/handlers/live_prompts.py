"""Whether users' prompts may be sampled for a resource, with which token, and from which engines."""

from __future__ import annotations

import base64
from typing import Any

from ddtree_operator.api.names import (
    ENGINE_PORT,
    LABEL_REVISION,
    LIVE_SECRET_SUFFIX,
    LIVE_TOKEN_KEY,
    LIVE_TOKEN_LENGTH,
)
from ddtree_operator.api.spec import DDTreeSpec
from ddtree_operator.core.facts import Observed, Problem, Revision
from ddtree_operator.handlers.kube import SECRET, ApiError, Kube
from ddtree_operator.probe.live import Wish


async def wish(
    kube: Kube, spec: DDTreeSpec, meta: dict[str, Any], serving: Revision | None
) -> tuple[Wish | None, Problem | None]:
    """What the resource of that metadata asks for, or why it cannot be had; neither when it asks for nothing."""
    live = spec.canary.analysis.prompts.live_traffic if spec.canary.analysis.prompts else None
    if live is None:
        return None, None
    model = (serving.spec.get("model") or {}).get("path", spec.model.path) if serving else spec.model.path
    if model != spec.model.path:
        text = (
            f"liveTraffic gives token ids of {model}, which serves; for a canary of {spec.model.path} use configMapRef"
        )
        return None, Problem("LiveTrafficNotPossible", text)
    secret = f"{meta['name']}{LIVE_SECRET_SUFFIX}"
    try:
        found = await kube.get(SECRET, meta["namespace"], secret)
    except ApiError as error:
        if error.status != 403:
            raise
        text = f"liveTraffic needs Secret {secret}, which the operator may not read; add it to the chart's rbac.secrets"
        return None, Problem("SecretForbidden", text)
    make = f"kubectl create secret generic {secret} --from-literal={LIVE_TOKEN_KEY}=$(openssl rand -hex 24)"
    if found is None:
        text = f"liveTraffic needs Secret {secret} in namespace {meta['namespace']}; make it with {make}"
        return None, Problem("SecretMissing", text)
    token = _token(found)
    if len(token) < LIVE_TOKEN_LENGTH:
        text = f"Secret {secret} has no {LIVE_TOKEN_KEY} of {LIVE_TOKEN_LENGTH} characters or more; make it with {make}"
        return None, Problem("SecretMissing", text)
    return Wish(token, live.longest, live.when_quiet == "wait"), None


def _token(secret: dict[str, Any]) -> str:
    try:
        token = base64.b64decode((secret.get("data") or {}).get(LIVE_TOKEN_KEY) or "").decode("ascii").strip()
    except ValueError:
        return ""
    return token if token.isprintable() else ""


def sources(wanted: Wish | None, observed: Observed) -> tuple[Wish, list[str]] | None:
    """The wish, and the engines that serve; None before a first rollout, when nobody is served."""
    if wanted is None or observed.service_selector is None:
        return None
    serving = observed.service_selector.get(LABEL_REVISION)  # "none": nobody yet; None: stable and canary share
    if serving == "none":
        return None
    sets = [s for s in observed.sets if not s.baseline and serving in (None, s.revision)]
    return wanted, [f"http://{p.ip}:{ENGINE_PORT}" for s in sets for p in s.ready]
