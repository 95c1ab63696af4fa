"""Version of the engine that is played."""

__version__ = "0.5.23"
