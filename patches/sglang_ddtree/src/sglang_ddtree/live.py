"""Users' prompts for the operator's analysis, by opt-in: newest few, in memory, only while someone with the token asks.

Off unless ``SGLANG_DDTREE_LIVE_TOKEN`` names a file, and the file holds a token. Even then nothing is kept until
``POST /ddtree/prompts`` is called with that token; each call hands over what was kept and keeps on for ``LEASE``
seconds more. See docs/decisions/011-live-prompts.md. The first half is pure; SGLang is touched in the second."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_ddtree.hooks import Hooks

logger = logging.getLogger(__name__)

TOKEN_ENV = "SGLANG_DDTREE_LIVE_TOKEN"  # path of a file, so that a Secret may come and go while the engine runs
TOKEN_HEADER = "x-ddtree-token"
PATH = "/ddtree/prompts"
OWN = "ddtree-probe-"  # requests of this prefix are the operator's own
HEALTH = "HEALTH_CHECK"
TOKEN_LENGTH = 16  # characters of the shortest token that counts
LEASE = 60.0  # seconds without a call after which everything kept is dropped
KEPT = 64  # prompts
LONGEST = 16_384  # tokens of one
EVERY = 0.1  # seconds between two that are kept


class Live:
    """What is kept. Not for threads: the tokenizer manager and the HTTP handlers share one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = 0.0  # nothing is kept after this
        self._next = 0.0
        self._longest = LONGEST
        self._kept: deque[list[int]] = deque(maxlen=KEPT)
        self._skipped = {"long": 0, "other": 0}

    @property
    def asked(self) -> bool:
        """Whether anybody has asked lately: all that a request costs while nobody does."""
        return self._until > 0

    def armed(self) -> bool:
        """Whether prompts are kept at present; forgets everything when the time is up."""
        if self._clock() < self._until:
            return True
        self._forget()
        return False

    def offer(self, rid: str, ids: Sequence[int] | None, plain: bool) -> None:
        """A request came. ``plain``: text only, nothing but its token ids decides what the model sees."""
        if not self.asked or not self.armed() or rid.startswith((OWN, HEALTH)):
            return
        now = self._clock()
        if now < self._next:
            return
        if not plain or not ids:
            self._skipped["other"] += 1
        elif len(ids) > self._longest:
            self._skipped["long"] += 1
        else:
            self._next = now + EVERY
            self._kept.append(list(ids))

    def take(self, longest: int) -> dict[str, Any]:
        """Hand over what was kept and go on keeping prompts of at most ``longest`` tokens for LEASE seconds."""
        self.armed()
        given = {"prompts": list(self._kept), "skipped": dict(self._skipped), "lease": LEASE}
        self._forget()
        self._longest = max(1, min(longest, LONGEST))
        self._until = self._clock() + LEASE
        return given

    def _forget(self) -> None:
        self._until = 0.0
        self._kept.clear()
        self._skipped = {"long": 0, "other": 0}


def refusal(path: str, given: str) -> tuple[int, str] | None:
    """Status and sentence for a call that may not have prompts; None for one that may. ``path``: the token's file."""
    try:
        token = Path(path).read_text().strip()
    except OSError:
        return 404, "live prompts are off: this engine has no token"
    if len(token) < TOKEN_LENGTH:
        return 404, f"live prompts are off: the token is shorter than {TOKEN_LENGTH} characters"
    if not hmac.compare_digest(token.encode(), given.encode()):
        return 401, "the token is wrong"
    return None


def is_plain(request: Any) -> bool:
    """Whether a tokenized request is text whose ids say everything: no pictures, embeddings, adapters, sessions."""
    odd = (
        "mm_inputs",
        "input_embeds",
        "positional_embed_overrides",
        "token_type_ids",
        "session_id",
        "session_params",
        "lora_id",
        "custom_logit_processor",
    )
    return hasattr(request, "sampling_params") and not any(getattr(request, name, None) is not None for name in odd)


LIVE = Live()
HOOKS = Hooks()
_MANAGER = "sglang.srt.managers.tokenizer_manager:TokenizerManager"


def install(environment: Mapping[str, str] = os.environ) -> None:
    """In the process that parsed the arguments: listen to requests and offer the path. Without the variable nothing is
    touched; a hook that fails leaves the engine as it was."""
    if not environment.get(TOKEN_ENV):
        return
    HOOKS.install(f"{_MANAGER}.__init__", _wrap_init)
    HOOKS.install(f"{_MANAGER}._send_one_request", _wrap_send)
    for path, reason in HOOKS.failed.items():
        logger.warning("ddtree: live prompts are not available: %s: %s", path, reason)


def _wrap_send(original: Any) -> Any:
    async def _send_one_request(self: Any, tokenized_obj: Any) -> Any:
        try:
            if LIVE.asked:
                ids = getattr(tokenized_obj, "input_ids", None)
                LIVE.offer(str(tokenized_obj.rid), ids, is_plain(tokenized_obj))
        except Exception as error:  # a user's request never fails for this
            logger.warning("ddtree: a prompt was not kept: %s", type(error).__name__)
        return await original(self, tokenized_obj)

    return _send_one_request


def _wrap_init(original: Any) -> Any:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _offer_path()

    return init


def _offer_path() -> None:
    server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if server is None or any(getattr(route, "path", "") == PATH for route in server.app.router.routes):
        return  # an engine without HTTP, or a second one in this process
    server.app.router.add_route(PATH, _answer, methods=["POST"])


async def _answer(request: Any) -> Any:
    from starlette.responses import JSONResponse

    refused = refusal(os.environ.get(TOKEN_ENV, ""), request.headers.get(TOKEN_HEADER, ""))
    if refused is not None:
        return JSONResponse({"error": {"message": refused[1]}}, status_code=refused[0])
    try:
        longest = int((await request.json())["longest"])
    except (ValueError, KeyError, TypeError):
        return JSONResponse({"error": {"message": 'send {"longest": TOKENS}'}}, status_code=400)
    given = LIVE.take(longest)
    # Forgotten in time even when no further request comes.
    asyncio.get_running_loop().call_later(LEASE + 1, LIVE.armed)
    return JSONResponse(given)
