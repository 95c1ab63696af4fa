"""ddtreectl, also kubectl-ddtree."""


def main() -> None:
    """Run the command line."""
    raise SystemExit(1)
