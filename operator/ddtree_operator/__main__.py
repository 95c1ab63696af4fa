"""``ddtree-operator``: start the operator with a settings file."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys


def main(argv: list[str] | None = None) -> None:
    """Run until told to stop. Exits with 2 and one sentence when the settings are not usable."""
    parser = argparse.ArgumentParser(prog="ddtree-operator", description=__doc__)
    parser.add_argument("--config", default="/etc/ddtree/config.yaml", help="settings file (the chart's ConfigMap)")
    parser.add_argument("--namespace", action="append", default=[], help="namespace to watch; may be repeated")
    parser.add_argument("--host", default="0.0.0.0", help="address of /healthz, /readyz and /metrics")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    options = parser.parse_args(argv)

    import kopf
    from kopf._core.engines import peering

    from ddtree_operator.handlers import logs
    from ddtree_operator.handlers.main import build
    from ddtree_operator.handlers.settings import SettingsError, load

    try:
        settings = load(options.config)
    except SettingsError as error:
        print(f"ddtree-operator: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    namespaces = options.namespace or list(settings.namespaces)
    if not namespaces:
        print("ddtree-operator: no namespace to watch; set watchNamespaces or give --namespace", file=sys.stderr)
        raise SystemExit(2)
    logs.setup(options.log_level, settings.log_format)
    registry = build(settings, namespaces, options.host, options.port)
    # kopf would ask the user database who it is, and a container's user is not in it.
    identity = peering.Identity(os.environ.get("HOSTNAME", "ddtree-operator"))
    asyncio.run(kopf.operator(registry=registry, standalone=True, namespaces=namespaces, identity=identity))


if __name__ == "__main__":
    main()
