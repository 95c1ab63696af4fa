"""Records of analyses, as the command line finds them in a cluster."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

from ddtree_operator.analysis import Pair, Policy, Sample, evaluate, record
from ddtree_operator.api.spec import AnalysisSpec
from unit.ddt_fake import FakeCluster, analyzing


def recorded(**changes: Any) -> bytes:
    """A record of 30 pairs with equal outputs, judged by a policy of the defaults."""

    def sample(accepted: int) -> Sample:
        return Sample("p", 40, 20, accepted, 1.0 + accepted / 1000, tuple(range(40)))

    pairs = tuple(Pair(sample(22 + i % 3), sample(33 + i % 5)) for i in range(30))
    policy = Policy.from_spec(AnalysisSpec())
    verdict = replace(evaluate(pairs, policy), **changes)
    return record.dump(record.Record(policy, pairs, verdict, notes={"attempt": "0", "step": "1"}))


def with_record(data: bytes) -> FakeCluster:
    obj = analyzing()
    last = {**obj["status"]["history"][2], "result": "promoted", "verdictDigest": record.digest(data)}
    obj["status"]["history"] = [*obj["status"]["history"][:2], last]
    fake = FakeCluster(obj)
    for revision in ("8c1d2e3f40", "0000000000"):
        meta = {"name": f"qwen3-8b-{revision}-a0-s1", "labels": {"ddtree.dev/revision": revision}}
        fake.record_maps.append({"metadata": meta, "binaryData": {"pairs.jsonl.gz": base64.b64encode(data).decode()}})
    return fake
