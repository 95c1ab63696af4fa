"""HTTP side: SGLang's endpoints as far as this project uses them."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from dataclasses import fields, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sglang.sim.model import decode, encode, generate
from sglang.sim.script import Script, Settings, accept_length
from sglang.version import __version__

try:  # the plugin's own piece, where the plugin is installed
    from sglang_ddtree import live
except ImportError:
    live = None  # type: ignore[assignment]


class Engine(ThreadingHTTPServer):
    """State shared by the handler threads."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, settings: Settings, script: Script) -> None:
        super().__init__((settings.host, settings.port), Handler)
        self.settings = settings
        self.script = script
        self.accept = accept_length(settings, script)
        self.draining = threading.Event()
        self.lock = threading.Lock()
        self.running = 0  # requests that are being answered, of any kind
        self.seen = 0  # /generate requests
        self.requests = self.prompt_tokens = self.tokens = self.steps = self.accepted = 0
        self.generate_seconds = 0.0
        self.live = live.Live() if live and os.environ.get(live.TOKEN_ENV) else None

    def drain(self) -> None:
        """Wait for the requests in flight (bounded), then stop. For a thread of its own."""
        self.draining.set()
        deadline = time.monotonic() + self.script.drain
        quiet = 0
        while time.monotonic() < deadline and quiet < 3:
            time.sleep(0.02)
            with self.lock:
                quiet = quiet + 1 if self.running == 0 else 0
        self.shutdown()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes: the second would wait for a delayed ACK
    server: Engine

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: tests read stderr for the engine's own words."""

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.running += 1
        try:
            self._get(self.path.partition("?")[0])
        finally:
            with self.server.lock:
                self.server.running -= 1

    def do_POST(self) -> None:
        with self.server.lock:
            self.server.running += 1
        try:
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                body = json.loads(raw)
            except ValueError:
                self._error(400, "the body is not JSON")
                return
            path, engine_live = self.path.partition("?")[0], self.server.live
            if path == "/generate":
                self._generate(body)
            elif path == "/sim":
                self._play(body)
            elif live and engine_live is not None and path == live.PATH:
                self._prompts(body)
            elif path in ("/tokenize", "/v1/tokenize"):
                ids = encode(str(body.get("prompt", "")))
                self._json({"tokens": ids, "count": len(ids), "max_model_len": 8192})
            else:
                self._error(404, "Not Found")
        finally:
            with self.server.lock:
                self.server.running -= 1

    def _get(self, path: str) -> None:
        engine = self.server
        if path in ("/health", "/health_generate"):
            if engine.draining.is_set():
                self._send(503, b"", "text/plain")
                return
            time.sleep(engine.script.health_delay)
            self._send(200, b"", "text/plain")
        elif path in ("/server_info", "/get_server_info"):
            self._json(server_info(engine))
        elif path == "/model_info":
            self._json({"model_path": engine.settings.model_path, "is_generation": True})
        elif path == "/v1/models":
            self._json({"object": "list", "data": [{"id": engine.settings.model_path, "object": "model"}]})
        elif path == "/metrics" and engine.settings.enable_metrics and not engine.script.no_metrics:
            self._send(200, metrics(engine).encode(), "text/plain; version=0.0.4; charset=utf-8")
        else:
            self._error(404, "Not Found")

    def _play(self, changes: dict[str, Any]) -> None:
        """Change the script while it plays."""
        engine = self.server
        try:
            kinds = {f.name: type(f.default) for f in fields(Script)}
            script = replace(engine.script, **{k: kinds[k](v) for k, v in changes.items()})
        except (KeyError, ValueError) as error:
            self._error(400, f"no such setting: {error}")
            return
        engine.script, engine.accept = script, accept_length(engine.settings, script)
        self._json({"accept": engine.accept})

    def _prompts(self, body: dict[str, Any]) -> None:
        """Users' prompts, as the plugin gives them."""
        refused = live.refusal(os.environ[live.TOKEN_ENV], self.headers.get(live.TOKEN_HEADER, ""))
        if refused is not None or self.server.live is None:
            self._error(*(refused or (404, "Not Found")))
            return
        with self.server.lock:
            given = self.server.live.take(int(body["longest"]))
        self._json(given)

    def _generate(self, body: dict[str, Any]) -> None:
        engine, script = self.server, self.server.script
        with engine.lock:
            engine.seen += 1
            seen = engine.seen
        if script.crash_after and seen > script.crash_after:
            print(f"RuntimeError: simulated crash after {script.crash_after} requests", flush=True)
            os._exit(1)
        if script.hang_every and seen % script.hang_every == 0:
            while True:  # as long as the process lives, like a stuck scheduler
                time.sleep(3600)
        if script.html_every and seen % script.html_every == 0:
            self._send(200, b"<html><body><h1>Please log in</h1></body></html>", "text/html")
            return
        if script.error_every and seen % script.error_every == 0:
            self._error(500, "simulated internal error")
            return
        ids = body.get("input_ids")
        if ids is None:
            text = body.get("text")
            if not isinstance(text, str):
                self._error(400, "Either text, input_ids or input_embeds should be provided.")
                return
            ids = encode(text)
        if engine.live is not None:
            with engine.lock:
                engine.live.offer(str(body.get("rid") or ""), ids, plain=not body.get("image_data"))
        params = body.get("sampling_params") or {}
        max_new = int(params.get("max_new_tokens", 128))
        start = time.monotonic()
        answer = generate(ids, max_new, script, engine.accept)
        steps = answer.verify_steps or len(answer.ids)
        if body.get("stream"):
            self._begin_stream()
            for step in range(1, steps):
                self._stream_step()
                self._event({"text": decode(answer.ids[: step * len(answer.ids) // steps]), "meta_info": {}})
        else:
            delay = steps * script.step_delay
            if script.jitter:
                delay *= random.lognormvariate(0, script.jitter)
            time.sleep(delay)
        seconds = time.monotonic() - start
        meta: dict[str, Any] = {
            "id": f"sim-{seen}",
            "finish_reason": {"type": "stop", "matched": 2}
            if answer.finished == "stop"
            else {"type": "length", "length": max_new},
            "prompt_tokens": len(ids),
            "completion_tokens": len(answer.ids),
            "cached_tokens": 0,
            "e2e_latency": seconds,
        }
        if answer.verify_steps:
            proposed = answer.verify_steps * (engine.settings.draft_tokens - 1)
            meta["spec_accept_rate"] = answer.accepted / proposed if proposed else 0.0
            meta["spec_accept_length"] = len(answer.ids) / answer.verify_steps
            meta["spec_num_correct_drafts"] = answer.accepted
            meta["spec_num_proposed_drafts"] = proposed
            meta["spec_verify_ct"] = max(1, round(answer.verify_steps * script.meta_steps))
        if body.get("return_logprob"):
            pairs = list(zip(answer.ids, answer.gaps, answer.rivals, strict=True))
            meta["output_token_logprobs"] = [[-0.1, i, None] for i, _, _ in pairs]
            if body.get("top_logprobs_num"):
                meta["output_top_logprobs"] = [[[-0.1, i, None], [-0.1 - g, r, None]] for i, g, r in pairs]
        meta.pop(script.drop_field, None)
        with engine.lock:
            engine.requests += 1
            engine.prompt_tokens += len(ids)
            engine.tokens += len(answer.ids)
            engine.steps += answer.verify_steps
            engine.accepted += answer.accepted
            engine.generate_seconds += seconds
        whole = {"text": decode(answer.ids), "output_ids": answer.ids, "meta_info": meta}
        if body.get("stream"):
            self._event(whole)
            self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")
        else:
            self._json(whole)

    def _begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.close_connection = True
        self.end_headers()

    def _stream_step(self) -> None:
        """As long as a step takes, by the script as it is meanwhile."""
        began = time.monotonic()
        while True:
            script = self.server.script
            left = began + (script.stream_delay or script.step_delay) - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(0.02, left))

    def _event(self, data: object) -> None:
        self._chunk(b"data: " + json.dumps(data).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _json(self, answer: object) -> None:
        self._send(200, json.dumps(answer).encode(), "application/json")

    def _error(self, status: int, message: str) -> None:
        self._send(status, json.dumps({"error": {"message": message}}).encode(), "application/json")

    def _send(self, status: int, data: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if self.server.draining.is_set():
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        self.wfile.write(data)


def server_info(engine: Engine) -> dict[str, Any]:
    """As SGLang's /server_info: its arguments, and the state of each rank."""
    s = engine.settings
    speculative = s.algorithm != "NONE"
    return {
        "model_path": s.model_path,
        "revision": s.revision,
        "dtype": "float32" if s.dtype == "auto" else s.dtype,
        "tp_size": s.tp_size,
        # SGLang with the DDTree plugin names the algorithm that the plugin extends, too.
        "speculative_algorithm": ("DFLASH" if s.algorithm == "DDTREE" else s.algorithm) if speculative else None,
        "launch_command": s.command,
        "speculative_draft_model_path": s.draft_model_path,
        "speculative_num_draft_tokens": s.draft_tokens if speculative else None,
        "speculative_ddtree_budget": s.budget,
        "internal_states": [{"avg_spec_accept_length": engine.accepted / engine.steps + 1} if engine.steps else {}],
        "version": __version__,
        "simulated": True,
    }


def metrics(engine: Engine) -> str:
    """Prometheus text with SGLang's names."""
    model = f'model_name="{engine.settings.model_path}"'
    streaming = f'{model},is_streaming="false"'
    with engine.lock:
        rows = [
            ("num_requests_total", "counter", streaming, engine.requests),
            ("prompt_tokens_total", "counter", streaming, engine.prompt_tokens),
            ("generation_tokens_total", "counter", streaming, engine.tokens),
            ("num_running_reqs", "gauge", model, max(0, engine.running - 1)),
            ("num_queue_reqs", "gauge", model, 0),
            ("gen_throughput", "gauge", model, engine.tokens / max(engine.generate_seconds, 1e-9)),
        ]
        if engine.settings.algorithm != "NONE":
            rows.append(("spec_verify_calls_total", "counter", model, engine.steps))
            length = engine.accepted / engine.steps + 1 if engine.steps else 0.0
            rows.append(("spec_accept_length", "gauge", model, length))
            proposed = engine.steps * (engine.settings.draft_tokens - 1)
            rows.append(("spec_accept_rate", "gauge", model, engine.accepted / proposed if proposed else 0.0))
    lines = []
    for name, kind, labels, value in rows:
        lines += [f"# HELP sglang:{name} Simulated.", f"# TYPE sglang:{name} {kind}"]
        lines.append(f"sglang:{name}{{{labels}}} {float(value)}")
    return "\n".join(lines) + "\n"
