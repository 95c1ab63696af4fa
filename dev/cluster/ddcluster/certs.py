"""Keys and certificates of one cluster's life, made with openssl (P-256: a few milliseconds each)."""

from __future__ import annotations

import subprocess
from pathlib import Path

from .say import Problem
from .settings import API_SERVICE_IP, NODE, NODE_IP, Machine


def _kubelet(node: str, ip: str) -> tuple[str, str]:
    return f"/O=system:nodes/CN=system:node:{node}", f"IP:127.0.0.1,IP:{ip},DNS:{node}"


_IDENTITIES = {
    "apiserver": ("/CN=kube-apiserver", f"IP:127.0.0.1,IP:{API_SERVICE_IP},IP:{NODE_IP},DNS:localhost,DNS:kubernetes,"
                  "DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:kubernetes.default.svc.cluster.local"),
    "kubelet": _kubelet(NODE, NODE_IP),
    "admin": ("/O=system:masters/CN=admin", ""),
    "controller-manager": ("/CN=system:kube-controller-manager", ""),
    "scheduler": ("/CN=system:kube-scheduler", ""),
    "proxy": ("/CN=system:kube-proxy", ""),
}  # fmt: skip


def make(folder: Path) -> None:
    """Write NAME.crt and NAME.key for every identity, ca.crt, ca.key, sa.key and sa.pub. Raises Problem."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    _ssl(folder, "req -x509 -days 30 -subj /CN=ddtree-dev-ca -keyout ca.key -out ca.crt", new=True)
    for name, identity in _IDENTITIES.items():
        _issue(folder, name, *identity)
    _ssl(folder, "ecparam -name prime256v1 -genkey -noout -out sa.key")
    _ssl(folder, "ec -in sa.key -pubout -out sa.pub")


def join(folder: Path, machine: Machine) -> None:
    """The certificate of a further node's kubelet, beside the others. Raises Problem."""
    _issue(folder, machine.kubelet, *_kubelet(machine.name, machine.ip))


def _issue(folder: Path, name: str, subject: str, alternatives: str) -> None:
    usage = "extendedKeyUsage=clientAuth,serverAuth\nkeyUsage=digitalSignature\n"
    (folder / "extensions").write_text(usage + (f"subjectAltName={alternatives}\n" if alternatives else ""))
    _ssl(folder, f"req -subj {subject} -keyout {name}.key -out request", new=True)
    _ssl(folder, "x509 -req -days 30 -in request -CA ca.crt -CAkey ca.key -CAcreateserial"
                 f" -extfile extensions -out {name}.crt")  # fmt: skip


def _ssl(folder: Path, line: str, *, new: bool = False) -> None:
    command, *rest = line.split()
    extra = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"] if new else []
    done = subprocess.run(["openssl", command, *extra, *rest], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Problem(f"openssl {command} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
