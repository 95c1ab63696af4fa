"""What goes wrong before and during a build, each as one sentence a user can act on."""

from __future__ import annotations


class BuildError(Exception):
    """The build cannot be started as asked; ``str()`` is one sentence: what is wrong, where, what to do."""


class RegistryError(Exception):
    """The registry gave no usable answer; ``str()`` is one sentence. ``heals`` says whether waiting may help."""

    def __init__(self, sentence: str, *, heals: bool) -> None:
        super().__init__(sentence)
        self.heals = heals
