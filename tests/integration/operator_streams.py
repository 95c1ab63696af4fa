"""Streamed answers that stay under way for as long as a test likes, asked for in the client's pod.

The simulated engines are slowed down while they stream, and sped up when what a test is about has happened.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence

from ddtree_operator.api.names import LABEL_REVISION
from integration.operator_cluster import Installed

PYTHON = ("exec", "client", "--", "python3", "-u", "-c")
SLOW, FAST = 2, 0.001  # seconds a step: an answer takes minutes, or no time
# Streams of an answer as long as it may be, compared with the answer in one piece, event by event.
ASK = """
import json, os, sys, threading, urllib.request as web
def say(text):
    os.write(1, text.encode() + b"\\n")  # in one piece: others say something, too
target, count, headers = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
def ask(prompt, **more):
    body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 200}, **more}
    head = {"Content-Type": "application/json", **headers}
    return web.urlopen(web.Request(target + "/generate", json.dumps(body).encode(), head), timeout=300)
for number in range(100):
    whole = json.load(ask(f"story {number}"))
    if whole["meta_info"]["completion_tokens"] == 200:
        break
def follow():
    text = None
    for line in ask(f"story {number}", stream=True):
        data = line.strip().removeprefix(b"data: ")
        if data == b"[DONE]":
            return "" if event.get("output_ids") == whole["output_ids"] else "not the whole answer"
        if data:
            event = json.loads(data)
            if not whole["text"].startswith(event["text"]) or len(event["text"]) < len(text or ""):
                return "another text"
            if text is None:
                say("begun")
            text = event["text"]
    return f"cut off after {len(text or '')} characters"
def run():
    try:
        wrong = follow()
    except Exception as error:
        wrong = repr(error)
    say(wrong or "whole")
threads = [threading.Thread(target=run) for _ in range(count)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
# Sets the pace of engines' streams: at once, or ("leaving") as soon as SIGTERM has reached them. An engine that cannot
# be reached time and again has left.
PACE = """
import collections, json, sys, time, urllib.error, urllib.request as web
seconds, when, *left = sys.argv[1:]
missed = collections.Counter()
def tell(at):
    web.urlopen(web.Request(at + "/sim", json.dumps({"stream_delay": seconds}).encode()), timeout=5).read()
def drains(at):
    try:
        web.urlopen(at + "/health", timeout=5).read()
    except urllib.error.HTTPError:
        return True
    return False
while left:
    for at in list(left):
        try:
            if when == "now" or drains(at):
                tell(at)
                left.remove(at)
                print(at if when == "now" else "drains", flush=True)
            missed[at] = 0
        except OSError as error:
            print(f"{at}: {error!r}", flush=True)
            missed[at] += 1
            if missed[at] == 4:
                left.remove(at)
    time.sleep(0.1)
"""


def engines_at(operator: Installed, namespace: str, revision: str) -> list[str]:
    """Addresses of a revision's engines."""
    pods = operator.children(namespace, "pods", f"{LABEL_REVISION}={revision}")
    return [f"http://{pod['status']['podIP']}:30000" for pod in pods if "podIP" in pod["status"]]


def pace(operator: Installed, namespace: str, engines: Sequence[str], seconds: float) -> None:
    """Have engines take so long for a step of a stream, of those under way, too."""
    told = operator.api(namespace).kubectl(*PYTHON, PACE, str(seconds), "now", *engines).stdout.splitlines()
    assert not set(engines) - set(told), told


def hurry_when_leaving(operator: Installed, namespace: str, engines: Sequence[str]) -> int:
    """Let streams come to their end once their engines have got SIGTERM; how many engines still streamed then.

    An engine without a stream ends at SIGTERM, and is not counted.
    """
    told = operator.api(namespace).kubectl(*PYTHON, PACE, str(FAST), "leaving", *engines).stdout
    print(told)
    return told.count("drains\n")


class Streams:
    """Some streams of one address, all of which have begun; what is left of them ends with the block.

    ``headers`` are the requests'.
    """

    def __init__(
        self, operator: Installed, namespace: str, target: str, count: int, headers: dict[str, str] | None = None
    ) -> None:
        self._operator, self._count = operator, count
        self._lines: list[str] = []
        self._process = operator.api(namespace).started(*PYTHON, ASK, target, str(count), json.dumps(headers or {}))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Streams:
        self._operator.until(
            lambda: self._lines.count("begun") == self._count or not self.under_way(), "the streams have begun"
        )
        assert self.under_way(), self._told()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._reader.join(30)
        with self._process:  # closes its pipes
            pass

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line.strip())

    @property
    def _ended(self) -> list[str]:
        return [line for line in self._lines if line != "begun"]

    def _told(self) -> str:
        code = self._process.poll()
        words = self._process.stderr.read() if code is not None and self._process.stderr else ""
        return f"{self._lines} {words}"

    def under_way(self) -> bool:
        """Whether none has ended."""
        return not self._ended and self._process.poll() is None

    def end(self) -> None:
        """Each must have come, or come now, to its end, with every token of the answer."""
        self._process.wait(60)
        self._reader.join(30)
        assert self._ended == ["whole"] * self._count, self._told()
