"""``speculative.draftBlock``: positions the drafter drafts, from the resource to the engine's command line."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
import yaml

from ddtree_operator.api import crd, names
from ddtree_operator.api.refusals import InvalidResourceError, check_resource, parse_spec
from ddtree_operator.core.revisions import revision_hash, revision_part
from ddtree_operator.rollout.engine_args import engine_args
from unit.world import World, stable

pytestmark = pytest.mark.unit

FLAG = "--speculative-dflash-block-size"
MOVED = f"spec.engine.args: {FLAG} has a field of its own; remove it and set spec.engine.speculative.draftBlock"


def raw(speculative: str, args: str = "[]", more: str = "{}") -> dict[str, Any]:
    text = f"model: {{path: /m}}\ndrafter: {{path: /d}}\nengine: {{speculative: {{{speculative}}}, args: {args}}}"
    out: dict[str, Any] = yaml.safe_load(text) | yaml.safe_load(more)
    return out


def resource(spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": "a"}, "spec": spec}


@pytest.mark.parametrize(
    ("speculative", "sentence"),
    [
        ("draftBlock: 1", "spec.engine.speculative.draftBlock: must be at least 2, not 1"),
        ("draftBlock: 33", "spec.engine.speculative.draftBlock: must be at most 32, not 33"),
        ("draftBlock: four", 'spec.engine.speculative.draftBlock: must be a whole number, not "four"'),
        ("draft_block: 4", "spec.engine.speculative.draft_block: unknown field; did you mean draftBlock?"),
        (
            "algorithm: DFLASH, draftBlock: 4",
            "spec.engine.speculative: draftBlock is only for DDTREE, not DFLASH; remove it",
        ),
        (
            "algorithm: NGRAM, budget: 3, draftBlock: 4",
            "spec.engine.speculative: budget and draftBlock are only for DDTREE, not NGRAM; remove them",
        ),
    ],
)
def test_a_mistake_is_one_sentence(speculative: str, sentence: str) -> None:
    with pytest.raises(InvalidResourceError) as caught:
        parse_spec(raw(speculative))
    assert caught.value.sentences == (sentence,)


@pytest.mark.parametrize("block", [2, 4, 32])
def test_the_engine_gets_it_and_an_engine_without_it_gets_nothing(block: int) -> None:
    args = engine_args(parse_spec(raw(f"budget: 3, draftBlock: {block}")), ["--log-level=info"])
    assert args[args.index(FLAG) + 1] == str(block)
    assert args.index("--speculative-ddtree-budget") < args.index(FLAG) < args.index("--log-level=info")
    assert FLAG not in engine_args(parse_spec(raw("budget: 3")), [])


def test_it_makes_a_revision_of_its_own_and_its_absence_none() -> None:
    without, four, eight = (parse_spec(raw(f"budget: 3{more}")) for more in ("", ", draftBlock: 4", ", draftBlock: 8"))
    assert len({revision_hash(s) for s in (without, four, eight)}) == 3
    assert "draftBlock" not in str(revision_part(without))  # hashes from before there was such a field stay as they are
    assert parse_spec(revision_part(four)).engine.speculative == four.engine.speculative


@pytest.mark.parametrize(("block", "good"), [(1, False), (2, True), (32, True), (33, False), ("4", False)])
def test_the_crd_takes_what_the_model_takes(block: object, good: bool) -> None:
    schema = crd.open_api_schema()["properties"]["spec"]
    spec = raw("budget: 3")
    spec["engine"]["speculative"]["draftBlock"] = block
    assert jsonschema.Draft202012Validator(schema).is_valid(spec) is good
    if good:
        assert parse_spec(spec).model_dump(by_alias=True)["engine"]["speculative"]["draftBlock"] == block


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (raw("budget: 3", f"['{FLAG}', '4']"), True),
        (raw("budget: 3, draftBlock: 8", f"['{FLAG}=4']"), True),
        (raw("algorithm: DFLASH", f"['{FLAG}=4']"), False),  # the chain has no field for it
        (
            raw(
                "algorithm: DFLASH",
                f"['{FLAG}=4']",
                "baseline: {from: spec, speculative: {algorithm: DDTREE, draftBlock: 8}}",
            ),
            True,
        ),
    ],
)
def test_the_flag_among_the_args_is_told_which_field_to_use(spec: dict[str, Any], told: bool) -> None:
    if not told:
        assert check_resource(resource(spec)).engine.args == spec["engine"]["args"]
        return
    with pytest.raises(InvalidResourceError) as caught:
        check_resource(resource(spec))
    assert caught.value.sentences == (MOVED,)


def test_what_an_older_operator_rolled_out_with_the_flag_serves_on_and_can_be_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as older:
        older.setattr(names, "DDTREE_FLAGS", {})
        world: World = stable(replicas=2)
        engine = {"speculative": {"algorithm": "DDTREE", "budget": 3}, "args": [f"{FLAG}=4"]}
        world.edit(engine=engine).until("Stable")
    old = world.status["revision"]
    world.until("Invalid")
    for _ in range(30):  # the chain's engines drain
        world.tick()
    assert MOVED in world.status["message"]
    assert world.selector is not None
    assert world.selector["ddtree.dev/revision"] == old
    assert [run.action.revision for run in world.sets.values()] == [old]
    kept = parse_spec({**world.spec, **world.revisions[old].spec})  # as its engines are made again
    assert engine_args(kept, [])[-1] == f"{FLAG}=4"

    world.edit(engine={"speculative": {"algorithm": "DDTREE", "budget": 3, "draftBlock": 4}, "args": []})
    world.until("Stable")
    new = world.status["revision"]
    assert new != old
    assert [h["algorithm"] for h in world.status["history"]][-2:] == ["DDTREE/3", "DDTREE/3 block 4"]
    world.ask("undo").until("RolledBack")
    assert world.selector["ddtree.dev/revision"] == old
    assert not world.outages
