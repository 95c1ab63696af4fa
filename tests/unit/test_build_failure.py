"""Logs of a real BuildKit 0.34, cut to what matters, and the sentence each becomes."""

from __future__ import annotations

import re

import pytest

from ddtree_operator.build import diagnose, failure_sentence
from ddtree_operator.build.failure import PERMANENT

pytestmark = pytest.mark.unit

A, B = "8c2688de72ed04e4" * 4, "1" * 64
BASE = "10.88.0.1:5000/ddtree/base@sha256:" + "8" * 64
ADD = f"""\
#6 [wheels 1/1] ADD --checksum=sha256:{B} [http://w/k-1-py3-none-any.whl, /wheels/k-1-py3-none-any.whl]
#6 ERROR: {{}}
------
 > [wheels 1/1] ADD --checksum=sha256:{B} [http://w/k-1-py3-none-any.whl, /wheels/k-1-py3-none-any.whl]:
------
"""
PUSH = "error: failed to solve: failed to push 10.88.0.1:5000/x/y:r-1: {}"
HEAD = 'failed to do request: Head "http://10.88.0.1:5000/v2/x/y/blobs/sha256:00": '
META = f"error: failed to solve: {BASE}: failed to resolve source metadata for {BASE}: {{}}"

CASES = {
    "wrong sha256": (
        ADD.format("digest mismatch") + f"error: failed to solve: digest mismatch sha256:{A}: sha256:{B}",
        f"the wheel k-1-py3-none-any.whl has sha256 {A}, but {B} is asked for; correct the sha256 or the address",
        False,
    ),
    "wheel not there": (
        ADD.format("unusable answer") + "error: failed to solve: failed to load cache key: invalid response status 404",
        "the wheel k-1-py3-none-any.whl is not there (404); correct its address or put it into the wheelhouse",
        False,
    ),
    "wheel behind a login": (
        ADD.format("unusable answer") + "error: failed to solve: failed to load cache key: invalid response status 401",
        "the server refuses to hand out the wheel k-1-py3-none-any.whl (401); put it where no credentials are needed",
        False,
    ),
    "wheelhouse busy": (
        ADD.format("unusable answer") + "error: failed to solve: failed to load cache key: invalid response status 503",
        "the server of the wheel k-1-py3-none-any.whl answers 503",
        True,
    ),
    "wheelhouse down": (
        'error: failed to solve: Get "http://10.0.0.9:80/k-1-py3-none-any.whl": dial tcp 10.0.0.9:80: connect: '
        "connection refused",
        "the wheel k-1-py3-none-any.whl cannot be fetched from 10.0.0.9:80: dial tcp 10.0.0.9:80: connect: "
        "connection refused",
        True,
    ),
    "patch does not apply": (
        "#11 0.4 ddtree-patches: error: 0002-y.patch: hunk 3 of sglang/srt/z.py at line 40 does not match\n" * 2,
        "the patch series does not apply: 0002-y.patch: hunk 3 of sglang/srt/z.py at line 40 does not match",
        False,
    ),
    "wheel for another Python": (
        "#8 0.2 ddtree-build: error: the wheel k-1-cp312-cp312-any.whl is for cp312, but the base image has cp311\n",
        "the wheel k-1-cp312-cp312-any.whl is for cp312, but the base image has cp311",
        False,
    ),
    "base image missing": (
        META.format(f"{BASE}: not found"),
        f"the base image {BASE} is not in its registry; correct baseImage or push it there",
        False,
    ),
    "base image's registry down": (
        META.format('failed to do request: Head "http://10.88.0.1:5000/v2/": dial tcp 10.88.0.1:5000: i/o timeout'),
        f"the registry 10.88.0.1:5000 cannot be reached for the base image {BASE}: dial tcp 10.88.0.1:5000: "
        "i/o timeout",
        True,
    ),
    "base image denied": (
        META.format("pull access denied, repository does not exist or may require authorization: insufficient_scope"),
        f"the registry 10.88.0.1:5000 denies access to the base image {BASE}; check push.secretRef and its rights",
        False,
    ),
    "registry down": (
        PUSH.format(HEAD + "dial tcp 10.88.0.1:5000: connect: connection refused"),
        "the registry 10.88.0.1:5000 cannot be reached for the image 10.88.0.1:5000/x/y:r-1: dial tcp "
        "10.88.0.1:5000: connect: connection refused",
        True,
    ),
    "registry denies": (
        PUSH.format(
            "unexpected status from POST request to http://10.88.0.1:5000/v2/x/y/blobs/uploads/: 401 Unauthorized"
        ),
        "the registry 10.88.0.1:5000 denies access to the image 10.88.0.1:5000/x/y:r-1; "
        "check push.secretRef and its rights",
        False,
    ),
    "registry broken": (
        PUSH.format(
            "unexpected status from PUT request to http://10.88.0.1:5000/v2/x/y/manifests/r-1: "
            "500 Internal Server Error"
        ),
        "the registry 10.88.0.1:5000 answers 500 for the image 10.88.0.1:5000/x/y:r-1",
        True,
    ),
    "registry read-only": (
        PUSH.format(
            "unexpected status from POST request to http://10.88.0.1:5000/v2/x/y/blobs/uploads/: 405 Method Not Allowed"
        ),
        "the registry 10.88.0.1:5000 is read-only, so the image 10.88.0.1:5000/x/y:r-1 cannot be pushed",
        False,
    ),
    "plain http not declared": (
        PUSH.format("http: server gave HTTP response to HTTPS client"),
        "the registry 10.88.0.1:5000 speaks plain http; add it to the operator's insecureRegistries",
        False,
    ),
    "builder full": (
        "error: failed to solve: failed to copy: write /var/lib/buildkit/x: no space left on device",
        "no space left on the disk of the builder; free some, or give it a larger volume",
        True,
    ),
    "base image without Python": (
        "#8 0.088 /bin/sh: 1: python3: not found\n"
        'error: failed to solve: process "/bin/sh -c python3 -B /x" did '
        "not complete successfully: exit code: 127",
        "the base image has no python3 on its PATH; use one with Python and torch",
        False,
    ),
    "base image without a shell": (
        'error: failed to solve: process "/bin/sh -c python3" did not complete successfully: runc run failed: '
        'unable to start container process: error during container init: exec: "/bin/sh": stat /bin/sh: no such file',
        "the base image has no shell (/bin/sh); use one with a shell, Python and torch",
        False,
    ),
    "base image of another processor": (
        "#8 0.1 exec /bin/sh: exec format error\nerror: failed to solve: process did not complete",
        "the base image is for another processor than the builder's; use one for that platform",
        False,
    ),
    "step killed": (
        'error: failed to solve: process "/bin/sh -c python3" did not complete successfully: exit code: 137',
        "a build step was killed, most likely for memory; give the builder more",
        True,
    ),
    "builder wants a certificate": (
        "error: listing workers for Build: failed to list workers: Unavailable: connection error: desc = "
        '"error reading server preface: EOF"',
        "the builder hangs up; it may want a client certificate (chart value builder.tlsSecret)",
        True,
    ),
    "builder of another authority": (
        "error: listing workers for Build: failed to list workers: Unavailable: connection error: desc = "
        '"transport: authentication handshake failed: tls: failed to verify certificate: x509: certificate signed by '
        'unknown authority"',
        "the builder shows a certificate of another authority; the Secret builder.tlsSecret must hold the ca.crt "
        "that signed it",
        False,
    ),
    "builder down": (
        "error: listing workers for Build: failed to list workers: Unavailable: connection error: desc = "
        '"transport: Error while dialing: dial tcp 10.96.0.9:1234: connect: connection refused"',
        "the builder cannot be reached: dial tcp 10.96.0.9:1234: connect: connection refused; is buildkitd running?",
        True,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_log_becomes_one_sentence(name: str) -> None:
    log, sentence, heals = CASES[name]
    got = diagnose(log, 1)
    assert got.sentence == sentence
    assert got.heals is heals


@pytest.mark.parametrize("name", CASES)
def test_the_jobs_own_judgement_agrees(name: str) -> None:
    """The Job's script stops retrying by PERMANENT alone; the operator reports by the whole table."""
    log, _, heals = CASES[name]
    assert any(re.search(words, log) for words in PERMANENT) is not heals


def test_an_unknown_error_is_its_own_last_line() -> None:
    log = (
        "#3 DONE 0.1s\n#4 [stage-1 2/5] RUN x\n------\n > x:\n------\nerror: failed to solve: process did odd things\n"
    )
    assert failure_sentence(log, 1) == "the build failed: process did odd things"
    assert failure_sentence("", 137) == "the builder's container was killed (exit 137), most likely for memory"
    assert failure_sentence("", 2) == "the build failed with exit status 2 and left no log"


def test_hostile_output_stays_bounded_and_printable() -> None:
    got = failure_sentence("error: \x1b[31m" + "x" * 100_000 + "\x00\r\n", 1)
    assert len(got) <= 700
    assert got.isprintable()
