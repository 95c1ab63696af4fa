"""Further nodes beside the first: each has its own network, mount and PID namespace inside the cluster's.

So a node can be lost as by a power failure, and the end of the cluster ends it too. Their kernel is one, and nothing
limits a node's share of the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from . import certs, host, mounts
from .api import Api
from .binaries import build, locked
from .node import MAIN
from .parts import Parts
from .say import Problem, say
from .settings import LINK_BITS, LINK_IP, NODE_IP, POD_CIDR, Machine, Settings
from .worker import Worker, addresses

_UPLINK = "uplink"  # the link, as the further node sees it
_BRIDGE = "nodes"  # what joins the links, in the first node's network


def add(s: Settings, name: str) -> None:
    """Have a further node in the cluster, and wait until it is ready. Raises Problem."""
    _bring(s, name, again=False)


def bring(s: Settings, name: str) -> None:
    """Start a node that was lost, as a machine that is switched on again. Raises Problem."""
    _bring(s, name, again=True)


def lose(s: Settings, name: str) -> None:
    """Cut a node off, then kill all of it: nobody hears a farewell. Raises Problem."""
    machine = s.further(name)
    running = host.require(s)
    with locked(s.state / "lock"):
        init = find(s, machine)
        if not init:
            raise Problem(f"{name} does not run: add it with dev/cluster/cluster add-node {name}")
        _ip(running, f"link delete {name}")
        handle = os.pidfd_open(init)
        try:
            os.kill(init, signal.SIGKILL)
            host.ended(handle, f"process {init} of {name}")
        finally:
            os.close(handle)
    say(f"{name} is lost")


def find(s: Settings, machine: Machine) -> int:
    """The host's id of process 1 of a further node; 0 when it does not run."""
    with contextlib.suppress(OSError, ValueError):
        pid, began = json.loads((machine.live / "running.json").read_text())
        if host.start_time(pid) == began:
            return int(pid)
    return 0


def known(s: Settings) -> list[Machine]:
    """Further nodes of this cluster, lost ones as well."""
    return [s.further(f.name) for f in sorted(s.live.glob("node-?")) if f.is_dir()]


def inside(s: Settings, name: str, kube: Path) -> Parts:
    """Bring this node to Ready, from inside its namespaces. Raises Problem, OSError or CalledProcessError."""
    machine = s.further(name)
    worker = Worker(s, machine, kube, Api(s.live / "pki", host=NODE_IP))
    mounts.prepare(machine)
    worker.network()
    worker.parts.until("the link to the first node", _linked)
    addresses(
        f"address add {machine.link_ip}/{LINK_BITS} dev {_UPLINK}",
        f"link set {_UPLINK} up",
        f"route add {POD_CIDR} via {LINK_IP} src {machine.ip}",
    )
    worker.cgroups()
    worker.configuration()
    worker.containerd()
    worker.kubelet()
    return worker.parts


def _linked() -> bool:  # by ip: /sys shows the host's network
    return subprocess.run(["ip", "link", "show", _UPLINK], capture_output=True, check=False).returncode == 0


def _bring(s: Settings, name: str, *, again: bool) -> None:
    machine = s.further(name)
    running = host.require(s)
    began = time.monotonic()
    with locked(s.state / "lock"):
        if find(s, machine):
            say(f"{name} runs already")
            return
        if machine.live.exists() != again:
            raise Problem(f"{name} was lost: bring-node starts it" if not again else f"there is no {name}: add-node")
        for folder in (machine.live, machine.log):
            folder.mkdir(parents=True, exist_ok=True)
        certs.join(s.live / "pki", machine)
        try:
            _start(s, running, machine)
        except BaseException:
            if init := find(s, machine):
                os.kill(init, signal.SIGKILL)
            if not again:
                shutil.rmtree(machine.live, ignore_errors=True)
            raise
    say(f"{name} is ready after {time.monotonic() - began:.1f} s")


def _start(s: Settings, running: host.Running, machine: Machine) -> None:
    # Not the cluster's mount namespace: a copy of it would hold what the first node's pods have mounted.
    command: list[str | Path] = [
        "nsenter", "-t", str(running.init), "-n", "-p", "--wd=/", "--",
        "unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "--",
        sys.executable, MAIN, "_further", machine.name, build("kube", s.cache),
    ]  # fmt: skip
    env = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
    with (machine.log / "node.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd="/", env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True,
            start_new_session=True,
        )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("here"):  # its process 1 runs, in its own network
            init = host.child(host.child(process.pid))
            (machine.live / "running.json").write_text(json.dumps([init, host.start_time(init)]))
            _link(running, machine, init)
        elif line.startswith("ready"):
            return
        elif line.startswith("! "):
            raise Problem(f"{machine.name} did not start: {line[2:].strip()} (logs: {machine.log})")
        else:
            say(line.strip().removeprefix("· "))
    raise Problem(f"the first process of {machine.name} ended early: see {machine.log}/node.log")


def _link(running: host.Running, machine: Machine, init: int) -> None:
    """Join the node to the others.

    The neighbour entry is for ever, so that what is sent to a lost node goes nowhere, without a word, as it does behind
    a router; else this kernel would say within 3 s that the host is unreachable. (The bridge has an address of its own:
    one that changes with its ports takes all entries along.)
    """
    address = _address(machine.link_ip)
    if not _there(running, _BRIDGE):
        _ip(
            running,
            f"link add {_BRIDGE} address {_address(LINK_IP)} type bridge",
            f"address add {LINK_IP}/{LINK_BITS} dev {_BRIDGE}",
            f"link set {_BRIDGE} up",
        )
    if _there(running, machine.name):
        _ip(running, f"link delete {machine.name}")
    _ip(
        running,
        f"link add {machine.name} type veth peer name {_UPLINK} address {address} netns {init}",
        f"link set {machine.name} master {_BRIDGE} up",
        f"neighbour replace {machine.link_ip} lladdr {address} dev {_BRIDGE} nud permanent",
        f"route replace {machine.cidr} via {machine.link_ip} src {NODE_IP}",
    )


def _address(link_ip: str) -> str:
    return f"02:dd:00:00:00:{int(link_ip.rpartition('.')[2]):02x}"


def _there(running: host.Running, link: str) -> bool:
    command = ["nsenter", "-t", str(running.init), "-n", "--", "ip", "link", "show", link]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _ip(running: host.Running, *lines: str) -> None:
    """`ip` in the first node's network, with the host's process ids."""
    for line in lines:
        command = ["nsenter", "-t", str(running.init), "-n", "--", "ip", *line.split()]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Problem(f"ip {line} failed: {done.stderr.strip()}")
