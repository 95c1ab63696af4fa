"""Commands that reach the operator through one annotation: promote, abort, retry, undo, pause, resume, skip."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class Verb(StrEnum):
    """What a person, or an alert, asks of a rollout."""

    PROMOTE = "promote"
    ABORT = "abort"
    RETRY = "retry"
    UNDO = "undo"
    PAUSE = "pause"
    RESUME = "resume"
    SKIP = "skip"


class ActionRequest(BaseModel):
    """Value of the annotation ``ddtree.dev/action``; acted on once per ``id``."""

    model_config = ConfigDict(extra="forbid")

    id: str = Field(min_length=1, max_length=64)
    verb: Verb
    revision: str | None = Field(default=None, description="acts only while this revision is the one in question")
    to: str | None = Field(default=None, description="undo: number or hash of the revision to go back to")
    by: str = Field(default="", max_length=200)
    reason: str = Field(default="", max_length=500)
    at: str = Field(default="", description="ISO 8601, UTC")
