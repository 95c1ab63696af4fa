"""Replace attributes of SGLang and be able to prove later that the replacement is in force.

SGLang's own ``HookRegistry`` logs a hook that does not apply and goes on; here that would mean wrong text or a crash
much later, so hooks are installed directly and checked."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, NoReturn

Wrapper = Callable[[Any], Any]


def refuse(sentence: str) -> NoReturn:
    """Print the one line that the operator and the user look for, and end the process with status 1."""
    print(f"ddtree: refused: {sentence}", file=sys.stderr, flush=True)
    raise SystemExit(1)


def _unwrap(value: Any) -> Any:
    """The plain function behind a static or class method."""
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


def _in_force(current: Any, ours: Any) -> bool:
    """Whether calling ``current`` reaches ``ours``: it is ours, or hooks stacked later (each marked with
    ``__wrapped__``)."""
    current, ours = _unwrap(current), _unwrap(ours)
    while current is not None:
        if current is ours:
            return True
        current = _unwrap(getattr(current, "__wrapped__", None))
    return False


class Hooks:
    """Hooks by dotted path ``package.module:Class.attribute`` or ``package.module:attribute``."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.failed: dict[str, str] = {}
        self._installed: dict[str, Any] = {}

    @staticmethod
    def _parent(path: str) -> tuple[Any, str]:
        module, _, attribute = path.partition(":")
        parent: Any = importlib.import_module(module)
        *parents, name = attribute.split(".")
        for part in parents:
            parent = getattr(parent, part)
        return parent, name

    def install(self, path: str, wrap: Wrapper) -> None:
        """Replace the object at ``path`` by ``wrap(object)``. Copies made by ``from module import name`` are replaced
        too."""
        if path in self._installed:
            return
        try:
            parent, name = self._parent(path)
            original = getattr(parent, name)
            replacement = wrap(original)
            replacement.__wrapped__ = original
            setattr(parent, name, replacement)
        except Exception as error:
            self.failed[path] = f"{type(error).__name__}: {error}"
            return
        self._installed[path] = replacement
        if not isinstance(parent, type):
            for module in list(sys.modules.values()):
                if getattr(module, "__name__", "").startswith("sglang.") and vars(module).get(name) is original:
                    setattr(module, name, replacement)

    def missing(self) -> dict[str, str]:
        """Paths that are not in force, each with the reason."""
        out = dict(self.failed)
        for path, replacement in self._installed.items():
            parent, name = self._parent(path)
            if not _in_force(getattr(parent, name, None), replacement):
                out[path] = "something replaced it after us"
        return out

    def require(self) -> None:
        """Refuse to go on when a hook is not in force."""
        for path, reason in self.missing().items():
            refuse(f"{self.owner}: the hook on {path} is not in force ({reason}); use SGLang 0.5.23")
