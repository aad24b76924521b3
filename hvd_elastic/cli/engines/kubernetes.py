"""``hvd-elastic k8s``: submit a run to Kubernetes, lead it there, look at it from outside."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hvd_elastic.cli.engines import slurm_options, tell
from hvd_elastic.cli.options import (
    RequiredRun,
    argument,
    command,
    given_options,
    group_of,
    number_option,
    option,
    whole_number_option,
)
from hvd_elastic.cli.runs.run import lead
from hvd_elastic.cli.runs.run_options import RunOptions
from hvd_elastic.cli.start import INTERRUPTED
from hvd_elastic.engines.growth import Limits
from hvd_elastic.engines.kubernetes import manifests
from hvd_elastic.engines.kubernetes.api import why_ended, why_pending
from hvd_elastic.engines.kubernetes.kubectl import Kubectl
from hvd_elastic.engines.kubernetes.manifests import Asked, as_yaml, check_name, check_namespace
from hvd_elastic.engines.kubernetes.pods import ROLE_LABEL, RUN_LABEL
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.hosts.hostfile import Host, Hostfile
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.records.run_folder import RunFolder, new_run_id
from hvd_elastic.records.summary import summarize
from hvd_elastic.replaced_files import replacing, write_whole

_tell = functools.partial(tell, "kubernetes")
_LOOK_AT_S = 600
"""How long a pod stays in which a run that has ended is looked at [s]."""
_LINGER_S = 2.0
"""How long the pod of the leader stays after the end, for commands in it that show the end [s]."""
_START_S = 120.0
"""How long that pod may take to start [s]."""

_JOB = {"apiVersion": "batch/v1", "kind": "Job"}

Namespace = Annotated[
    str | None,
    option("namespace of the pods (default: of kubectl's context)", "-N", "--namespace"),
]

Words = Annotated[
    list[str] | None, argument("Further words of the command, as without k8s.", "[WORD]...")
]


@dataclass(frozen=True)
class LeadOptions(RunOptions):
    """The options of ``k8s lead``: those of a run, and how many pods it has."""

    pods: Annotated[str | None, option("fewest and most pods, such as 2-8", metavar="N[-M]")] = None
    slots_per_pod: Annotated[int, whole_number_option("workers in each pod", "--slots-per-pod")] = 1
    leader_grace_s: Annotated[
        float,
        number_option("seconds the hosts train on while a leader is missing", "--leader-grace"),
    ] = 600.0
    start_limit_s: Annotated[
        float,
        number_option(
            "seconds after which a pod that has not started is given up", "--start-limit"
        ),
    ] = 600.0
    give_back_after_s: Annotated[
        float,
        number_option(
            "seconds after which a pod that --policy goodput leaves unused is given back",
            "--give-back-after",
        ),
    ] = 120.0

    @property
    def engine(self) -> str:
        return "kubernetes"

    @functools.cached_property
    def range(self) -> tuple[int, int]:
        """Return the fewest and the most pods.

        Raises:
            UsageError: they are not given, or not valid.
        """
        if self.pods is None:
            raise UsageError("say how many pods the run may have: --pods 2-8")
        return slurm_options.parse_nodes(self.pods, "--pods")

    @functools.cached_property
    def given(self) -> Hostfile:
        """Return the most pods that the run may get, under names of no meaning."""
        _, most = self.range
        hosts = [Host(f"pod{n}", slots=self.slots_per_pod) for n in range(1, most + 1)]
        return Hostfile(tuple(hosts), f"--pods {self.pods}")

    @property
    def limits(self) -> Limits:
        least, most = self.range
        return Limits(
            most,
            self.slots_per_pod,
            leave_before_s=0.0,
            give_back_after_s=self.give_back_after_s,
            least=least,
            most_pending=most,
            look_s=2.0,
        )


NOT_HERE = (*slurm_options.NOT_HERE, "python", "preemption")


@dataclass(frozen=True)
class SubmitOptions(LeadOptions):
    """The options of ``k8s submit``: those of ``k8s lead``, and those of its pods."""

    image: Annotated[
        str, option("image of all pods, with the script and this package in it", metavar="IMAGE")
    ] = ""
    gpus_per_pod: Annotated[
        int | None,
        whole_number_option("GPUs of each pod (default workers: as many)", "--gpus-per-pod"),
    ] = None
    namespace: Namespace = None
    home: Annotated[
        str | None,
        option("claim for the run folder, which stays (default: one that goes with the job)"),
    ] = None
    volume: Annotated[
        list[str] | None,
        option("claim that all pods have at a path; may be repeated", metavar="CLAIM:PATH"),
    ] = None
    pod_template: Annotated[
        Path | None, option("manifest of a Pod with what else all pods have", metavar="FILE")
    ] = None
    dry_run: Annotated[bool, option("print the manifests, and submit nothing", "--dry-run")] = False

    def _check_command(self) -> None:
        if not self.command:  # the rest is in the image
            raise UsageError("no command to run. Give it after --, for example: -- python train.py")

    def asked(self, run_id: str, kubectl: Kubectl) -> Asked:
        """Return what is submitted.

        Raises:
            UsageError: an option is not valid.
        """
        volumes = []
        for text in self.volume or ():
            claim, _, path = text.partition(":")
            if not claim or not path.startswith("/"):
                raise UsageError(f"--volume takes CLAIM:PATH such as data:/data, not '{text}'")
            volumes.append((claim, path))
        template = {} if self.pod_template is None else kubectl.read_template(self.pod_template)
        found = Asked(run_id, self.image, self.gpus_per_pod or 0, self.home, volumes, template)
        if not found.host_pod()["spec"]["containers"][0]["image"]:
            raise UsageError("name the image of the pods: --image registry.example/train:1")
        return found


_OF_PODS = {
    *("image", "gpus_per_pod", "namespace", "home", "volume", "pod_template", "dry_run"),
    *("as_json", "run_id", "resume", "command"),
}


def _passed_on(context: typer.Context) -> Iterator[str]:
    """Yield the words of the options that the leader gets as they were given."""
    for name, word in given_options(context).items():
        value = context.params[name]
        if name not in _OF_PODS:
            yield from [word] if isinstance(value, bool) else [word, str(value)]


@command(SubmitOptions, but=NOT_HERE, pass_on=True)
def submit(options: SubmitOptions, context: typer.Context) -> None:
    """Submit a run to Kubernetes: it begins with the fewest pods, and others join as they start.

    The run is led in the pod of a Job. Each host is a pod that the Job owns: deleting the Job
    deletes all. A pod that is evicted, preempted or lost is replaced, and training
    continues meanwhile.

    Examples:
      hvd-elastic k8s setup | kubectl apply -f -

      hvd-elastic k8s submit --pods 2-8 --image registry.example/train:1 -- python train.py

      hvd-elastic k8s submit --pods 2-8 --gpus-per-pod 4 --slots-per-pod 4 --policy goodput
      --image registry.example/train:1 --volume data:/data --run-id resnet -- python train.py

      hvd-elastic k8s submit --resume resnet
    """
    kubectl = Kubectl(options.namespace)
    passed = [*_passed_on(context)]
    if options.gpus_per_pod and "--slots-per-pod" not in passed:
        passed += ["--slots-per-pod", str(options.gpus_per_pod)]
        options = replace(options, slots_per_pod=options.gpus_per_pod)
    if options.resume is not None:
        if more := {*given_options(context)} - {"resume", "pods", "namespace"}:
            raise UsageError(
                "--resume continues a run as it was started, and only --pods can be new: leave "
                f"{', '.join(sorted(more))} out"
            )
        _submit_again(options.resume, passed, kubectl)
        return
    options.check()
    run_id = options.run_id or new_run_id()
    check_name(run_id)
    asked = options.asked(run_id, kubectl)
    words = ["--run-id", run_id, *passed, "--", *(options.command or ())]
    others = [each for each in (asked.claim_made(), asked.service()) if each is not None]
    if options.dry_run:
        print(as_yaml([*others, asked.job(words)]), end="")
        return
    claims = {f"pvc/{claim}" for claim in (options.home, *(c for c, _ in asked.volumes)) if claim}
    kubectl.call("get", f"serviceaccount/{manifests.ACCOUNT}", *sorted(claims), "--output=name")
    try:
        job = kubectl.create(asked.job(words, policy=kubectl.knows_failure_policies()))
    except KeyboardInterrupt:
        raise RunError(f"interrupted. If it was made: kubectl delete job/{asked.name}") from None
    try:
        for each in others:
            each["metadata"]["ownerReferences"] = [_owner(job)]
            kubectl.create(each)
    except BaseException:  # Ctrl-C too
        kubectl.call("delete", f"job/{asked.name}", "--wait=false")
        raise
    _say_submitted(run_id, options.as_json, f"{options.pods} pods")


def _say_submitted(run_id: str, as_json: bool, what: str) -> None:
    if as_json:
        print(json.dumps({"run_id": run_id, "job": check_name(run_id)}))
        return
    print(run_id)
    print(
        f"job {check_name(run_id)} leads run {run_id} on {what}: hvd-elastic k8s status {run_id}, "
        f"kubectl logs --follow job/{check_name(run_id)}, kubectl get pods -l {RUN_LABEL}={run_id}",
        file=sys.stderr,
    )


def _owner(job: Mapping[str, Any]) -> dict[str, Any]:
    of = job["metadata"]
    return {**_JOB, "name": of["name"], "uid": of["uid"]}


def _submit_again(run_id: str, passed: list[str], kubectl: Kubectl) -> None:
    """Submit a run again that is over, by a new job in the place of its last one."""
    name = check_name(run_id)
    job = kubectl.get(f"job/{name}")
    if not _is_over(job):
        raise RunError(f"run {run_id} is not over: hvd-elastic k8s status {run_id}")
    labels, template = job["metadata"]["labels"], job["spec"]["template"]
    container = template["spec"]["containers"][0]
    at = container["args"].index("--")
    before, command_words = container["args"][2:at], container["args"][at:]
    container["args"] = ["--resume", run_id, *before, *passed, *command_words]
    template["metadata"]["labels"] = {**labels, ROLE_LABEL: "leader"}  # without those of the job
    fields = ("backoffLimit", "podFailurePolicy", "template")
    spec = {field: job["spec"][field] for field in fields if field in job["spec"]}
    again = {**_JOB, "metadata": {"name": name, "labels": labels}, "spec": spec}
    claims = [each.get("persistentVolumeClaim", {}) for each in template["spec"]["volumes"]]
    is_made = name in [claim.get("claimName") for claim in claims]
    kept = [f"service/{name}", *([f"pvc/{name}"] if is_made else [])]
    for each in kept:  # before the old job goes, and takes along what it owns
        _own(kubectl, each, None)
    try:
        kubectl.call("delete", f"job/{name}", "--wait=true")
        owner = _owner(kubectl.create(again))
    except (RunError, KeyboardInterrupt) as error:
        path = Path(f"{name}.json")
        write_whole(path, json.dumps(again, indent=1))  # the cluster may not have it any more
        raise RunError(
            f"run {run_id} was not submitted again ({str(error) or 'interrupted'}). If there is no "
            f"job {name} now, make it with: kubectl create --filename {path}"
        ) from error
    for each in kept:
        _own(kubectl, each, [owner])
    _say_submitted(run_id, False, "its pods again")


def _is_over(job: Mapping[str, Any]) -> bool:
    told = job["status"].get("conditions", ())
    return any(each["type"] in ("Complete", "Failed") and each["status"] == "True" for each in told)


def _own(kubectl: Kubectl, thing: str, owners: list[dict[str, Any]] | None) -> None:
    patch = json.dumps({"metadata": {"ownerReferences": owners}})
    kubectl.call("patch", thing, "--type=merge", f"--patch={patch}")


def setup(namespace: Namespace = None) -> None:
    """Print the service account of leaders, with the smallest Role that suffices.

    Examples:
      hvd-elastic k8s setup | kubectl apply -f -

      hvd-elastic k8s setup --namespace ml | kubectl apply -f -
    """
    found = manifests.account_and_role()
    if namespace is not None:
        check_namespace(namespace)
        for each in found:
            each["metadata"]["namespace"] = namespace
    print(as_yaml(found), end="")


# -- in the pod of the leader ------------------------------------------------------------------


@command(LeadOptions, but=NOT_HERE, pass_on=True)
def lead_in_pod(options: LeadOptions) -> None:
    """Lead a run in this pod, which a Job owns, with pods as hosts; for the manifest of the Job.

    A run that an earlier pod of the Job has led continues, in the same processes if they live.

    Examples:
      hvd-elastic k8s lead --run-id r1 --pods 2-8 -- python train.py
    """
    from hvd_elastic.engines.kubernetes.api import Api
    from hvd_elastic.engines.kubernetes.engine import kubernetes_engine, leave_at_sigterm, own_pod

    leave_at_sigterm()
    api = Api(os.environ)
    own = own_pod(api)
    try:
        pod = json.loads(os.environ[manifests.POD_VARIABLE])
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"{manifests.POD_VARIABLE} has to hold the manifest of a host pod as JSON, as in: "
            f"hvd-elastic k8s submit --dry-run ({error})"
        ) from error
    job = own["metadata"]["ownerReferences"][0]["uid"]
    run_id = options.resume or options.run_id
    if run_id is None:
        raise UsageError("name the run: --run-id r1")
    folder = RunFolder.find(run_id)
    if folder is None:
        if options.resume is not None:
            RunFolder.open(run_id)  # says that there is none
        options.check()
        spec = options.spec()
        again = f"hvd-elastic k8s submit --resume {run_id}"
        folder = RunFolder.create(run_id, {**spec.as_dict(), "job": job, "resume": again})
    spec = RunSpec.from_dict(folder.read_run(), run_id)
    past = summarize(folder.iter_events())
    if (led := folder.read_run().get("job")) != job and options.resume is None:
        raise RunError(
            f"run {run_id} was led by another job ({led}): take another --run-id, or --resume"
        )
    if past.status == "succeeded":  # whichever job led it
        _tell(f"run {run_id} has finished: there is nothing to resume")
        raise typer.Exit(0)
    if led == job and past.status in ("stopped", "failed"):
        _tell(f"run {run_id} has {past.status} already: {folder.resume_command}")
        raise typer.Exit(int(past.status == "failed"))
    folder.write_run({"job": job})
    engine = kubernetes_engine(
        folder, api, own, pod, options.limits, spec, options.start_limit_s, _tell
    )
    status = lead(spec, folder, resumed=past.attempts > 0, as_json=options.as_json, engine=engine)
    time.sleep(_LINGER_S)
    raise typer.Exit(0 if status == INTERRUPTED else status)


# -- from outside ------------------------------------------------------------------------------


def _outside(verb: str, text: str) -> Any:
    """Return a command that runs one of ours where the run is led."""

    def call(
        run: RequiredRun,
        words: Words = None,
        namespace: Namespace = None,
    ) -> None:
        rest = words or []
        rest = rest[1:] if rest[:1] == ["--"] else rest
        raise typer.Exit(subprocess.call(_command(Kubectl(namespace), verb, run, *rest)))

    call.__doc__ = f"""{text}

    Examples:
      hvd-elastic k8s {verb} r1
    """
    return command(pass_on=True)(call)


def get(
    run: RequiredRun,
    name: Annotated[
        str | None, argument("A file to copy; all are listed if left out.", "NAME")
    ] = None,
    dest: Annotated[Path | None, argument("Where to copy it to (default: here).", "DEST")] = None,
    namespace: Namespace = None,
) -> None:
    """List the files that the script of a run has saved, or copy one to this machine.

    Examples:
      hvd-elastic k8s get r1 best.pt models/
    """
    kubectl = Kubectl(namespace)
    if name is None:
        raise typer.Exit(subprocess.call(_command(kubectl, "get", run)))
    target = dest / name if dest is not None and dest.is_dir() else dest or Path(name)
    _fetch(_command(kubectl, "get", run, name, "-", shown=False), target)


def report(
    run: RequiredRun,
    out: Annotated[Path | None, option("Where to write it (default: RUN.html).")] = None,
    namespace: Namespace = None,
) -> None:
    """Summarize a run, and plot it in one HTML file on this machine.

    Examples:
      hvd-elastic k8s report r1
    """
    made = f"/tmp/{run}.html"  # noqa: S108  (of the pod)
    ours = shlex.join([*_OURS, "report", run, "--out", made])
    text = f"{ours} >&2 && cat {made}"
    kubectl = Kubectl(namespace)
    pod = _pod_of(kubectl, run)
    _fetch(
        kubectl.command("exec", "--stdin", pod, "--", "sh", "-c", text), out or Path(f"{run}.html")
    )


_OURS = ("python3", "-m", "hvd_elastic.cli.app")


def _command(kubectl: Kubectl, *words: str, shown: bool = True) -> list[str]:
    """Return a command that runs one of ours where a run is led.

    Args:
        shown: whether its output goes to our own; a terminal would change the bytes of a file.
    """
    terminal = ["--tty"] if shown and sys.stdin.isatty() and sys.stdout.isatty() else []
    pod = _pod_of(kubectl, words[1])
    return kubectl.command("exec", "--stdin", *terminal, pod, "--", *_OURS, *words)


def _fetch(words: list[str], target: Path) -> None:
    """Write what a command prints to a file, whole or not at all."""
    with replacing(target) as temporary:
        with temporary.open("wb") as file:
            status = subprocess.call(words, stdout=file)
        if status:
            raise RunError(f"{target} was not written: the command in the pod has failed")
    print(target)


def _pod_of(kubectl: Kubectl, run_id: str) -> str:
    """Return a pod with the home of a run: that of the leader, or else one that is made for it.

    Raises:
        RunError: there is no such run, or the pod does not start.
    """
    name = check_name(run_id)
    chosen = f"{RUN_LABEL}={run_id},{ROLE_LABEL} in (leader,look)"
    pods = kubectl.get("pods", f"--selector={chosen}")["items"]
    for pod in pods:
        if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]:
            return str(pod["metadata"]["name"])
    job = kubectl.get(f"job/{name}")
    why = next((text for pod in pods if (text := why_pending(pod) or why_ended(pod))), "")
    if not _is_over(job):
        if job["spec"].get("suspend"):
            why = "its job is suspended, by a queue such as Kueue's or by hand"
        why = why or f"kubectl describe job/{name} says more"
        raise RunError(f"no pod leads run {run_id} now: {why}")
    template = job["spec"]["template"]
    template["metadata"]["labels"] = {RUN_LABEL: run_id, ROLE_LABEL: "look"}
    container = template["spec"]["containers"][0]
    container |= {"command": ["sleep", str(_LOOK_AT_S)], "args": []}
    template["spec"]["automountServiceAccountToken"] = False
    template["metadata"] |= {"generateName": f"{name}-look-", "ownerReferences": [_owner(job)]}
    pod = kubectl.create({"apiVersion": "v1", "kind": "Pod", **template})["metadata"]["name"]
    last = f" (the last one: {why})" if why else ""
    print(f"no pod leads the run{last}: {pod} shows it for {_LOOK_AT_S} s", file=sys.stderr)
    limit = f"--timeout={_START_S:g}s"
    with contextlib.suppress(RunError):
        words = ("wait", f"pod/{pod}", "--for=condition=Ready", limit)
        kubectl.call(*words, timeout_s=2 * _START_S)
        return str(pod)
    kubectl.call("delete", f"pod/{pod}", "--wait=false")
    raise RunError(
        f"no pod leads run {run_id}, and one to look at it has not started in {_START_S:g} s: "
        f"kubectl get events --field-selector involvedObject.name={pod}"
    )


k8s = group_of(
    "Submit a run to Kubernetes, which gives pods as hosts.",
    {
        "submit": submit,
        "setup": setup,
        "lead": lead_in_pod,
        "status": _outside("status", "Say how a run is doing."),
        "logs": _outside("logs", "Show or follow the workers' output."),
        "attach": _outside("attach", "Follow a run; Ctrl-C leaves it running."),
        "scale": _outside("scale", "Set the number of workers of a run."),
        "stop": _outside("stop", "End a run cleanly, with a checkpoint."),
        "get": get,
        "report": report,
    },
)
