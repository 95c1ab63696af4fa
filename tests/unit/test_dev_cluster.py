"""The dev cluster's pure parts: settings, labels, configuration, and the image it packs itself."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "dev" / "cluster"))
from ddcluster import cache, fakes, gpu, pause, render
from ddcluster.say import Problem
from ddcluster.settings import PAUSE_IMAGE, from_environment

pytestmark = pytest.mark.unit


def test_defaults() -> None:
    s = from_environment({"HOME": "/h"})
    assert (s.name, s.gpus, s.gpu_product) == ("dev", 8, "NVIDIA-H200")
    assert s.kubeconfig == Path("/h/.local/state/ddtree/dev/kubeconfig")
    assert s.containerd_root == Path("/h/.cache/ddtree/containerd/dev")


def test_clusters_share_the_registry_and_nothing_else() -> None:
    a, b = (from_environment({"HOME": "/h", "DDTREE_CLUSTER": n}) for n in "ab")
    assert a.registry_root == b.registry_root
    for part in ("state", "live", "log", "containerd_root", "kubeconfig", "cgroup"):
        assert getattr(a, part) != getattr(b, part)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DDTREE_CLUSTER", "Upper"),
        ("DDTREE_CLUSTER", "../x"),
        ("DDTREE_CLUSTER", "-x"),
        ("DDTREE_CLUSTER", "x" * 31),
        ("DDTREE_CLUSTER_GPUS", "-1"),
        ("DDTREE_CLUSTER_GPUS", "many"),
        ("DDTREE_CLUSTER_GPUS", "65"),
        ("DDTREE_CLUSTER_GPU_PRODUCT", "H200"),
        ("DDTREE_CLUSTER_NODE_GRACE", "3"),
        ("DDTREE_CLUSTER_NODE_GRACE", "8s"),
    ],
)
def test_a_bad_setting_is_named(variable: str, value: str) -> None:
    with pytest.raises(Problem, match=variable):
        from_environment({"HOME": "/h", variable: value})


def test_gpu_labels() -> None:
    found = gpu.labels("NVIDIA-H200", 8)
    assert found["nvidia.com/gpu.product"] == "NVIDIA-H200"
    assert found["nvidia.com/gpu.memory"] == "143771"
    assert found["nvidia.com/gpu.count"] == "8"
    assert found["nvidia.com/gpu.compute.major"] == "9"
    assert gpu.labels("NVIDIA-H200", 0) == {}
    assert "nvidia.com/mig.strategy" not in gpu.labels("NVIDIA-L4", 1)


def test_a_fake_node_offers_what_its_labels_say() -> None:
    manifest = json.loads(json.dumps(fakes.node("n", "NVIDIA-L4", 3)))
    assert manifest["status"]["allocatable"]["nvidia.com/gpu"] == "3"
    assert manifest["metadata"]["labels"]["nvidia.com/gpu.count"] == "3"
    assert manifest["metadata"]["annotations"] == {"kwok.x-k8s.io/node": "fake"}


def test_kubelet_keeps_images_and_pods() -> None:
    s = from_environment({"HOME": "/h"})
    config = json.loads(render.kubelet(s.first, Path("/pki"), None))
    assert "nodeLeaseDurationSeconds" not in config
    assert config["imageGCHighThresholdPercent"] == 100
    assert config["failCgroupV1"] is False
    assert config["cgroupRoot"] == "/ddtree-dev"
    assert "restrict_oom_score_adj = true" in render.containerd(s.first, cri=True)
    assert "io.containerd.grpc.v1.cri" in render.containerd(s.first, cri=False).splitlines()[4]


def test_a_further_node_shares_no_file_and_no_address_with_another() -> None:
    s = from_environment({"HOME": "/h", "DDTREE_CLUSTER_NODE_GRACE": "8"})
    machines = [s.first, *(s.further(f"node-{x}") for x in "bcdef")]
    for part in ("name", "live", "log", "containerd_root", "cgroup", "ip", "cidr", "link_ip", "kubelet", "first_pod"):
        assert len({getattr(m, part) for m in machines}) == 6, part
    b = machines[1]
    assert (b.ip, b.first_pod, b.link_ip, b.cgroup) == ("10.101.0.1", "10.101.0.10", "10.87.0.2", "ddtree-dev/node-b")
    config = json.loads(render.kubelet(b, Path("/pki"), s.node_grace))
    assert (config["address"], config["nodeLeaseDurationSeconds"]) == ("10.101.0.1", 8)
    assert json.loads(render.proxy(b, Path("/k")))["clusterCIDR"] == b.cidr
    for name in ("node-a", "node-g", "../x", "node-bb"):
        with pytest.raises(Problem, match="further node"):
            s.further(name)


def test_pause_archive_is_a_consistent_oci_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pause, "_compile", lambda folder: b"program")
    with tarfile.open(pause.archive(tmp_path)) as tar:
        files = {m.name: extracted.read() for m in tar if (extracted := tar.extractfile(m))}
    for name, content in files.items():
        if name.startswith("blobs/"):
            assert name.rpartition("/")[2] == hashlib.sha256(content).hexdigest()
    (entry,) = json.loads(files["index.json"])["manifests"]
    assert entry["annotations"]["io.containerd.image.name"] == PAUSE_IMAGE

    def blob(descriptor: dict[str, str]) -> bytes:
        return files["blobs/sha256/" + descriptor["digest"].removeprefix("sha256:")]

    manifest = json.loads(blob(entry))
    with tarfile.open(fileobj=io.BytesIO(blob(manifest["layers"][0]))) as layer:
        assert layer.getnames() == ["pause"]
        assert layer.getmember("pause").mode == 0o755
    assert json.loads(blob(manifest["config"]))["config"]["Entrypoint"] == ["/pause"]


def test_clean_cache_refuses_a_folder_that_is_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    s = from_environment({"HOME": str(tmp_path / "home"), "DDTREE_CACHE": str(tmp_path)})
    (tmp_path / "home").mkdir()
    with pytest.raises(Problem, match="no cache folder"):
        cache.clean(s)
    assert (tmp_path / "home").is_dir()


def test_clean_cache_empties_and_says_how_much(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    s = from_environment({"HOME": str(tmp_path), "DDTREE_CACHE": str(tmp_path / "cache")})
    (s.cache / "bin").mkdir(parents=True)
    (s.cache / "bin" / "big").write_bytes(b"x" * 3_000_000)
    cache.clean(s)
    assert not list(s.cache.iterdir())
    assert "gave back 3.0 MB" in capsys.readouterr().err
