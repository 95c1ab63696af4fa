"""How many engines are ready, and what keeps the others from it, in words."""

from __future__ import annotations

from ddtree_operator.core.engine_errors import NOT_PULLED, error_line
from ddtree_operator.core.facts import EngineSet
from ddtree_operator.core.units import clip


def waiting_for(who: str, engines: EngineSet, need: int) -> str:
    """How many engines are ready, and what keeps the others from it."""
    text = f"{who}: {len(engines.ready)}/{need} engines ready"
    found = obstacle(engines)
    return f"{text}, {found[1]}" if found else text


def obstacle(engines: EngineSet) -> tuple[str, str] | None:
    """What keeps engines from starting, as a reason for conditions and in words; None while nothing does."""
    if engines.failure:
        reason = "QuotaExceeded" if "exceeded quota" in engines.failure else "PodsRefused"
        return reason, clip(engines.failure, 300)
    lost, other = lost_node(engines), _obstacle_of_pods(engines)
    if lost:
        return "NodeLost", f"{lost}; {other[1]}" if other else lost
    return other


def lost_node(engines: EngineSet) -> str:
    """What is wrong with a node that had one of these engines; "" while all report."""
    return next((p.lost for p in engines.pods if p.lost), "")


def _obstacle_of_pods(engines: EngineSet) -> tuple[str, str] | None:
    for pod in engines.pods:
        line = error_line(pod.exit_message)
        if pod.ready or pod.deleting or pod.lost:
            continue
        if pod.restarts and line:
            return "EngineCrashed", f"restarted {pod.restarts} times: {clip(line, 300)}"
        if pod.message:
            if pod.waiting in NOT_PULLED:
                return "ImageNotPulled", clip(pod.message, 500)
            return pod.waiting, f"{pod.waiting}: {clip(pod.message, 300)}"
    return None
