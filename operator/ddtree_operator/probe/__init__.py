"""Load against engine pods: pairs of requests, and readers of the engines' own state."""

from ddtree_operator.analysis.prompts import Prompt, load_prompts, shipped_prompts
from ddtree_operator.probe.divergence import explain_divergence
from ddtree_operator.probe.engine import EngineCounters, EngineInfo, EngineReader, SGLangReader, engine_reader
from ddtree_operator.probe.generate import generate, tokenize, top2_gap
from ddtree_operator.probe.http import EngineError
from ddtree_operator.probe.runner import PairRunner, schedule

__all__ = [
    "EngineCounters",
    "EngineError",
    "EngineInfo",
    "EngineReader",
    "PairRunner",
    "Prompt",
    "SGLangReader",
    "engine_reader",
    "explain_divergence",
    "generate",
    "load_prompts",
    "schedule",
    "shipped_prompts",
    "tokenize",
    "top2_gap",
]
