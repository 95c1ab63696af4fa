"""What the command line says when the cluster, or the way to it, is not as it should be."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddtreectl import kube
from ddtreectl.exits import CliError, Exit

pytestmark = pytest.mark.unit


def kubeconfig(folder: Path, server: str) -> str:
    path = folder / "config"
    context = {"cluster": "c", "user": "alice", "namespace": "llm"}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "alice", "user": {"token": "t"}}],
        "contexts": [{"name": "prod", "context": context}],
        "current-context": "prod",
    }
    path.write_text(yaml.safe_dump(config))
    return str(path)


def test_the_context_gives_namespace_and_user(tmp_path: Path) -> None:
    cluster = kube.connect(kubeconfig=kubeconfig(tmp_path, "http://127.0.0.1:9"))
    assert (cluster.namespace, cluster.user) == ("llm", "alice")
    assert kube.connect("other", kubeconfig(tmp_path, "http://127.0.0.1:9")).namespace == "other"


@pytest.mark.parametrize(
    ("text", "context", "words"),
    [
        (None, None, "does not exist; set KUBECONFIG or pass --kubeconfig FILE"),
        ("a: [", None, "cannot be used"),
        ("just text", None, "cannot be used: it is no kubeconfig"),
        ("{}", None, "cannot be used"),
        ("good", "prud", 'no context "prud"'),
    ],
)
def test_a_kubeconfig_that_cannot_be_used(tmp_path: Path, text: str | None, context: str | None, words: str) -> None:
    path = kubeconfig(tmp_path, "http://127.0.0.1:9")
    if text is None:
        Path(path).unlink()
    elif text != "good":
        Path(path).write_text(text)
    with pytest.raises(CliError) as caught:
        kube.connect(kubeconfig=path, context=context)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_cluster_that_does_not_answer(tmp_path: Path) -> None:
    cluster = kube.connect(kubeconfig=kubeconfig(tmp_path, "http://127.0.0.1:9"))
    with pytest.raises(
        kube.UnreachableError, match=r"cannot reach the cluster at http://127.0.0.1:9 \(Connection refus"
    ):
        cluster.all()


class Server(ThreadingHTTPServer):
    """Answers every request with what ``answers`` says for its path, or with 404."""

    answers: dict[str, tuple[int, Any]]


@pytest.fixture
def server() -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = Server.answers.get(self.path.split("?")[0], (404, "404 page not found\n"))
            body = found[1] if isinstance(found[1], str) else json.dumps(found[1])
            self.send_response(found[0])
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            pass

    with Server(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield http
        http.shutdown()
        thread.join()


PATH = "/apis/ddtree.dev/v1alpha1/namespaces/llm/ddtreedeployments"


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        ((404, "404 page not found\n"), Exit.ERROR, "does not know DDTreeDeployment: install the chart"),
        ((401, {"message": "Unauthorized"}), Exit.ERROR, "does not accept these credentials"),
        (
            (403, {"message": 'x is forbidden: User "a" cannot'}),
            Exit.ERROR,
            'not allowed: x is forbidden: User "a" cannot',
        ),
        ((500, {"message": "etcdserver: leader changed"}), Exit.ERROR, "the cluster answers 500"),
        (
            (404, {"message": 'ddtreedeployments.ddtree.dev "qwen" not found'}),
            Exit.NOT_FOUND,
            'no DDTreeDeployment "qwen"',
        ),
    ],
)
def test_answers_that_are_refusals(
    server: Server, tmp_path: Path, answer: tuple[int, Any], code: Exit, words: str
) -> None:
    Server.answers = {f"{PATH}/qwen": answer}
    cluster = kube.connect(kubeconfig=kubeconfig(tmp_path, f"http://127.0.0.1:{server.server_port}"))
    with pytest.raises(CliError) as caught:
        cluster.get("qwen")
    assert words in str(caught.value)
    assert caught.value.code == code
    assert "\n" not in str(caught.value)


def test_a_name_alike_is_suggested(server: Server, tmp_path: Path) -> None:
    Server.answers = {
        f"{PATH}/qwen": (404, {"message": '"qwen" not found'}),
        PATH: (200, {"items": [{"metadata": {"name": "qwen3", "namespace": "llm"}}]}),
    }
    cluster = kube.connect(kubeconfig=kubeconfig(tmp_path, f"http://127.0.0.1:{server.server_port}"))
    with pytest.raises(CliError, match=r'no DDTreeDeployment "qwen" in namespace "llm"; did you mean qwen3\?'):
        cluster.get("qwen")


@pytest.mark.parametrize("follow", [False, True])
def test_a_log_is_read_by_the_line(server: Server, tmp_path: Path, follow: bool) -> None:
    Server.answers = {"/api/v1/namespaces/llm/pods/build-1/log": (200, "#1 pulling\n#2 done\nno end of line")}
    cluster = kube.connect(kubeconfig=kubeconfig(tmp_path, f"http://127.0.0.1:{server.server_port}"))
    assert list(cluster.log("build-1", follow)) == ["#1 pulling", "#2 done", "no end of line"]
