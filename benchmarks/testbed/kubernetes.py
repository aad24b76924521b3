"""A Kubernetes of one's own: a real control plane here, and virtual hosts as its nodes.

The control plane is built once from Debian's source package, and kept in the user's cache. In
place of a kubelet, :class:`Nodes` runs each pod in namespaces of a virtual host, as processes; the
network of a pod is that of its node.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import platformdirs
import psutil
from typing_extensions import Self

from hvd_elastic.records.process_lock import lock_held
from hvd_elastic.virtual import VirtualCluster

START_S = 180.0
TOOLS = ("golang-1.19-go", "golang-1.19-src", "golang-github-modern-go-reflect2-dev")


class _Part(NamedTuple):
    """Programs that are built together.

    Attributes:
        built: what is built of Kubernetes; the others are there when the last one is.
        packages: packages with further programs.
        copied: these programs.
    """

    built: tuple[str, ...]
    packages: tuple[str, ...]
    copied: tuple[str, ...]


_CONTROL = _Part(
    ("kube-apiserver", "kube-controller-manager", "kube-scheduler"),
    ("etcd-server", "kubernetes-client"),
    ("usr/bin/etcd", "usr/bin/kubectl"),
)
_NODE = _Part(
    ("kubelet",),
    ("containerd", "runc", "containernetworking-plugins", "busybox-static"),
    (
        *("usr/bin/containerd", "usr/bin/containerd-shim-runc-v2", "usr/bin/ctr", "usr/sbin/runc"),
        *("usr/lib/cni/bridge", "usr/lib/cni/host-local", "usr/lib/cni/loopback", "bin/busybox"),
    ),
)
"""For a node with a real kubelet."""
_BUILD = r"""
set -e
apt="-o Dir::Etc::sourcelist=$PWD/sources.list -o Dir::Etc::sourceparts=/dev/null
     -o Dir::State::lists=$PWD/lists -o Dir::Cache=$PWD/cache -o APT::Sandbox::User=root"
mkdir -p lists/partial cache/archives/partial go gopath/src/k8s.io bin
key=/usr/share/keyrings/debian-archive-keyring.gpg
for kind in deb deb-src; do
    echo "$kind [signed-by=$key] http://deb.debian.org/debian bookworm main"
done >sources.list
apt-get $apt update
apt-get $apt download $PACKAGES $TOOLS
apt-get $apt --download-only source kubernetes
for each in *.deb; do dpkg -x "$each" go; done
(cd go && cp $COPIED ../bin/)
dpkg-source -x kubernetes_*.dsc k8s
# The vendored one panics with this Go.
rm -r k8s/vendor/github.com/modern-go/reflect2
cp -r go/usr/share/gocode/src/github.com/modern-go/reflect2 k8s/vendor/github.com/modern-go/
ln -s "$PWD/k8s" gopath/src/k8s.io/kubernetes
bin=$PWD/bin
export GOROOT=$PWD/go/usr/lib/go-1.19 GOPATH=$PWD/gopath GOCACHE=$PWD/gocache GO111MODULE=off
export CGO_ENABLED=0 GOPROXY=off PATH=$PWD/go/usr/lib/go-1.19/bin:$PATH
cd gopath/src/k8s.io/kubernetes
go build -o "$bin/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
dirs=$(grep -l '+k8s:openapi-gen=' -r vendor/k8s.io/*/ pkg cmd --include='*.go' |
    xargs -n1 dirname | sort -u | sed 's,^vendor/,,; s,^\(pkg\|cmd\)/,k8s.io/kubernetes/\1/,' |
    grep -v -e code-generator -e sample- | paste -sd,)
"$bin/openapi-gen" --logtostderr -i "$dirs" -p k8s.io/kubernetes/pkg/generated/openapi \
    -O zz_generated.openapi -h hack/boilerplate/boilerplate.generatego.txt -r "$bin/../violations"
of=k8s.io/kubernetes/vendor/k8s.io
for each in gitMajor=1 gitMinor=20 gitVersion=v1.20.2 buildDate=2021-01-13T00:00:00Z
do flags="$flags -X $of/client-go/pkg/version.$each -X $of/component-base/version.$each"; done
go build -ldflags "-s -w $flags" -o "$bin/" $BUILT
"""


def why_not() -> str:
    """Return why no Kubernetes can be built and run here; empty: it can."""
    if os.geteuid() != 0:
        return "needs root"
    if (programs() / _CONTROL.built[-1]).exists():
        return ""
    if shutil.which("dpkg-source") is None or shutil.which("apt-get") is None:
        return "needs Debian's apt-get and dpkg-source, which fetch Kubernetes' source"
    return ""


def programs() -> Path:
    """Return the folder of the programs of Kubernetes, which may have to be built."""
    return Path(platformdirs.user_cache_dir("hvd_elastic")) / "kubernetes-1.20.2"


def has_memory_groups() -> bool:
    """Return whether there are control groups for memory of version 1, which pods need."""
    return os.access(_MEMORY / "memory.limit_in_bytes", os.W_OK)


def build(*, kubelet: bool = False) -> str:
    """Build what is not there yet, and return why it cannot be built; empty: it is there.

    Args:
        kubelet: whether a kubelet and what it needs are built too.
    """
    folder = programs()
    folder.mkdir(parents=True, exist_ok=True)
    parts = (_CONTROL, _NODE) if kubelet else (_CONTROL,)
    with lock_held(folder.with_suffix(".lock"), lambda: None):
        missing = [part for part in parts if not (folder / part.built[-1]).exists()]
        if not missing:
            return ""
        built, packages, copied = ([*itertools.chain(*each)] for each in zip(*missing, strict=True))
        cpus = os.cpu_count() or 1
        print(
            f"building {', '.join(built)} of Kubernetes 1.20 from Debian's source, once: some "
            f"{(8 + 3 * len(missing)) / min(cpus, 4):.0f} minutes, 1.5 GB of memory, 4 GB of disk; "
            f"they are kept in {folder}",
            file=sys.__stderr__,
            flush=True,
        )
        work = folder.with_suffix(".build")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        variables = {
            "PACKAGES": " ".join(packages),
            "COPIED": " ".join(copied),
            "BUILT": " ".join(f"./cmd/{name}" for name in built),
            "TOOLS": " ".join(TOOLS),
        }
        log = folder.with_suffix(".log")
        with log.open("wb") as output:
            done = subprocess.run(
                ["nice", "bash", "-c", _BUILD],
                cwd=work,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **variables},
            )
        if done.returncode == 0:
            (work / "bin" / "openapi-gen").unlink()
            marks = [part.built[-1] for part in missing]
            for path in sorted((work / "bin").iterdir(), key=lambda path: path.name in marks):
                path.replace(folder / path.name)
        shutil.rmtree(work, ignore_errors=True)
        if done.returncode == 0:
            return ""
        last = log.read_text(errors="replace").strip().rpartition("\n")[2]
        return f"Kubernetes cannot be built ({last}); see {log}"


_PODS = "/api/v1/namespaces/default/pods"


class ControlPlane:
    """etcd, API server, controllers and scheduler on this machine.

    Args:
        folder: for its data and logs.
        address: address of this machine by which its nodes reach it.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address = folder, address
        self.folder.mkdir()
        self.port = _free_port(address)
        self._started: list[subprocess.Popen[bytes]] = []
        self._context: ssl.SSLContext | None = None

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._started):
            process.kill()
            process.wait()

    def call(
        self, method: str, path: str, body: Any = None, kind: str = "application/json"
    ) -> dict[str, Any]:
        """Call the API as an administrator; raises an error of urllib if it refuses."""
        request = urllib.request.Request(
            f"https://{self.address}:{self.port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": "Bearer admin", "Content-Type": kind},
        )
        with urllib.request.urlopen(request, context=self._context, timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def kubectl(self, *words: str, check: bool = True, **options: Any) -> str:
        """Return what kubectl prints as the administrator."""
        done = subprocess.run(
            [str(programs() / "kubectl"), *words],
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
            capture_output=True,
            text=True,
            timeout=START_S,
            **options,
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout + ("" if check else done.stderr)

    def pods(self, run_id: str, role: str = "host") -> dict[str, dict[str, Any]]:
        """Return the pods of a run, by name."""
        chosen = f"hvd-elastic/run%3D{run_id},hvd-elastic/role%3D{role}"
        items = self.call("GET", f"{_PODS}?labelSelector={chosen}")["items"]
        return {pod["metadata"]["name"]: pod for pod in items}

    def evict(self, pod: str) -> None:
        """Have the Eviction API take a pod away, as kubectl drain and autoscalers do."""
        body = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": pod}}
        self.call("POST", f"{_PODS}/{pod}/eviction", body)

    def pause(self) -> None:
        """Have the API server answer nothing, until :meth:`go_on`."""
        self._started[1].send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._started[1].send_signal(signal.SIGCONT)

    def _start(self) -> None:
        self._make_files()
        etcd, peer = _free_port("127.0.0.1"), _free_port("127.0.0.1")
        store = f"http://127.0.0.1:{etcd}"
        self._run(
            *("etcd", "--data-dir=etcd", "--unsafe-no-fsync", f"--listen-client-urls={store}"),
            f"--advertise-client-urls={store}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
        )
        self._run(
            *("kube-apiserver", f"--etcd-servers={store}", f"--secure-port={self.port}"),
            *(f"--bind-address={self.address}", f"--advertise-address={self.address}"),
            *("--tls-cert-file=server.crt", "--tls-private-key-file=server.key"),
            *("--client-ca-file=ca.crt", "--token-auth-file=tokens.csv"),
            *("--authorization-mode=RBAC", "--service-cluster-ip-range=10.255.0.0/24"),
            *("--service-account-key-file=sa.key", "--service-account-signing-key-file=sa.key"),
            "--service-account-issuer=https://kubernetes.default.svc",
            "--disable-admission-plugins=DefaultStorageClass",
            "--kubelet-preferred-address-types=InternalIP",
        )
        self._await(lambda: self._answers("/readyz"), "the API server")
        as_admin = ("--kubeconfig=kubeconfig", "--leader-elect=false", "--bind-address=127.0.0.1")
        self._run(
            *("kube-controller-manager", *as_admin, "--root-ca-file=ca.crt", "--port=0"),
            *("--service-account-private-key-file=sa.key", "--cert-dir=controllers"),
            *("--node-monitor-grace-period=8s", "--node-monitor-period=2s"),
            f"--secure-port={_free_port('127.0.0.1')}",
        )
        self._run(
            *("kube-scheduler", *as_admin, "--cert-dir=scheduler", "--port=0"),
            f"--secure-port={_free_port('127.0.0.1')}",
        )
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        self._await(lambda: self._answers(account, "secrets"), "the controllers")

    def _make_files(self) -> None:
        names = f"subjectAltName=IP:{self.address},IP:127.0.0.1"
        (self.folder / "names").write_text(names)
        users = 'admin,admin,1,"system:masters"\nnobody,nobody,2\n'
        (self.folder / "tokens.csv").write_text(users)
        user = {"name": "admin", "user": {"token": "admin"}}
        server = f"https://{self.address}:{self.port}"
        cluster = {"server": server, "certificate-authority": str(self.folder / "ca.crt")}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "own", "cluster": cluster}],
            "users": [user],
            "contexts": [{"name": "own", "context": {"cluster": "own", "user": "admin"}}],
            "current-context": "own",
        }
        self.kubeconfig.write_text(json.dumps(config))
        sign = "x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -extfile names"
        sign += " -days 30 -out server.crt"
        for line in (
            "genrsa -out sa.key 2048",
            "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.crt -days 30 -subj /CN=ca",
            "req -newkey rsa:2048 -nodes -keyout server.key -out server.csr -subj /CN=apiserver",
            sign,
        ):
            words = ["openssl", *line.split()]
            subprocess.run(words, cwd=self.folder, check=True, capture_output=True)
        self._context = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))

    def _run(self, program: str, *options: str) -> None:
        with (self.folder / f"{program}.log").open("wb") as log:
            self._started.append(
                subprocess.Popen(
                    [str(programs() / program), *options], cwd=self.folder, stdout=log, stderr=log
                )
            )

    def _answers(self, path: str, word: str = "") -> bool:
        with contextlib.suppress(OSError, json.JSONDecodeError):
            return word in self.call("GET", path)
        with contextlib.suppress(OSError):
            return not word and self.kubectl("get", "--raw", path, check=False) == "ok"
        return False

    def _await(self, is_so: Any, what: str) -> None:
        deadline = time.monotonic() + START_S
        while not is_so():
            assert all(each.poll() is None for each in self._started), f"{what}; {self.folder}"
            assert time.monotonic() < deadline, f"{what} does not start; see {self.folder}"
            time.sleep(0.2)


_KUBECTL = """\
#!{python}
import os, sys
from pathlib import Path
words = sys.argv[1:]
if "exec" not in words[:2]:
    os.execv("{kubectl}", ["kubectl", *words])
at = words.index("--")
pid = Path("{pods}", words[at - 1], "pid").read_text()
lines = Path("/proc", pid, "environ").read_text().split("\\0")
environment = dict(each.split("=", 1) for each in lines if each)
os.execvpe("nsenter", ["nsenter", "-t", pid, "--all", "--", *words[at + 1 :]], environment)
"""
"""kubectl, which enters a pod itself: a kubelet would have a server for that."""
_POD = """
mount -t tmpfs pod /run && mount -t tmpfs pod /mnt || exit 125
while [ "$1" != -- ]; do
    mkdir -p "$2" 2>/dev/null; mount --bind "$1" "$2" || exit 125; shift 2
done
shift
cd "$1" && shift
exec "$@"
"""
"""Mounts pairs of a source and a target, and then runs a command in a folder."""


_CLOCK = """
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    long status = syscall(SYS_clock_gettime, clock, now);
    const char *ahead = getenv("AHEAD_S");
    if (clock == CLOCK_REALTIME && ahead) now->tv_sec += atol(ahead);
    return status;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec, now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *now) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    return now ? *now = precise.tv_sec : precise.tv_sec;
}
"""
_MEMORY = Path("/sys/fs/cgroup/memory")
"""Control groups for memory (version 1)."""


class Nodes:
    """Virtual hosts as nodes: registers them, and runs the pods that are bound to them.

    A host that is cut off or off is silent. Claims are folders, which are bound at once.

    Args:
        control: the control plane.
        cluster: the virtual hosts.
        images: images that can be pulled; all of them are this machine's files. Where one is named
            ``bare``, its programs are not on the ``PATH``.
        gpus: what each node has of ``nvidia.com/gpu``.
    """

    def __init__(
        self, control: ControlPlane, cluster: VirtualCluster, images: set[str], gpus: int = 2
    ) -> None:
        self.control, self.cluster, self.images, self.gpus = control, cluster, images, gpus
        self.claims = control.folder / "claims"
        self.claims.mkdir()
        self.bin = control.folder / "bin"
        """For ``PATH``: a kubectl that can execute commands in these pods."""
        self.bin.mkdir()
        words = {"python": sys.executable, "kubectl": programs() / "kubectl"}
        text = _KUBECTL.format(**words, pods=control.folder / "pods")
        (self.bin / "kubectl").write_text(text)
        (self.bin / "kubectl").chmod(0o755)
        self.ahead_s: dict[str, int] = {}
        """How far the clocks of nodes are ahead in new pods, by host [s]."""
        self.left_s: dict[str, float] = {}
        """Time from SIGTERM to the end of each pod that has got it, by name [s]."""
        self._pods: dict[str, _Pod] = {}
        self._beat_at: dict[str, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)

    def __enter__(self) -> Self:
        for host in self.cluster.hosts:
            self._make("/api/v1/nodes", {"metadata": {"name": host, "labels": {
                "kubernetes.io/hostname": host}}})  # fmt: skip
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for pod in self._pods.values():
            pod.end()

    def adapt(self, pod: dict[str, Any]) -> None:
        """Change a template of pods into one that they can follow here."""

    def output_of(self, job: str) -> str:
        """Return what the pods of a job have printed."""
        logs = (self.control.folder / "pods").glob(f"{job}-?????/log")
        return "\n".join(log.read_text(errors="replace") for log in logs)

    def clock(self) -> Path:
        """Return a library with which programs have a clock that is ahead by ``AHEAD_S``."""
        library = self.control.folder / "clock.so"
        if not library.exists():
            words = ["gcc", "-shared", "-fPIC", "-xc", "-", "-o", str(library)]
            subprocess.run(words, input=_CLOCK, check=True, text=True)
        return library

    def use_memory(self, name: str, size: int) -> None:
        """Use so many bytes of a pod's memory, in a process of the pod that is killed for it."""
        (pod,) = (p for p in self._pods.values() if p.manifest["metadata"]["name"] == name)
        code = f"bytearray({size})"
        done = subprocess.run(
            ["sh", "-c", f"echo $$ >{pod.group}/cgroup.procs && exec {sys.executable} -c '{code}'"],
            capture_output=True,
            text=True,
        )
        assert done.returncode == -signal.SIGKILL, done

    def hosts_text(self) -> str:
        """Return /etc/hosts of the pods: the names of services, which a DNS would have."""
        lines = ["127.0.0.1 localhost"]
        lines += [f"{self.cluster.address(host)} {host}" for host in self.cluster.hosts]
        pods = [pod.manifest for pod in self._pods.values() if pod.runs]
        for service in self.control.call("GET", "/api/v1/services")["items"]:
            of, chosen = service["metadata"], service["spec"].get("selector") or {}
            for pod in pods if chosen else ():
                if chosen.items() <= pod["metadata"].get("labels", {}).items():
                    address = self.cluster.address(pod["spec"]["nodeName"])
                    lines.append(f"{address} {of['name']}.{of['namespace']}.svc")
        return "\n".join(lines) + "\n"

    def _run(self) -> None:
        while not self._over.wait(0.25):
            with contextlib.suppress(OSError):  # the API server may be away
                self._beat()
                self._bind_claims()
                self._look()

    def _beat(self) -> None:
        for host in self.cluster.hosts:
            now = time.monotonic()
            if self.is_silent(host) or now < self._beat_at.get(host, 0.0):
                continue
            self._beat_at[host] = now + 2.0
            room = {"cpu": "4", "memory": "8Gi", "pods": "20", "nvidia.com/gpu": str(self.gpus)}
            ready = {"type": "Ready", "status": "True", "reason": "Ready", "message": ""}
            ready |= {"lastHeartbeatTime": _now(), "lastTransitionTime": _now()}
            status = {"capacity": room, "allocatable": room, "conditions": [ready]}
            self._patch(f"/api/v1/nodes/{host}/status", {"status": status})

    def _bind_claims(self) -> None:
        for claim in self.control.call("GET", "/api/v1/persistentvolumeclaims")["items"]:
            of = claim["metadata"]
            if claim["status"].get("phase") == "Bound" or "deletionTimestamp" in of:
                continue
            (self.claims / of["name"]).mkdir(exist_ok=True)
            spec = {
                "capacity": claim["spec"]["resources"]["requests"],
                "accessModes": claim["spec"]["accessModes"],
                "hostPath": {"path": str(self.claims / of["name"])},
                "claimRef": {"namespace": of["namespace"], "name": of["name"], "uid": of["uid"]},
            }
            self._make("/api/v1/persistentvolumes", {"metadata": {"name": of["uid"]}, "spec": spec})

    def _look(self) -> None:
        found = self.control.call("GET", "/api/v1/pods")["items"]
        bound = {pod["metadata"]["uid"]: pod for pod in found if pod["spec"].get("nodeName")}
        text = self.hosts_text()
        for uid, manifest in bound.items():
            if self.is_silent(manifest["spec"]["nodeName"]):
                continue
            pod = self._pods.get(uid)
            if pod is None and manifest["status"].get("phase") == "Pending":
                pod = self._pods[uid] = _Pod(self, manifest)
            if pod is not None:
                pod.hosts.write_text(text)
                pod.look(manifest)
            elif "deletionTimestamp" in manifest["metadata"]:
                self.forget(manifest)
        for uid in self._pods.keys() - bound.keys():
            if not self.is_silent(self._pods[uid].manifest["spec"]["nodeName"]):
                self._pods.pop(uid).end()

    def is_silent(self, host: str) -> bool:
        return self._over.is_set() or self.cluster.status(host) != "up"

    def tell(self, manifest: Mapping[str, Any], phase: str, state: dict[str, Any]) -> None:
        """Tell the API server the state of a pod."""
        of, container = manifest["metadata"], manifest["spec"]["containers"][0]
        ready = "running" in state
        address = self.cluster.address(manifest["spec"]["nodeName"])
        kinds = {
            "Initialized": True,
            "PodScheduled": True,
            "ContainersReady": ready,
            "Ready": ready,
        }
        each = {
            "name": container["name"],
            "image": container["image"],
            "imageID": "",
            "state": state,
        }
        status = {
            "phase": phase,
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [
                {"type": kind, "status": str(is_so), "lastTransitionTime": _now()}
                for kind, is_so in kinds.items()
            ],
            "containerStatuses": [{**each, "ready": ready, "restartCount": 0}],
        }
        self._patch(
            f"/api/v1/namespaces/{of['namespace']}/pods/{of['name']}/status", {"status": status}
        )

    def forget(self, manifest: Mapping[str, Any]) -> None:
        """Tell the API server that a pod has gone from its node."""
        of = manifest["metadata"]
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": of["uid"]}}
        with contextlib.suppress(urllib.error.HTTPError):
            path = f"/api/v1/namespaces/{of['namespace']}/pods/{of['name']}"
            self.control.call("DELETE", path, options)

    def _make(self, path: str, body: dict[str, Any]) -> None:
        with contextlib.suppress(urllib.error.HTTPError):  # it is there already
            self.control.call("POST", path, body)

    def _patch(self, path: str, body: dict[str, Any]) -> None:
        with contextlib.suppress(urllib.error.HTTPError):  # it is gone
            self.control.call("PATCH", path, body, "application/merge-patch+json")


class _Pod:
    """A pod on its node: one process, which is the first in a namespace of processes."""

    def __init__(self, nodes: Nodes, manifest: Mapping[str, Any]) -> None:
        self._nodes, self.manifest = nodes, manifest
        of = manifest["metadata"]
        self._folder = nodes.control.folder / "pods" / of["name"]
        self._folder.mkdir(parents=True, exist_ok=True)
        self.hosts = self._folder / "hosts"
        self.log = self._folder / "log"
        self.pid = self._folder / "pid"
        self.group = _MEMORY / f"hvd-elastic-pod-{of['uid']}"
        self._process: subprocess.Popen[str] | None = None
        self._end_at: float | None = None
        self._ended = False
        self._signalled_at: float | None = None
        self._looking = threading.Lock()

    @property
    def runs(self) -> bool:
        return self._process is not None and not self._ended

    def look(self, manifest: Mapping[str, Any]) -> None:
        """Do what is due for the pod as it is wanted now."""
        with self._looking:
            self._look(manifest)

    def _look(self, manifest: Mapping[str, Any]) -> None:
        self.manifest = manifest
        going = "deletionTimestamp" in manifest["metadata"]
        if self._process is None:
            if going:
                self._nodes.forget(manifest)
            else:
                self._start()
            return
        status = self._process.poll()
        if status is not None and not self._ended:
            self._ended = True
            code = 128 - status if status < 0 else status
            said = self.log.read_text(errors="replace")[-2000:] if code else ""
            reason = "OOMKilled" if self._lacked_memory() else "Error" if code else "Completed"
            end = {"exitCode": code, "reason": reason, "message": said}
            end |= {"startedAt": self._since, "finishedAt": _now()}
            phase = "Failed" if code else "Succeeded"
            self._nodes.tell(manifest, phase, {"terminated": end})
        elif not self._ended and self._lacked_memory():
            self.kill()  # all of it, as Kubernetes does from 1.28 on
        if going and self._ended:
            self._nodes.forget(manifest)
        elif going and self._end_at is None:
            grace_s = manifest["metadata"].get("deletionGracePeriodSeconds") or 0
            self._end_at = time.monotonic() + grace_s
            self._signalled_at = time.monotonic()
            self._signal(signal.SIGTERM if grace_s else signal.SIGKILL)
        elif going and time.monotonic() > (self._end_at or 0.0):
            self.kill()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def end(self) -> None:
        """Kill the pod, and wait for its end."""
        self.kill()
        if self._process is not None:
            self._process.kill()  # with it what it has begun
            self._process.wait()
        with contextlib.suppress(OSError):
            self.group.rmdir()

    def _limit_memory(self, limit: str) -> list[str]:
        """Make a control group with a limit; return words that have what follows run in it."""
        if not limit or not has_memory_groups():
            return []
        self.group.mkdir(exist_ok=True)
        (self.group / "memory.limit_in_bytes").write_text(limit)
        return ["sh", "-c", f'echo $$ >{self.group}/cgroup.procs; exec "$@"', "sh"]

    def _lacked_memory(self) -> bool:
        """Return whether a process of the pod was killed because of the pod's limit."""
        with contextlib.suppress(OSError):
            return "oom_kill 0" not in (self.group / "memory.oom_control").read_text()
        return False

    def _signal(self, number: int) -> None:
        pid = self._first()
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _first(self) -> int | None:
        """Return the first process of the pod, by its id on this machine; None: there is none."""
        if self._process is None or self._process.poll() is not None:
            return None
        with contextlib.suppress(psutil.Error, OSError):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                status = Path(f"/proc/{process.pid}/status").read_text()
                ids = status.partition("NSpid:")[2].partition("\n")[0].split()
                if len(ids) > 2 and ids[-1] == "1":  # below that of the host
                    return process.pid
        return None

    def _start(self) -> None:
        spec, of = self.manifest["spec"], self.manifest["metadata"]
        container = spec["containers"][0]
        if container["image"] not in self._nodes.images:
            said = f'Back-off pulling image "{container["image"]}"'
            waiting = {"waiting": {"reason": "ImagePullBackOff", "message": said}}
            self._nodes.tell(self.manifest, "Pending", waiting)
            return
        try:
            sources = {each["name"]: self._source(each) for each in spec.get("volumes", ())}
        except urllib.error.HTTPError:
            return  # such as a Secret that is not there yet
        mounts = [str(self.hosts), "/etc/hosts"]
        for mount in container.get("volumeMounts", ()):
            mounts += [str(sources[mount["name"]]), mount["mountPath"]]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {"PATH": path, "HOME": "/root", "TMPDIR": "/run"}  # of the pod alone
        environment["KUBERNETES_SERVICE_HOST"] = self._nodes.control.address
        environment["KUBERNETES_SERVICE_PORT"] = str(self._nodes.control.port)
        if ahead_s := self._nodes.ahead_s.get(spec["nodeName"]):
            environment |= {"LD_PRELOAD": str(self._nodes.clock()), "AHEAD_S": str(ahead_s)}
        for each in container.get("env", ()):
            environment[each["name"]] = each.get("value", of["name"])
        argv = [*container.get("command", ()), *container.get("args", ())]
        if "/bare:" in container["image"]:
            argv = ["sh", "-c", 'PATH=/nowhere; exec "$@"', "sh", *argv]
        apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        where = container.get("workingDir", "/")
        limit = container.get("resources", {}).get("limits", {}).get("memory", "")
        limited = self._limit_memory(limit)
        with self.log.open("wb") as log:
            self._process = self._nodes.cluster.popen_on(
                spec["nodeName"],
                [*limited, *apart, "sh", "-c", _POD, "sh", *mounts, "--", where, *argv],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        threading.Thread(target=self._await_end, args=(self._process,), daemon=True).start()
        self._since = _now()
        deadline = time.monotonic() + START_S
        while self._process.poll() is None and time.monotonic() < deadline:
            first = self._first()
            with contextlib.suppress(OSError):
                if first and _POD.encode() not in Path(f"/proc/{first}/cmdline").read_bytes():
                    self.pid.write_text(str(first))  # its volumes are there
                    break
            time.sleep(0.02)
        self._nodes.tell(self.manifest, "Running", {"running": {"startedAt": self._since}})

    def _await_end(self, process: subprocess.Popen[str]) -> None:
        process.wait()
        if self._signalled_at is not None:
            left_s = time.monotonic() - self._signalled_at
            self._nodes.left_s[self.manifest["metadata"]["name"]] = left_s
        # At once, while the nodes may be starting another pod.
        with contextlib.suppress(OSError):
            if not self._nodes.is_silent(self.manifest["spec"]["nodeName"]):
                self.look(self.manifest)

    def _source(self, volume: Mapping[str, Any]) -> Path:
        """Return the folder with the content of a volume."""
        if "persistentVolumeClaim" in volume:
            return self._nodes.claims / volume["persistentVolumeClaim"]["claimName"]
        path = f"/api/v1/namespaces/{self.manifest['metadata']['namespace']}/secrets"
        secret = self._nodes.control.call("GET", f"{path}/{volume['secret']['secretName']}")
        folder = self._folder / volume["name"]
        folder.mkdir(exist_ok=True)
        for name, data in secret["data"].items():
            (folder / name).write_bytes(base64.b64decode(data))
        return folder


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _free_port(address: str) -> int:
    with socket.socket() as one:
        one.bind((address, 0))
        return int(one.getsockname()[1])
