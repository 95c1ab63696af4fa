"""The command line of dev/cluster/cluster."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from . import cache, fakes, forward, further, gateway, host, parts, status
from .binaries import kubectl_and_helm
from .node import Node
from .say import Problem, say
from .settings import NODE_IP, from_environment

USAGE = """usage: dev/cluster/cluster COMMAND

  up                 start the cluster (and build or fetch what it needs, the first time)
  down               stop it; images stay, everything else goes
  status             what runs, since when, and what the node offers
  purge              stop it and remove its images and logs too
  env                print what to export:  eval "$(dev/cluster/cluster env)"
  kubectl ARGS...    kubectl against this cluster
  helm ARGS...       helm against this cluster
  clean-cache        remove everything below DDTREE_CACHE and say how much that gave back
  fake-nodes COUNT [PRODUCT [GPUS]]
                     add COUNT nodes that only claim to run pods (0: remove them all again)
  add-node NAME      a second real node, node-b (up to node-f), with its own kubelet, containerd and pod network
  lose-node NAME     cut it off and kill all of it at once, as a power failure does
  bring-node NAME    switch it on again
  gateway [NAMESPACE/NAME]
                     the Gateway API with Contour and Envoy, for one Gateway (default: default/gw), at 10.88.0.1:8080
  run CMD ARGS...    run a command inside the cluster's namespaces

DDTREE_CLUSTER names the cluster (default: dev); several can run side by side.
DDTREE_CLUSTER_GPUS (default: 8) and DDTREE_CLUSTER_GPU_PRODUCT (default: NVIDIA-H200) say which GPUs a node claims.
DDTREE_CLUSTER_NODE_GRACE: seconds of silence after which a node is taken for lost (default: Kubernetes' own, 50).
"""


def main(arguments: list[str]) -> int:
    """Run one command; returns the exit status."""
    try:
        return _dispatch(arguments)
    except Problem as problem:
        print(f"cluster: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("cluster: interrupted" + ("; nothing runs" if arguments == ["up"] else ""), file=sys.stderr)
        return 130


def _dispatch(arguments: list[str]) -> int:
    match arguments:
        case ["up"]:
            return _up()
        case ["down"]:
            s = from_environment(os.environ)
            ran = host.down(s)
            say(f"cluster {s.name!r} is down" if ran else f"cluster {s.name!r} was not running")
        case ["purge"]:
            s = from_environment(os.environ)
            host.purge(s)
            say(f"nothing is left of cluster {s.name!r}")
        case ["status"]:
            return status.show(from_environment(os.environ))
        case ["fake-nodes", count, *rest] if len(rest) <= 2:
            fakes.scale(from_environment(os.environ), count, *rest)
        case ["add-node" | "lose-node" | "bring-node" as verb, name]:
            act = {"add-node": further.add, "lose-node": further.lose, "bring-node": further.bring}[verb]
            act(from_environment(os.environ), name)
        case ["gateway", *rest] if len(rest) <= 1:
            gateway.start(from_environment(os.environ), *rest)
        case ["clean-cache"]:
            cache.clean(from_environment(os.environ))
        case ["env"]:
            for name, value in host.outer_environment(from_environment(os.environ)).items():
                print(f"export {name}={shlex.quote(value)}")
        case ["kubectl" | "helm" as tool, *rest]:
            s = from_environment(os.environ)
            os.environ.update(host.outer_environment(s))
            program = kubectl_and_helm(s.cache) / tool
            os.execv(program, [tool, *rest])
        case ["run", _, *_]:
            host.enter(from_environment(os.environ), arguments[1:])
        case ["_node", kube, api_fd, registry_fd]:
            s = from_environment(os.environ)
            return parts.reap(
                lambda: parts.serve(lambda: Node(s, Path(kube)).start(int(api_fd), int(registry_fd)))
            )  # fmt: skip
        case ["_further", name, kube]:
            s = from_environment(os.environ)
            parts.tell("here")
            return parts.reap(lambda: parts.serve(lambda: further.inside(s, name, Path(kube))))
        case ["_forward", fd, port]:
            forward.serve(int(fd), (NODE_IP, int(port)))
        case ["help" | "--help" | "-h"]:
            print(USAGE, end="")
        case _:
            print(USAGE, end="", file=sys.stderr)
            return 2
    return 0


def _up() -> int:
    s = from_environment(os.environ)
    seconds = host.up(s)
    say(f"cluster {s.name!r} is up" + (f" after {seconds:.1f} s" if seconds else " already"))
    print(f"export KUBECONFIG={shlex.quote(str(s.kubeconfig))}")
    return 0
