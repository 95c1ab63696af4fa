"""``plan``: what a canary's analysis can tell and how long that takes, before any of it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtreectl import kube, options, output, records, view
from ddtreectl.complete import names
from ddtreectl.exits import CliError, Exit
from ddtreectl.verbs.lint import documents, ours

if TYPE_CHECKING:
    from ddtree_operator.analysis.pace import Pace
    from ddtree_operator.analysis.power import Forecast, Outlook
    from ddtree_operator.api.spec import DDTreeSpec

CHANGES = (0.0, 0.1, 0.25, -0.1, -0.3)  # true changes in the table
Measured = tuple["Pace | None", str]


@options.connected
def plan(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Name of a DDTreeDeployment.", autocompletion=names)
    ] = None,
    file: Annotated[
        str | None, typer.Option("--file", "-f", metavar="FILE", help="Plan what is in a file; - for stdin.")
    ] = None,
    record: Annotated[
        str | None, typer.Option("--record", metavar="FILE", help="Take pace and spread from a saved record.")
    ] = None,
    where: options.Where = options.HERE,
    form: options.ViewOutput = options.View.TABLE,
    no_color: options.NoColor = False,
) -> int:
    """Say how many pairs a verdict takes, and how long at the pace measured before. Exit code 1 when deadline or
    maxPairs allow no verdict at all.
    """
    if (name is None) == (file is None):
        raise CliError("give either the NAME of a DDTreeDeployment or --file FILE")
    known = _from_record(record) if record else None
    if file is not None:
        resources = [d for d in documents(file) if ours(d)]
        if not resources:
            raise CliError(f"no DDTreeDeployment in {file}")
    else:
        resources = [kube.connect(*where).get(str(name))]
    specs = [_spec(r) for r in resources]  # mistakes first, before a cluster is asked
    plans = []
    for resource, spec in zip(resources, specs, strict=True):
        seen = known or _from_cluster(resource, where, live=file is None, no_color=no_color)
        plans.append(_plan(resource, spec, *seen))
    if form != options.View.TABLE:
        print(output.data(plans[0] if len(plans) == 1 else plans, form))
    else:
        print("\n\n".join(_shown(p) for p in plans))
    return Exit.ERROR if any(p["problem"] for p in plans) else Exit.DONE


def _spec(resource: dict[str, Any]) -> DDTreeSpec:
    from ddtree_operator.api.refusals import InvalidResourceError, check_resource, parse_spec

    try:  # a live resource has a status, and was checked by the API server
        return parse_spec(resource["spec"]) if "status" in resource else check_resource(resource)
    except InvalidResourceError as exc:
        raise CliError(f"{_name(resource)}: {exc}") from None


def _plan(resource: dict[str, Any], spec: DDTreeSpec, pace: Pace | None, source: str) -> dict[str, Any]:
    from ddtree_operator.analysis.power import outlook, statement

    where = _name(resource)
    try:
        found = outlook(spec.canary.analysis, pace, source, CHANGES)
    except ValueError as exc:
        raise CliError(f"{where}: spec.canary.analysis: {exc}") from None
    return {
        "name": where,
        "analyses": sum(step.analysis is not None for step in spec.canary.steps),
        "summary": "" if found.problem else statement(found),
        "problem": found.problem,
        "fewestPairs": found.fewest,
        "allowedPairs": found.allowed,
        "maxPairs": spec.canary.analysis.max_pairs,
        "deadline": spec.canary.analysis.deadline,
        "concurrency": found.concurrency,
        "secondsPerPair": found.seconds,
        "measured": found.source,
        "forecasts": [_forecast(found, f) for f in found.forecasts],
    }


def _metadata(resource: dict[str, Any]) -> dict[str, Any]:
    found = resource.get("metadata")
    return found if isinstance(found, dict) else {}


def _name(resource: dict[str, Any]) -> str:
    return _metadata(resource).get("name") or "(no name)"


def _forecast(found: Outlook, f: Forecast) -> dict[str, Any]:
    def time(pairs: int | None) -> float | None:
        taken = found.time(pairs) if pairs is not None else None
        return None if taken is None else round(taken, 1)

    return {
        "metric": f.metric,
        "threshold": f.threshold,
        "change": f.change,
        "outcome": "pass" if f.passes else "fail",
        "spread": round(f.spread, 4),
        "spreadMeasured": f.measured,
        "pairs": f.need.median,
        "pairsNineOfTen": f.need.most,
        "seconds": time(f.need.median),
        "secondsNineOfTen": time(f.need.most),
    }


def _shown(p: dict[str, Any]) -> str:
    from ddtree_operator.analysis.power import LIMIT, words

    def count(pairs: int | None, seconds: float | None) -> str:
        if pairs is None:
            return f"over {LIMIT}"
        beyond = " (too many)" if pairs > p["allowedPairs"] else ""
        return f"{pairs}{f', {words(seconds)}' if seconds is not None else ''}{beyond}"

    head = ["METRIC", "NEEDS", "SPREAD", "TRUE CHANGE", "ENDS IN", "PAIRS, HALF OF ROLLOUTS", "PAIRS, NINE OF TEN"]
    rows = [
        [
            f["metric"],
            f"above {f['threshold']:+.1%}",
            f"{f['spread']:.2f}{'' if f['spreadMeasured'] else ' assumed'}",
            f"{f['change']:+.0%}" if f["change"] else "none",
            f["outcome"],
            count(f["pairs"], f["seconds"]),
            count(f["pairsNineOfTen"], f["secondsNineOfTen"]),
        ]
        for f in p["forecasts"]
    ]
    steps = f"{p['analyses']} analysis step" + ("s, each as follows" if p["analyses"] != 1 else "")
    if p["secondsPerPair"] is None:
        pace = "time of a pair: not known, no pair of this resource was timed yet"
    else:
        pace = f"time of a pair: {p['secondsPerPair']:.2g} s, {p['concurrency']} at a time; {p['measured']}"
    lines = [
        f"{p['name']}: {steps}",
        pace,
        f"allowed: {p['allowedPairs']} pairs (maxPairs {p['maxPairs']}, deadline {p['deadline']})",
        f"needed at least: {p['fewestPairs']} pairs",
        "",
        output.table(head, rows),
    ]
    if p["problem"]:
        lines += ["", f"refused: {p['problem']}"]
    return "\n".join(lines)


def _from_record(path: str) -> Measured:
    try:
        data = Path(path).read_bytes()
    except OSError as exc:
        raise CliError(f"cannot read {path}: {exc.strerror}") from None
    try:
        pace = records.pace_of(data)
    except ValueError as exc:
        raise CliError(f"{path}: {exc}") from None
    if pace is None:
        raise CliError(f"{path}: too few usable pairs to take a pace from")
    return pace, f"measured over {pace.pairs} pairs of {path}"


def _from_cluster(
    resource: dict[str, Any],
    where: options.Where,
    *,
    live: bool,
    no_color: bool,
) -> Measured:
    """What the records of the resource of that name say; nothing when there is no cluster or no such resource."""
    meta = _metadata(resource)
    name = str(meta.get("name") or "")
    try:
        cluster = kube.connect(where.namespace or meta.get("namespace"), *where[1:])
        there = resource if live else cluster.get(name)
        maps = cluster.records(name)
    except CliError as exc:
        if exc.code != Exit.NOT_FOUND:
            output.hint(f"earlier measurements are not known: {exc}", no_color)
        return None, ""
    status = view.status_of(there)
    entries: list[dict[str, Any]] = status.get("history") or []
    stable = (status.get("stable") or {}).get("revision")
    wanted = status.get("revision")
    # As the operator does: what serves, else the newest other revision, at last the one on its way.
    order = sorted(entries, key=lambda e: (e.get("revision") == stable, e.get("revision") != wanted, e["number"]))
    for entry in reversed(order):
        for kept in reversed(records.of_revision(maps, str(entry.get("revision")))):
            pace = records.pace_of(kept.data) if kept.verdict else None
            if pace is not None:
                return pace, f"measured over {pace.pairs} pairs of revision {entry['number']}"
    return None, ""
