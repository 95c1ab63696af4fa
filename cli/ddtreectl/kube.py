"""The cluster as the verbs see it. The only module that touches the Kubernetes client, which it imports when needed.

Everything goes through the resource itself: reads of the resource and its records, and one annotation that is written.
Nothing needs the operator to be up, or a port of its own.
"""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol

from ddtree_operator.api import names
from ddtreectl.exits import CliError, Exit

Object = dict[str, Any]

CONNECT_SECONDS = 5.0
READ_SECONDS = 30.0
FOLLOW_SECONDS = 86400.0  # a build may say nothing for long, and the client takes no endless timeout


class Cluster(Protocol):
    """What verbs need of a cluster. Every method raises CliError."""

    namespace: str
    user: str

    def all(self, everywhere: bool = False) -> list[Object]:
        """The resources of the namespace, or of all."""

    def get(self, name: str) -> Object:
        """One resource; CliError with Exit.NOT_FOUND when there is none of that name."""

    def annotate(self, name: str, key: str, value: str, dry_run: bool = False) -> Object:
        """Merge-patch one annotation and return the resource."""

    def changes(self, name: str, seconds: float) -> Iterator[Object]:
        """The resource now and after each change, until about ``seconds`` have passed or the connection ends."""

    def records(self, name: str) -> list[Object]:
        """ConfigMaps that keep this resource's analysis records."""

    def builds(self, name: str) -> list[Object]:
        """Jobs that build images for this resource, oldest first."""

    def job(self, job: str) -> tuple[Object | None, list[Object]]:
        """A Job (None when it is gone) and its pods, oldest first."""

    def log(self, pod: str, follow: bool) -> Iterator[str]:
        """Lines of a pod's log, as they come."""

    def versions(self) -> dict[str, Any]:
        """What the server says about itself: ``kubernetes`` and the ``api`` versions it serves."""


def connect(
    namespace: str | None = None,
    kubeconfig: str | None = None,
    context: str | None = None,
    timeout: float | None = None,
) -> Cluster:
    """Read the configuration (kubeconfig, else the pod's own) and return a cluster; no request is made yet."""
    from kubernetes import client, config

    settings = client.Configuration()
    settings.retries = 0
    path = kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
    if kubeconfig is None and not _any_exists(path) and os.environ.get("KUBERNETES_SERVICE_HOST"):
        config.load_incluster_config(client_configuration=settings)
        own = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
        here, user = own.read_text().strip() if own.exists() else "default", "serviceaccount"
    else:
        here, user = _from_kubeconfig(path, context, settings)
    if not settings.verify_ssl:  # the kubeconfig says so; no need to say it on every request
        import urllib3

        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
    return _Live(client.ApiClient(settings), namespace or here, user, timeout or READ_SECONDS)


def _any_exists(path: str) -> bool:
    return any(Path(p).expanduser().exists() for p in path.split(os.pathsep) if p)


def _from_kubeconfig(path: str, context: str | None, settings: Any) -> tuple[str, str]:
    """Fill ``settings``; return the context's namespace and who the user is."""
    import yaml
    from kubernetes import config

    if not _any_exists(path):
        raise CliError(f"no cluster is configured: {path} does not exist; set KUBECONFIG or pass --kubeconfig FILE")
    try:
        contexts, active = config.list_kube_config_contexts(config_file=path)
        known = [c["name"] for c in contexts]
        if context is not None and context not in known:
            near = get_close_matches(context, known, n=1) or known[:1]
            raise CliError(f'no context "{context}" in {path}' + (f"; did you mean {near[0]}?" if near else ""))
        config.load_kube_config(config_file=path, context=context, client_configuration=settings)
        chosen = next((c for c in contexts if c["name"] == context), active)["context"]
    except (config.ConfigException, yaml.YAMLError, KeyError, TypeError, OSError, ValueError) as exc:
        why = "it is no kubeconfig" if isinstance(exc, TypeError) else _line(exc)
        raise CliError(f"the kubeconfig {path} cannot be used: {why}") from None
    return chosen.get("namespace") or "default", chosen.get("user") or getpass.getuser()


def _line(exc: BaseException) -> str:
    return " ".join(str(exc).split())[:300] or type(exc).__name__


def _why(exc: BaseException) -> str:
    """The cause in a connection error, without the client's object addresses and numbers."""
    text = _line(getattr(exc, "reason", None) or exc)
    text = text.rpartition(" object at 0x")[2].partition(": ")[2] or text
    return re.sub(r"Failed to establish a new connection: |\[Errno -?\d+\] ", "", text)


class _Live:
    """A cluster through the official client."""

    def __init__(self, api: Any, namespace: str, user: str, timeout: float) -> None:
        self.namespace, self.user = namespace, user
        self._api = api
        self._timeout = (CONNECT_SECONDS, timeout)

    def _custom(self) -> Any:
        from kubernetes import client

        return client.CustomObjectsApi(self._api)

    def _where(self) -> tuple[str, str, str, str]:
        return names.GROUP, names.VERSION, self.namespace, names.PLURAL

    def all(self, everywhere: bool = False) -> list[Object]:
        with self._told("list"):
            if everywhere:
                found = self._custom().list_cluster_custom_object(
                    names.GROUP, names.VERSION, names.PLURAL, _request_timeout=self._timeout
                )
            else:
                found = self._custom().list_namespaced_custom_object(*self._where(), _request_timeout=self._timeout)
        items: list[Object] = found["items"]
        for item in items:  # a list leaves them out of its items
            item.setdefault("apiVersion", names.API_VERSION)
            item.setdefault("kind", names.KIND)
        return items

    def get(self, name: str) -> Object:
        with self._told("get", name):
            found: Object = self._custom().get_namespaced_custom_object(
                *self._where(), name, _request_timeout=self._timeout
            )
        return found

    def annotate(self, name: str, key: str, value: str, dry_run: bool = False) -> Object:
        body = {"metadata": {"annotations": {key: value}}}
        more = {"dry_run": "All"} if dry_run else {}
        with self._told("patch", name):
            found: Object = self._custom().patch_namespaced_custom_object(
                *self._where(),
                name,
                body,
                field_manager="ddtreectl",
                _content_type="application/merge-patch+json",
                _request_timeout=self._timeout,
                **more,
            )
        return found

    def changes(self, name: str, seconds: float) -> Iterator[Object]:
        from kubernetes import watch

        now = self.get(name)
        yield now
        span = max(1, int(seconds))
        with self._told("watch", name):
            events = watch.Watch().stream(
                self._custom().list_namespaced_custom_object,
                *self._where(),
                field_selector=f"metadata.name={name}",
                resource_version=now["metadata"]["resourceVersion"],
                timeout_seconds=span,
                _request_timeout=(CONNECT_SECONDS, span + 10),
            )
            for event in events:
                if event["type"] == "DELETED":
                    raise CliError(f'{names.KIND} "{name}" was deleted', Exit.NOT_FOUND)
                yield event["object"]

    def records(self, name: str) -> list[Object]:
        from kubernetes import client

        with self._told("list"):
            found = client.CoreV1Api(self._api).list_namespaced_config_map(
                self.namespace,
                label_selector=f"{names.LABEL_DEPLOYMENT}={name},{names.LABEL_ROLE}=record",
                _request_timeout=self._timeout,
            )
        return [self._api.sanitize_for_serialization(item) for item in found.items]

    def builds(self, name: str) -> list[Object]:
        from kubernetes import client

        labels = f"{names.LABEL_DEPLOYMENT}={name},{names.LABEL_ROLE}=builder"
        with self._told("list"):
            found = client.BatchV1Api(self._api).list_namespaced_job(
                self.namespace, label_selector=labels, _request_timeout=self._timeout
            )
        return self._by_age(found.items)

    def job(self, job: str) -> tuple[Object | None, list[Object]]:
        from kubernetes import client

        with self._told("get"):
            jobs = client.BatchV1Api(self._api).list_namespaced_job(
                self.namespace, field_selector=f"metadata.name={job}", _request_timeout=self._timeout
            )
            pods = client.CoreV1Api(self._api).list_namespaced_pod(
                self.namespace, label_selector=f"job-name={job}", _request_timeout=self._timeout
            )
        found = self._by_age(jobs.items)
        return (found[0] if found else None), self._by_age(pods.items)

    def _by_age(self, items: list[Any]) -> list[Object]:
        plain: list[Object] = [self._api.sanitize_for_serialization(item) for item in items]
        return sorted(plain, key=lambda o: str(o["metadata"].get("creationTimestamp", "")))

    def log(self, pod: str, follow: bool) -> Iterator[str]:
        from kubernetes import client

        with self._told("get"):
            answer = client.CoreV1Api(self._api).read_namespaced_pod_log(
                pod,
                self.namespace,
                follow=follow,
                _preload_content=False,
                _request_timeout=(CONNECT_SECONDS, FOLLOW_SECONDS if follow else self._timeout[1]),
            )
            rest = b""
            for chunk in answer.stream(decode_content=False):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
            if rest:
                yield rest.decode(errors="replace")

    def versions(self) -> dict[str, Any]:
        from kubernetes import client

        with self._told("get"):
            server = client.VersionApi(self._api).get_code(_request_timeout=self._timeout)
            groups = client.ApisApi(self._api).get_api_versions(_request_timeout=self._timeout).groups
        ours = next((g for g in groups if g.name == names.GROUP), None)
        return {
            "kubernetes": server.git_version,
            "api": [v.group_version for v in ours.versions] if ours else [],
        }

    @contextmanager
    def _told(self, verb: str, name: str = "") -> Iterator[None]:
        """Turn what the client raises into one sentence."""
        import urllib3
        from kubernetes.client import ApiException

        try:
            yield
        except ApiException as exc:
            raise self._refused(exc, verb, name) from None
        except urllib3.exceptions.HTTPError as exc:
            reason = _why(exc)
            raise UnreachableError(
                f"cannot reach the cluster at {self._api.configuration.host} ({reason}); "
                "check --kubeconfig and --context, and that the cluster is up"
            ) from None
        except OSError as exc:
            raise UnreachableError(
                f"cannot reach the cluster at {self._api.configuration.host} ({_line(exc)})"
            ) from None

    def _refused(self, exc: Any, verb: str, name: str) -> CliError:
        status = exc.status
        said = _message(exc.body)
        if status == 401:
            return CliError("the cluster does not accept these credentials; log in again or choose another --context")
        if status == 403:
            return CliError(f"not allowed: {said or f'{verb} {names.PLURAL}'}; ask for a role that has it")
        if status == 404 and name and said and name in said:
            return self._not_found(name)
        if status == 404:
            return CliError(
                f"the cluster does not know {names.KIND}: install the chart (helm install ddtree-operator …), "
                "or choose another --context"
            )
        if status == 410:
            return UnreachableError("the watch expired")
        if status in {429, 500, 502, 503, 504}:
            return UnreachableError(f"the cluster answers {status} {exc.reason}: {said or 'no message'}; try again")
        return CliError(said or f"the cluster answers {status} {exc.reason}")

    def _not_found(self, name: str) -> CliError:
        """Say where it might be instead: a name alike, or the same name in another namespace."""
        sentence = f'no {names.KIND} "{name}" in namespace "{self.namespace}"'
        try:
            here = [o["metadata"]["name"] for o in self.all()]
            near = get_close_matches(name, here, n=1)
            if near:
                return CliError(f"{sentence}; did you mean {near[0]}?", Exit.NOT_FOUND)
            there = [o["metadata"]["namespace"] for o in self.all(everywhere=True) if o["metadata"]["name"] == name]
        except CliError:  # may see one namespace only
            there = []
        if there:
            return CliError(f"{sentence}; there is one in {there[0]} (-n {there[0]})", Exit.NOT_FOUND)
        return CliError(sentence, Exit.NOT_FOUND)


class UnreachableError(CliError):
    """No answer, or one that may be better in a moment; a watch goes on."""


def _message(body: Any) -> str:
    import json

    try:
        return str(json.loads(body).get("message", ""))
    except (ValueError, TypeError, AttributeError):
        return ""
