"""Which nodes fit, why the others do not, and how pods are pinned to alike GPUs."""

from .facts import NodeFacts, Taint, gpu_usage, pod_gpus
from .match import Inventory, Kind, NodeFit, match
from .needs import ImageNeeds
from .pin import Choice, Pins, affinity, choose_group, describe, still_wanted, summary

__all__ = [
    "Choice",
    "ImageNeeds",
    "Inventory",
    "Kind",
    "NodeFacts",
    "NodeFit",
    "Pins",
    "Taint",
    "affinity",
    "choose_group",
    "describe",
    "gpu_usage",
    "match",
    "pod_gpus",
    "still_wanted",
    "summary",
]
