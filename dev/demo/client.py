"""The client that keeps asking during the demo. Runs in a pod, with nothing but Python's standard library.

Every request is a new connection and is never retried, so that a gap of any kind is seen. One JSON line per failure,
a running total every ten requests.
"""

import json
import os
import signal
import time
import urllib.request

URL = os.environ["TARGET"] + "/generate"
PROMPTS = json.loads(os.environ["PROMPTS"])
EVERY = float(os.environ.get("EVERY", "1.0"))
PATIENCE = float(os.environ.get("PATIENCE", "120"))  # seconds for one request
TOKENS = int(os.environ.get("TOKENS", "8"))
stop = False


def _stop(*_: object) -> None:
    global stop
    stop = True


def ask(prompt: str) -> str:
    """Send one request; "" when it was answered with text, else what went wrong."""
    body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS}}
    request = urllib.request.Request(URL, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return "" if "text" in json.load(answer) else "an answer without text"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    signal.signal(signal.SIGTERM, _stop)
    count = failed = 0
    while not stop:
        began = time.time()
        error = ask(PROMPTS[count % len(PROMPTS)])
        count += 1
        if error:
            failed += 1
            print(json.dumps({"at": began, "seconds": round(time.time() - began, 2), "error": error}), flush=True)
        if error or count % 10 == 0:
            print(json.dumps({"requests": count, "failed": failed}), flush=True)
        time.sleep(max(0.0, EVERY - (time.time() - began)))
    print(json.dumps({"requests": count, "failed": failed}), flush=True)


if __name__ == "__main__":
    main()
