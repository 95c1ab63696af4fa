"""``explain``: why a revision was promoted or rolled back, and whether the kept numbers say so again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ddtreectl import kube, options, output, records, view
from ddtreectl.complete import names
from ddtreectl.exits import CliError, Exit


@options.connected
def explain(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Name of a DDTreeDeployment.", autocompletion=names)
    ] = None,
    revision: Annotated[str | None, typer.Argument(metavar="[REV]", help="Number or hash; else the newest.")] = None,
    record: Annotated[
        str | None, typer.Option("--record", metavar="FILE", help="Judge a saved record instead; asks no cluster.")
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="FILE", help="Draw intervals over pairs: an SVG file, or - for the terminal."),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", metavar="METRIC", help="With --plot: only this one. May be repeated."),
    ] = None,
    export: Annotated[
        str | None, typer.Option("--export", metavar="FILE", help="Save the record, for --record and for benchmarks.")
    ] = None,
    where: options.Where = options.HERE,
    form: options.ViewOutput = options.View.TABLE,
    no_color: options.NoColor = False,
) -> int:
    """Show the verdict on a revision, and judge its kept pairs again. Exit code 1 when that gives another verdict, or
    when the record is not the one that decided.
    """
    if metric and not plot:
        raise CliError("--metric chooses what --plot draws; give --plot FILE, or - for the terminal")
    color = output.colour(sys.stdout, no_color)
    if record is not None:
        return _from_file(record, form, color, plot, metric or [], export)
    if name is None:
        raise CliError("give the NAME of a DDTreeDeployment, or --record FILE")
    cluster = kube.connect(*where)
    obj = cluster.get(name)
    status = view.status_of(obj)
    entry = view.find_entry(obj, revision)
    if entry is None and revision is not None:
        known = ", ".join(f"{e.get('number')} ({e.get('revision')})" for e in status.get("history") or []) or "none"
        raise CliError(f"no revision {revision} in the history of {name}; there are: {known}", Exit.NOT_FOUND)
    if entry is None:
        output.hint(f"{name} has no history yet", no_color)
        return Exit.DONE
    replays = _replays(cluster, name, entry)
    digest = str(entry.get("verdictDigest") or "")
    over = entry.get("result") != "inProgress"  # until then the record grows
    altered = records.altered(replays, digest) if over else ""
    current = entry.get("revision") == status.get("revision")
    told: dict[str, Any] = (status.get("analysis") or {}) if current else {}
    if form != options.View.TABLE:
        whole = {"revision": entry, "analysis": told, "records": [r.shown() for r in replays]}
        whole |= {"altered": altered} if altered else {}
        print(output.data(_finite(whole), form))
    else:
        print(_story(entry, color))
        if not replays and told:
            print("\n" + view.analysis(told, color))
        if not replays:
            output.hint("no record of its analysis is kept, so this is what the status says", no_color)
        for one in replays:
            print("\n" + _shown(one, digest, color))
        if altered:
            print("\n" + output.paint(altered, "red", color))
    _keep(records.deciding(replays, digest), plot, metric or [], export, no_color)
    return Exit.ERROR if altered or any(r.same is False for r in replays) else Exit.DONE


def _replays(cluster: kube.Cluster, name: str, entry: dict[str, Any]) -> list[records.Replay]:
    try:
        maps = cluster.records(name)
    except CliError as exc:  # may read resources, but not ConfigMaps
        output.hint(f"records cannot be read: {exc}")
        return []
    return records.of_revision(maps, str(entry.get("revision")))


def _keep(
    replay: records.Replay | None, plot: str | None, metrics: list[str], export: str | None, no_color: bool = False
) -> None:
    """Draw and save what was asked for. Raises CliError."""
    if not plot and not export:
        return
    if replay is None:
        raise CliError("no record is kept, so there is nothing to draw or to save", Exit.NOT_FOUND)
    if plot:
        try:
            drawn = records.pictures(replay.data, metrics, svg=plot != "-")
        except ValueError as exc:
            raise CliError(f"{replay.title}: {exc}") from None
        if plot == "-":
            print("\n" + drawn)
        else:
            _write(plot, drawn.encode(), no_color)
    if export:
        _write(export, replay.data, no_color)


def _write(path: str, data: bytes, no_color: bool) -> None:
    try:
        Path(path).write_bytes(data)
    except OSError as exc:
        raise CliError(f"cannot write {path}: {exc.strerror}") from None
    output.hint(f"wrote {path}", no_color)


def _shown(replay: records.Replay, digest: str, color: bool) -> str:
    lines = [output.paint(f"record {replay.title}", "bold", color)]
    if replay.verdict:
        lines.append(view.analysis(replay.verdict, color))
    style = {True: "green", False: "red", None: "yellow"}[replay.same]
    lines.append(output.paint(replay.note, style, color))
    if replay.digest:
        decided = " (the one that decided)" if replay.digest == digest else ""
        lines.append(f"digest {replay.digest}{decided}")
    return "\n".join(lines)


def _from_file(path: str, form: str, color: bool, plot: str | None, metrics: list[str], export: str | None) -> int:
    try:
        data = Path(path).read_bytes()
    except OSError as exc:
        raise CliError(f"cannot read {path}: {exc.strerror}") from None
    replay = records.replay(data, path)
    if not replay.verdict:
        raise CliError(f"{path}: {replay.note}")
    shown = _shown(replay, "", color)
    print(output.data(_finite(replay.shown()), form) if form != options.View.TABLE else shown)
    _keep(replay, plot, metrics, export, not color)
    return Exit.DONE if replay.same else Exit.ERROR


def _finite(value: Any) -> Any:
    """JSON has no infinity: such bounds become null."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


def _story(entry: dict[str, Any], color: bool) -> str:
    result = entry.get("result") or "inProgress"
    shown = output.paint(result, view.RESULT_STYLES.get(result, ""), color)
    by = f" by {entry['by']}" if entry.get("by") else ""
    lines = [f"revision {entry.get('number')} ({entry.get('revision')}): {shown}{by}"]
    lines += [f"  at        {entry['at']}"] if entry.get("at") else []
    lines += [f"  because   {entry['reason']}"] if entry.get("reason") else []
    lines += [f"  ran       {entry['algorithm']}"] if entry.get("algorithm") else []
    lines += [f"  image     {entry['image']}"] if entry.get("image") else []
    numbers = [f"accept length {entry['acceptLength']}"] if entry.get("acceptLength") else []
    numbers += [f"{entry['throughput']} tok/s"] if entry.get("throughput") else []
    lines += [f"  measured  {', '.join(numbers)}"] if numbers else []
    for note in entry.get("log") or []:
        lines.append(f"  {note.get('at', ''):<22}{note.get('by', '')}: {note.get('text', '')}")
    return "\n".join(lines)
