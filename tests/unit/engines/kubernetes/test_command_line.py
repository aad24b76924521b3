"""The command line of ``hvd-elastic k8s``, with a small script in place of kubectl."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hvd_elastic.cli.app import main
from hvd_elastic.engines.kubernetes import engine, manifests
from hvd_elastic.engines.kubernetes.kubectl import Kubectl
from hvd_elastic.errors import UsageError
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.records.run_folder import RunFolder
from tests.paths import ROOT
from tests.unit.records.made_events import whole

SUBMIT = ("k8s", "submit", "--run-id", "r1")
OF_PODS = ("--pods", "2-4", "--image", "image:1")
COMMAND = ("--", "python", "train.py")


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kubectl that logs its words and input, and answers as one that has made it."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "kubectl"
    path.write_text(
        "#!/bin/sh\n"
        f'echo "$*" >>{tmp_path}/words\n'
        'case "$*" in\n'
        """*version*) echo '{"serverVersion": {"major": "1", "minor": "30+"}}';;\n"""
        f"""*create*) tee -a {tmp_path}/made >/dev/null\n"""
        """    echo '{"metadata": {"name": "hvd-r1", "uid": "7"}}'; echo >>made;;\n"""
        f"*patch*) cat {tmp_path}/template;;\n"
        "esac\n"
    )
    path.chmod(0o755)
    return tmp_path


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(words)
    return int(end.value.code or 0)


def test_what_is_made_belongs_to_the_job(kubectl, capsys) -> None:
    options = ("--gpus-per-pod", "4", "--policy", "goodput", "--volume", "data:/data")
    assert call(*SUBMIT, *OF_PODS, *options, *COMMAND) == 0
    job, claim, service = map(json.loads, (kubectl / "made").read_text().split("\n")[:3])
    assert [job["kind"], claim["kind"], service["kind"]] == [
        "Job",
        "PersistentVolumeClaim",
        "Service",
    ]
    assert all(each["metadata"]["ownerReferences"][0]["uid"] == "7" for each in (claim, service))
    words = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert words[words.index("--slots-per-pod") + 1] == "4"
    assert words[-2:] == ["python", "train.py"]
    assert "--volume" not in words
    assert "podFailurePolicy" in job["spec"]


def test_the_manifest_in_the_docs_is_current(capsys) -> None:
    options = ("--pods", "2-8", "--image", "registry.example/train:1", "--dry-run")
    assert call(*SUBMIT, *options, *COMMAND) == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "kubernetes.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--pods", "4-2", "--image", "i", *COMMAND), "Did you mean --pods 2-4"),
        (("--image", "i", *COMMAND), "--pods 2-8"),
        (("--pods", "2", *COMMAND), "--image"),
        ((*OF_PODS, "--volume", "data", *COMMAND), "CLAIM:PATH"),
        ((*OF_PODS, "--run-id", "A_b", *COMMAND), "name of a job of Kubernetes"),
        ((*OF_PODS, "--namespace", "Bad NS", *COMMAND), "--namespace 'Bad NS' is not valid"),
        ((*OF_PODS, "--pod-template", "none.yaml", *COMMAND), "no such file"),
        (OF_PODS, "no command to run"),
    ],
)
def test_mistakes_are_found_before_anything_is_made(kubectl, capsys, words, said) -> None:
    assert call(*SUBMIT, *words) == 2
    assert said in capsys.readouterr().err
    assert not (kubectl / "made").exists()


def test_setup_is_for_a_namespace_that_there_can_be(capsys) -> None:
    assert call("k8s", "setup", "--namespace", "ml-2") == 0
    assert capsys.readouterr().out.count("  namespace: ml-2\n") == 3, "account, role and binding"
    for wrong in ("Bad NS", "", "ml-", "a" * 64, "ml\n"):
        assert call("k8s", "setup", "--namespace", wrong) == 2
        told = capsys.readouterr()
        assert not told.out
        assert "1 to 63 of a-z, 0-9 and -" in told.err


def test_a_template_with_two_containers_is_refused(kubectl) -> None:
    (kubectl / "template").write_text('{"kind": "Pod", "spec": {"containers": [{}, {}]}}')
    with pytest.raises(UsageError, match="has 2 containers"):
        Kubectl().read_template(kubectl / "template")


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("The connection to the server localhost:8080 was refused", "set KUBECONFIG"),
        ("error: You must be logged in to the server (Unauthorized)", "log in again"),
        ('namespaces "ml" not found', "kubectl get namespaces"),
        ('serviceaccounts "hvd-elastic" not found', "k8s setup"),
        ('jobs.batch "hvd-r1" already exists', "another --run-id"),
        ('persistentvolumeclaims "data" not found', "kubectl get pvc"),
    ],
)
def test_what_kubectl_says_comes_with_what_to_do(kubectl, capsys, said, advice) -> None:
    (kubectl / "kubectl").write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    assert call(*SUBMIT, *OF_PODS, *COMMAND) == 1
    assert advice in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:subprocess:ResourceWarning")
def test_an_interrupted_submission_leaves_no_job(kubectl, capsys) -> None:
    """Python waits 0.25 s for the child of an interrupted call, and leaves a slower one."""
    path = kubectl / "kubectl"
    first, rest = path.read_text().split("\n", 1)
    path.write_text(
        f'{first}\ncase "$*" in *create*) [ ! -e {kubectl}/made ] || kill -INT $PPID;; esac\n{rest}'
    )
    assert call(*SUBMIT, *OF_PODS, *COMMAND) == 130
    assert "delete job/hvd-r1 --wait=false" in (kubectl / "words").read_text()


def test_a_job_that_is_not_made_again_leaves_its_manifest(kubectl, capsys) -> None:
    container = {"args": ["--run-id", "r1", "--pods", "2", "--", "python", "train.py"]}
    pod = {"metadata": {}, "spec": {"containers": [container], "volumes": []}}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"labels": {}},
        "spec": {"backoffLimit": 4, "template": pod},
        "status": {"conditions": [{"type": "Failed", "status": "True"}]},
    }
    (kubectl / "job").write_text(json.dumps(job))
    (kubectl / "kubectl").write_text(
        f"#!/bin/sh\n"
        f'case "$*" in get*) cat {kubectl}/job;; create*) echo no quota >&2; exit 1;; esac\n'
    )
    assert call("k8s", "submit", "--resume", "r1", "--pods", "3") == 1
    assert "kubectl create --filename hvd-r1.json" in capsys.readouterr().err
    kept = json.loads((kubectl / "hvd-r1.json").read_text())
    words = kept["spec"]["template"]["spec"]["containers"][0]["args"]
    assert words == [*("--resume", "r1", "--pods", "2", "--pods", "3", "--", "python", "train.py")]


@pytest.mark.parametrize(
    ("spec", "status", "said"),
    [
        ({"suspend": True}, {}, "its job is suspended"),
        ({}, {"exitCode": 1, "message": "No module named hvd_elastic"}, "has no hvd_elastic"),
        ({}, {"exitCode": 0}, "kubectl describe job/hvd-r1"),
    ],
)
def test_why_no_pod_leads_is_said(kubectl, capsys, spec, status, said) -> None:
    container = {"image": "i:1", "state": {"terminated": status}}
    pods = [{"metadata": {}, "status": {"phase": "Failed", "containerStatuses": [container]}}]
    (kubectl / "pods").write_text(json.dumps({"items": pods}))
    (kubectl / "job").write_text(json.dumps({"spec": spec, "status": {}}))
    (kubectl / "kubectl").write_text(
        f'#!/bin/sh\ncase "$*" in *job/*) cat {kubectl}/job;; *) cat {kubectl}/pods;; esac\n'
    )
    assert call("k8s", "status", "r1") == 1
    assert said in capsys.readouterr().err


def test_a_file_that_is_copied_from_a_terminal_passes_no_terminal(kubectl, monkeypatch) -> None:
    """One in the pod would write each line break as two bytes."""
    pod = {"metadata": {"name": "leader"}, "status": {"phase": "Running"}}
    (kubectl / "pods").write_text(json.dumps({"items": [pod]}))
    (kubectl / "kubectl").write_text(
        f'#!/bin/sh\necho "$*" >>{kubectl}/words\n'
        f'case "$*" in *exec*) echo content;; *) cat {kubectl}/pods;; esac\n'
    )
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert call("k8s", "get", "r1", "best.pt") == 0
    assert (kubectl / "best.pt").read_text() == "content\n"
    assert call("k8s", "status", "r1") == 0
    copy, shown = [line for line in (kubectl / "words").read_text().splitlines() if "exec" in line]
    assert "--tty" not in copy
    assert "--tty" in shown


@pytest.mark.parametrize("led", ["this job", "another one"])
def test_a_run_that_has_succeeded_acquires_no_pods_again(
    tmp_path, capsys, monkeypatch, led: str
) -> None:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path))
    monkeypatch.setenv(manifests.POD_VARIABLE, "{}")
    monkeypatch.setattr(engine, "leave_at_sigterm", lambda: None)
    monkeypatch.setattr("hvd_elastic.engines.kubernetes.api.Api", lambda _: None)
    own = {"metadata": {"ownerReferences": [{"uid": "this job"}]}}
    monkeypatch.setattr(engine, "own_pod", lambda _: own)
    monkeypatch.setattr(engine, "kubernetes_engine", lambda *_: pytest.fail("it acquires pods"))
    spec = RunSpec(("true",), "/").as_dict()
    folder = RunFolder.create("r1", {**spec, "job": led})
    end = whole({"kind": "run_finished", "status": "succeeded"})
    folder.events.write_text(json.dumps(end) + "\n")
    assert call("k8s", "lead", "--resume", "r1", "--pods", "2") == 0
    assert "run r1 has finished: there is nothing to resume" in capsys.readouterr().out
    assert folder.read_run()["job"] == led


def test_no_kubectl_is_said(kubectl, capsys, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert call(*SUBMIT, *OF_PODS, *COMMAND) == 1
    assert "kubectl is not on PATH" in capsys.readouterr().err
    assert call(*SUBMIT, *OF_PODS, "--dry-run", *COMMAND) == 0
