"""A node of Kubernetes with a real kubelet and containerd, in place of the small kubelet."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

from typing_extensions import Self

from benchmarks.testbed.kubernetes import START_S, ControlPlane, Nodes, programs
from hvd_elastic.virtual import VirtualCluster

_NUMBER = os.getpid() % 250
"""Keeps two such nodes on one machine apart."""
_BRIDGE, _SUBNET = f"hvd-pods{_NUMBER}", f"10.214.{_NUMBER}"
_ADDRESS = f"{_SUBNET}.1"
_SET_BY_KUBELET = [f"vm/{name}" for name in ("overcommit_memory", "panic_on_oom")]
_SET_BY_KUBELET += [f"kernel/{name}" for name in ("panic", "panic_on_oops")]
_ENTRY = ["/busybox", "sleep", "2147483647"]
"""What runs in the container that holds the namespaces of a pod."""
_CONTAINERD = """
version = 2
[plugins."io.containerd.internal.v1.opt"]
path = "/var/lib/opt"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{image}"
disable_apparmor = true
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{programs}"
conf_dir = "{folder}/cni"
"""
_NODE = """
set -e
for each in /run /var/lib /var/log; do mount -t tmpfs node "$each"; done
containerd --config="$1/containerd.toml" >"$1/containerd.log" 2>&1 &
until ctr --namespace=k8s.io images import "$1/image.tar"; do sleep 0.5; done
kubelet --config="$1/kubelet.json" --kubeconfig="$1/kubeconfig" --hostname-override=real \
    --node-ip="$2" --container-runtime=remote \
    --container-runtime-endpoint=unix:///run/containerd/containerd.sock
"""
"""Runs in namespaces of its own: with it end all pods, and nothing of them is left in files."""


class RealNode(Nodes):
    """One node whose kubelet is real; its pods have this machine's files, and a network.

    Args:
        control: the control plane.
        cluster: virtual hosts, which are no nodes here.
        image: name of the one image that there is.
        shared: folders that all pods can write to.
    """

    def __init__(
        self, control: ControlPlane, cluster: VirtualCluster, image: str, shared: list[Path]
    ) -> None:
        super().__init__(control, cluster, {image})
        self.bin = programs()
        self._image = image
        prefixes = {Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[2]}
        self._hosts = control.folder / "hosts"
        self._mounts = {path: path for path in (Path("/usr"), Path("/etc"), *sorted(prefixes))}
        self._mounts |= {path: path for path in shared} | {self._hosts: Path("/etc/hosts")}
        self._writable = shared
        self._process: subprocess.Popen[bytes] | None = None

    def adapt(self, pod: dict[str, Any]) -> None:
        container = pod["spec"]["containers"][0]
        pod["spec"]["dnsPolicy"] = "Default"
        pod["spec"]["volumes"] = [
            {"name": f"here-{n}", "hostPath": {"path": str(path)}}
            for n, path in enumerate(self._mounts)
        ]
        container["volumeMounts"] = [
            {"name": f"here-{n}", "mountPath": str(target), "readOnly": path not in self._writable}
            for n, (path, target) in enumerate(self._mounts.items())
        ]
        container["imagePullPolicy"] = "Never"
        variables = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "KUBERNETES_SERVICE_HOST": self.control.address,
            "KUBERNETES_SERVICE_PORT": str(self.control.port),
        }
        container["env"] += [{"name": name, "value": text} for name, text in variables.items()]

    def output_of(self, job: str) -> str:
        return self.control.kubectl("logs", f"job/{job}", check=False)

    def __enter__(self) -> Self:
        self._settings = {name: Path("/proc/sys", name).read_text() for name in _SET_BY_KUBELET}
        try:
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._process is not None:
            if self._process.poll() is None:
                with contextlib.suppress(subprocess.SubprocessError, AssertionError):
                    self.control.kubectl("delete", "jobs,pods", "--all", "--timeout=60s")
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        subprocess.run(["ip", "link", "delete", _BRIDGE], check=False)
        for name, text in self._settings.items():
            Path("/proc/sys", name).write_text(text)
        for group in sorted(Path("/sys/fs/cgroup").glob("*/k8s.io/**/"), reverse=True):
            with contextlib.suppress(OSError):
                group.rmdir()

    def _begin(self) -> None:
        folder = self.control.folder
        subnets = [[{"subnet": f"{_SUBNET}.0/24", "gateway": _ADDRESS}]]
        routes = [{"dst": "0.0.0.0/0"}]
        addresses = {"type": "host-local", "ranges": subnets, "routes": routes}
        bridge = {"type": "bridge", "bridge": _BRIDGE, "ipam": addresses}
        kubelet = {
            "kind": "KubeletConfiguration",
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "address": _ADDRESS,
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "failSwapOn": False,
            "makeIPTablesUtilChains": False,
            "healthzPort": 0,
            "evictionHard": {"memory.available": "1Mi"},
            "nodeStatusUpdateFrequency": "2s",
            "nodeLeaseDurationSeconds": 8,
        }
        (folder / "cni").mkdir()
        network = {"cniVersion": "0.4.0", "name": "hvd", "plugins": [bridge]}
        (folder / "cni" / "hvd.conflist").write_text(json.dumps(network))
        (folder / "kubelet.json").write_text(json.dumps(kubelet))
        words = {"folder": folder, "programs": self.bin, "image": self._image}
        (folder / "containerd.toml").write_text(_CONTAINERD.format(**words))
        (folder / "image.tar").write_bytes(_image(self._image, self.bin / "busybox"))
        self._look()
        for line in (
            f"link add {_BRIDGE} type bridge",
            f"address add {_ADDRESS}/24 dev {_BRIDGE}",
            f"link set {_BRIDGE} up",
        ):
            subprocess.run(["ip", *line.split()], check=True)
        apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with (folder / "kubelet.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*apart, "sh", "-c", _NODE, "sh", folder, _ADDRESS],
                env={**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_S
        ready = ("wait", "node/real", "--for=condition=Ready", "--timeout=1s")
        while "condition met" not in self.control.kubectl(*ready, check=False):
            assert self._process.poll() is None, f"the kubelet has ended; see {folder}"
            assert time.monotonic() < deadline, f"the kubelet does not start; see {folder}"
            time.sleep(0.5)

    def _look(self) -> None:
        """Write the names of services, which a DNS would have."""
        lines = ["127.0.0.1 localhost"]
        for each in self.control.call("GET", "/api/v1/endpoints")["items"]:
            of = each["metadata"]
            for part in each.get("subsets", ()):
                found = part.get("addresses", ()) or part.get("notReadyAddresses", ())
                lines += [f"{one['ip']} {of['name']}.{of['namespace']}.svc" for one in found]
        self._hosts.write_text("\n".join(lines) + "\n")

    def _beat(self) -> None:
        """Leave that to the kubelet."""


def _image(name: str, busybox: Path) -> bytes:
    """Return the archive of an image whose programs are those of /usr, which is mounted."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for path in ("bin", "lib", "lib64", "sbin"):
            link = tarfile.TarInfo(path)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{path}"
            tar.addfile(link)
        folder = tarfile.TarInfo("tmp")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o1777
        tar.addfile(folder)
        _add(tar, "busybox", busybox.read_bytes())
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": _ENTRY},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        _add(tar, "config.json", json.dumps(config).encode())
        _add(tar, "layer.tar", layer.getvalue())
        _add(tar, "manifest.json", json.dumps(manifest).encode())
    return archive.getvalue()


def _add(tar: tarfile.TarFile, path: str, content: bytes) -> None:
    entry = tarfile.TarInfo(path)
    entry.size, entry.mode = len(content), 0o755
    tar.addfile(entry, io.BytesIO(content))
