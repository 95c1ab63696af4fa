"""Puts the verbs together."""

from __future__ import annotations

import typer

from ddtreectl.verbs import act, explain, get, history, image, lint, logs, nodes, plan, status, version


def build() -> typer.Typer:
    """The command tree."""
    app = typer.Typer(
        help="Follow and steer rollouts of DDTreeDeployments. Exit codes: 0 done, 1 error, 2 rolled back, "
        "3 still going, 4 not found.",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    rollout = typer.Typer(
        help="Where a rollout stands, what was tried, and commands to it.", no_args_is_help=True, rich_markup_mode=None
    )
    rollout.command()(status.status)
    rollout.command()(history.history)
    for verb, about in act.VERBS.items():
        rollout.command()(act.command(verb, about))
    rollout.command()(act.undo)
    app.command()(get.get)
    app.add_typer(rollout, name="rollout")
    images = typer.Typer(help="Images that the operator built.", no_args_is_help=True, rich_markup_mode=None)
    images.callback()(_images)
    images.command()(image.inspect)
    app.add_typer(images, name="image")
    build = typer.Typer(help="Builds of engine images.", no_args_is_help=True, rich_markup_mode=None)
    build.callback()(_builds)
    build.command()(logs.logs)
    app.add_typer(build, name="build")
    for command in (plan.plan, explain.explain, nodes.nodes, lint.lint, version.version):
        app.command()(command)
    return app


def _builds() -> None:
    """Builds of engine images."""


def _images() -> None:
    """Images that the operator built."""
