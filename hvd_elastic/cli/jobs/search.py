"""Implement ``hvd-elastic search``: try hyperparameters, each trial a job of the queue."""

from __future__ import annotations

import csv
import functools
import json
import math
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hvd_elastic.cli.jobs.keeper import start_keeper
from hvd_elastic.cli.jobs.submit import OF_THE_CLUSTER, SubmitOptions
from hvd_elastic.cli.options import (
    AsJson,
    argument,
    command,
    group_of,
    number_option,
    option,
    parse_duration,
    whole_number_option,
)
from hvd_elastic.cli.output import print_json, print_rows, print_table, table_lines, wait_until
from hvd_elastic.cli.start import INTERRUPTED
from hvd_elastic.errors import RunError, UsageError, raise_together
from hvd_elastic.formatting import count, date_words, one_line
from hvd_elastic.records.json_lines import without_nan
from hvd_elastic.search.rungs import judged_examples, judged_value, rungs_reached
from hvd_elastic.search.searching import Search, cluster_of
from hvd_elastic.search.space import Space, check_space, grid_size, of_file, parse_param
from hvd_elastic.search.study import SAMPLERS, Definition, Study, require_optuna, study_names
from hvd_elastic.search.trials import Rules, Trial

if TYPE_CHECKING:
    from hvd_elastic.jobs.place import ClusterFolder

_STEP_S = 1.0
"""Time between two looks at the trials [s]."""
_LONGEST_NAME = 40
_TRIED = 20
"""Calls of a user's ``suggest`` before the study: what it returns may depend on the values."""
StudyArgument = Annotated[str, argument("name of the study; see: hvd-elastic search list", "NAME")]
Detach = Annotated[bool, option("search in the background; see show and stop", "--detach", "-d")]


@dataclass(frozen=True)
class SearchOptions(SubmitOptions):
    """Options of a trial's job, and of the study."""

    name: Annotated[str | None, option("name of the study (default: of the script)", "--name")] = (
        None
    )
    deadline: Annotated[
        str | None, option("end the study within, such as 6h", "--deadline", metavar="TIME")
    ] = None
    param: Annotated[
        list[str] | None,
        option(
            "parameter: lr=1e-4..1:log, layers=1..8, drop=0..0.5:0.1 or act=relu,gelu; repeat it",
            "--param",
            "-p",
            metavar="NAME=VALUES",
        ),
    ] = None
    space: Annotated[
        Path | None,
        option("file with a function suggest(trial) instead of --param", metavar="FILE.py"),
    ] = None
    metric: Annotated[
        str | None, option("metric that the script reports, such as val/accuracy", "--metric")
    ] = None
    aim: Annotated[
        str | None, option("whether more or less is better", "--goal", metavar="max|min")
    ] = None
    trials: Annotated[
        int | None, whole_number_option("most trials (default with grid: all)", "--trials")
    ] = None
    rungs: Annotated[
        int, whole_number_option("rungs at which trials are compared; 1: none", "--rungs")
    ] = 1
    reduction: Annotated[
        int, whole_number_option("one of so many continues at a rung", "--reduction", least=2)
    ] = 3
    max_examples: Annotated[
        float | None,
        number_option(
            "useful examples after which a trial is done, such as 5e6", "--max-examples", above=True
        ),
    ] = None
    sampler: Annotated[str, option("tpe, random, grid or gp", "--sampler")] = "tpe"
    seed: Annotated[
        int | None, whole_number_option("seed of the sampler (default: any)", "--seed", least=0)
    ] = None

    def check(self) -> None:
        """Check all options; see :meth:`RunOptions.check`."""
        raise_together(
            self._check_study,
            self._check_rungs,
            self._check_sampler,
            self._check_space,
            super().check,
        )

    def definition(self, place: ClusterFolder) -> Definition:
        """Return what the study searches, and how."""
        request = self.request(place)
        return Definition(
            metric=self.metric or "",
            rules=Rules(
                self.aim or "",
                self.trials or grid_size(_space_of(self.param)),
                self.rungs,
                self.reduction,
                self.max_examples,
                _until(self.deadline),
            ),
            request=replace(request, name=request.name[:_LONGEST_NAME], deadline=None),
            cluster=str(place.path),
            params=tuple(self.param or ()),
            space=None if self.space is None else str(self.space.absolute()),
            sampler=self.sampler,
            seed=secrets.randbits(31) if self.seed is None else self.seed,
        )

    def _check_study(self) -> None:
        if self.name is not None and len(self.name) > _LONGEST_NAME:
            raise UsageError(
                f"--name {self.name}: the name of a study has at most {_LONGEST_NAME} characters"
            )
        if not self.metric:
            raise UsageError(
                "give --metric NAME: the metric that the script reports, such as val/accuracy"
            )
        if self.aim is None:
            raise UsageError(
                f"give --goal max or --goal min: whether more or less of {self.metric} is better"
            )
        if self.aim not in ("max", "min"):
            raise UsageError(f"--goal is max or min, not '{self.aim}'")

    def _check_rungs(self) -> None:
        if self.rungs == 1:
            return
        if not self.checkpoint_every_s:
            raise UsageError(
                "a held trial continues from its checkpoint, so --rungs needs --checkpoint-every "
                "above 0"
            )
        if self.max_examples is None:
            raise UsageError(
                "--rungs needs --max-examples: the last rung is there, and each other one at "
                f"1/{self.reduction} of the next"
            )
        most = 1
        while self.max_examples / self.reduction**most >= 1:
            most += 1
        if self.rungs > most:
            raise UsageError(
                f"--rungs {self.rungs}: the first would be at less than one example. With "
                f"--max-examples {self.max_examples:g} and --reduction {self.reduction} there are "
                f"at most {most}"
            )

    def _check_sampler(self) -> None:
        if self.sampler not in SAMPLERS:
            raise UsageError(f"--sampler is one of {', '.join(SAMPLERS)}, not '{self.sampler}'")
        if self.sampler == "grid" and self.space is not None:
            raise UsageError("--sampler grid needs all values in advance: use --param, not a file")
        if self.sampler == "grid":
            _check_grid(_space_of(self.param), self.trials)
        elif self.trials is None:
            raise UsageError("give --trials N: the most trials of the study")
        if self.sampler == "gp":
            try:
                import scipy  # noqa: F401
                import torch  # noqa: F401
            except ImportError as error:
                raise UsageError(
                    f"--sampler gp needs {error.name}: pip install {error.name}"
                ) from error

    def _check_space(self) -> None:
        if (self.param is None) == (self.space is None):
            raise UsageError(
                "give the parameters with --param NAME=VALUES, or in a file with a function "
                "suggest(trial)" + ("; both are given" if self.param is not None else "")
            )
        require_optuna()
        if not self.command:
            return  # the job's options say that it is missing
        if self.space is not None:
            import optuna

            tried = optuna.create_study(sampler=optuna.samplers.RandomSampler(0))
            suggest = of_file(self.space)
            for _ in range(_TRIED):
                values = suggest(tried.ask())
                where = f"{self.space}, for every trial"
                check_space([*values], self.command, source=where)
            return
        names = [parse_param(text)[0] for text in self.param or ()]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UsageError(f"--param names {twice[0]} twice")
        check_space(names, self.command)


@command(
    SearchOptions,
    but=(*OF_THE_CLUSTER, "np", "fixed", "plain", "after", "array", "hold", "as_json"),
    pass_on=True,
)
def start(options: SearchOptions, detach: Detach = False) -> None:
    """Start a study, or continue one of the same name and options.

    Each trial is a job; {NAME} in the command is the parameter's value. With [bold]--rungs[/bold]
    trials are compared at equal numbers of useful examples, and only the best of them continue.

    Examples:
      hvd-elastic search --param lr=1e-4..1:log --metric val/accuracy --goal max --trials 64
      -- python train.py --lr {lr}

      hvd-elastic search space.py --metric val_loss --goal min --trials 64 --rungs 3
      --max-examples 5e6 -- python train.py --lr {lr} --width {width}
    """
    require_optuna()
    from optuna.distributions import IntDistribution

    from hvd_elastic.jobs.place import open_cluster

    options.check()
    place = open_cluster(options.cluster)
    _check_daemon(place)
    definition = options.definition(place)
    for each, values in definition.values.items():
        if isinstance(values, IntDistribution):
            print(
                f"{each}: whole numbers from {values.low} to {values.high}; with a point in a "
                f"bound, such as {values.low}.0, any number between them"
            )
    _run(Study.create(definition), detach, definition.rules)


def resume(
    name: StudyArgument,
    trials: Annotated[
        int | None, whole_number_option("most trials from now on", "--trials")
    ] = None,
    deadline: Annotated[
        str | None, option("end it within, such as 6h from now", "--deadline", metavar="TIME")
    ] = None,
    detach: Detach = False,
) -> None:
    """Continue a study whose process has ended, or give it more trials.

    Examples:
      hvd-elastic search resume digits

      hvd-elastic search resume digits --trials 100
    """
    study = Study.open(name)
    rules = study.definition.rules
    if study.definition.sampler == "grid":
        _check_grid(study.definition.values, trials)
    _check_daemon(cluster_of(study))
    until = _until(deadline) or rules.deadline
    _run(study, detach, replace(rules, trials=trials or rules.trials, deadline=until))


def show(
    name: StudyArgument,
    as_csv: Annotated[bool, option("Print comma-separated values instead of text", "--csv")] = (
        False
    ),
    out: Annotated[
        Path | None,
        option("write a page with curves, parameters and slots to this file", "--out", "-o"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the trials of a study, the best first.

    Examples:
      hvd-elastic search show digits

      hvd-elastic search show digits --csv > trials.csv

      hvd-elastic search show digits --out digits.html
    """
    if as_csv + as_json + (out is not None) > 1:
        raise UsageError("--csv, --json and --out are three forms of output: give one of them")
    study = Study.open(name)
    if out is not None:
        _write_page(study, out)
        return
    rules = study.definition.rules
    rows = [_row(rules, trial) for trial in Search(study).ranked(time.time())]
    if as_json:
        print_json({**_about(study), "trials": rows})
    elif as_csv:
        _print_csv(rows)
    else:
        _print_table(study, rows)


def list_(as_json: AsJson = False) -> None:
    """List the studies, oldest first.

    Examples:
      hvd-elastic search list
    """
    found, unreadable = [], []
    for name in study_names():
        try:
            found.append(_about(Study.open(name)))
        except RunError as error:
            unreadable.append(str(error))
    found.sort(key=lambda about: about["created"])
    if as_json:
        print_json(found)
    elif found:
        cells = [["STUDY", "STATE", "TRIALS", "CREATED", "METRIC"]]
        cells += [
            [
                *(about["name"], about["state"], str(about["number"])),
                *(date_words(about["created"])[:16], f"{about['metric']}, {about['goal']}"),
            ]
            for about in found
        ]
        print_table(cells, left={0, 1, 3, 4})
    elif not unreadable:
        print("there is no study yet; start one with: hvd-elastic search --param …")
    if unreadable:
        raise RunError("\n".join(unreadable))


def stop(name: StudyArgument, as_json: AsJson = False) -> None:
    """End a study: its trials end after a last checkpoint.

    Examples:
      hvd-elastic search stop digits
    """
    study = Study.open(name)
    words = f"study {name} has ended; see: hvd-elastic search show {name}"
    if study.is_running:
        study.stop_request.touch()
        try:
            _check_daemon(cluster_of(study))
        except RunError as error:
            raise RunError(f"{error}. Study {name}, which waits for one, ends then") from error
    elif any(trial.status.active for trial in study.trials()):
        _check_daemon(cluster_of(study))
        with study.lock():
            study.stop_request.touch()
            if status := _search(study, lambda _: None):
                raise typer.Exit(status)
    wait_until(
        lambda: not study.is_running,
        f"the jobs of study {name} write a last checkpoint; see: hvd-elastic queue",
    )
    print(json.dumps({"ok": True, "message": words}) if as_json else words)


def best(
    name: StudyArgument,
    get: Annotated[
        str | None,
        option(
            "copy this file of hvd.save of the best trial; if it has none, its weights as .pt or "
            ".safetensors",
            "--get",
            metavar="FILE",
        ),
    ] = None,
    to: Annotated[
        str | None,
        option("where to: file or folder; '-' = stdout, not for weights", "--to", metavar="DEST"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the best trial of a study, or copy its model.

    Examples:
      hvd-elastic search best digits

      hvd-elastic search best digits --get best.pt

      hvd-elastic search best digits --get weights.safetensors
    """
    study = Study.open(name)
    ranked = Search(study).ranked(time.time())
    rules = study.definition.rules
    found: dict[str, Any] = _row(rules, ranked[0]) if ranked else {"value": None}
    if found["value"] is None:
        raise RunError(
            f"no trial of study {name} has reported a number for {study.definition.metric} yet; "
            f"see: hvd-elastic search show {name}"
        )
    if get is not None:
        _get(found["run_id"], get, to, as_json)
        print(
            f"trial {found['trial']} of study {name}, after {found['examples']:,.0f} useful "
            f"examples; its {study.definition.metric} was {_short(found['value'])} at "
            f"{found['value_examples']:,.0f}",
            file=sys.stderr,
        )
        return
    if as_json:
        print_json(found)
        return
    print_rows(
        [
            ("trial", f"{found['trial']} of study {name}, {found['status']}"),
            (
                study.definition.metric,
                f"{_short(found['value'])} at {found['value_examples']:,.0f} useful examples",
            ),
            ("trained", f"{found['examples']:,.0f} useful examples; --get copies this model"),
            *((each, str(value)) for each, value in found["params"].items()),
            ("run", found["run_id"]),
            ("files", f"hvd-elastic search best {name} --get FILE"),
            ("weights", f"hvd-elastic export {found['run_id']} --to safetensors"),
        ]
    )


def _get(run_id: str, name: str, to: str | None, as_json: bool) -> None:
    """Copy a file that a run saved; or write its weights, if it has saved none of that name."""
    from hvd_elastic.cli.runs.export import export
    from hvd_elastic.cli.runs.export import get as get_file
    from hvd_elastic.records.run_folder import RunFolder

    form = {".safetensors": "safetensors", ".pt": "torch"}.get(Path(name).suffix)
    if form is None or to == "-" or (RunFolder.open(run_id).saved / name).is_file():
        get_file(run_id, name, to, as_json)
        return
    target = Path(name if to is None else to)
    export(run_id, form, target / name if target.is_dir() else target, as_json=as_json)


# -- searching -------------------------------------------------------------------------------


def _check_daemon(place: ClusterFolder) -> None:
    """Raise RunError if no daemon answers."""
    from hvd_elastic.jobs.job import Hosts
    from hvd_elastic.jobs.server import ask_daemon

    ask_daemon(place, Hosts())


def _space_of(params: Sequence[str] | None) -> Space:
    return dict(map(parse_param, params or ()))


def _until(deadline: str | None) -> float | None:
    return None if deadline is None else time.time() + parse_duration("--deadline", deadline)


def _check_grid(space: Space, trials: int | None) -> None:
    size = grid_size(space)
    if trials is not None and trials > size:
        raise UsageError(f"--trials {trials}: the grid has {count(size, 'point')}")


def _run(study: Study, detach: bool, rules: Rules) -> None:
    from hvd_elastic.cli.runs.run import begin_in_background

    def work(begun: Callable[[], None]) -> int:
        with study.lock():
            study.stop_request.unlink(missing_ok=True)
            study.set_rules(rules)
            begun()
            return _search(study, functools.partial(print, flush=True))

    if not detach:
        raise typer.Exit(work(lambda: None))
    begin_in_background("search", study.log, work)
    print(f"study {study.name} runs in the background: hvd-elastic search show {study.name}")


def _search(study: Study, tell: Callable[[str], None]) -> int:
    """Search until the study has ended; return the exit status."""
    search = Search(study, tell, start_keeper)
    try:
        while not (why := search.step(time.time())):
            time.sleep(_STEP_S)
    except KeyboardInterrupt:
        name = study.name
        print(
            f"\nstudy {name}: its trials continue, but none is compared, held or added until: "
            f"hvd-elastic search resume {name}   End it with: hvd-elastic search stop {name}",
            file=sys.stderr,
        )
        return INTERRUPTED
    except OSError as error:
        raise RunError(
            f"the journal of study {study.name} cannot be written: {error.strerror}. Its trials "
            f"continue. When it can be written: hvd-elastic search resume {study.name}"
        ) from error
    words = f"study {study.name} has ended: {why}"
    if any(math.isfinite(point.value) for trial in search.trials for point in trial.points):
        words += f". Best: hvd-elastic search best {study.name}"
    tell(words)
    return 0


# -- showing ---------------------------------------------------------------------------------


def _about(study: Study) -> dict[str, Any]:
    definition, trials = study.definition, study.trials()
    state = "stopped" if study.stop_request.exists() else "ended"
    if study.is_running:
        state = "running"
    elif any(trial.status.active for trial in trials):
        state = "detached"
    return {
        "name": study.name,
        "state": state,
        "metric": definition.metric,
        "goal": definition.rules.goal,
        "number": len(trials),
        "most": definition.rules.trials,
        "rung_examples": [*definition.rules.rung_examples],
        "deadline": definition.rules.deadline,
        "created": definition.created,
        "cluster": cluster_of(study).name,
        "command": definition.request.words,
        "folder": str(study.folder),
    }


def _write_page(study: Study, path: Path) -> None:
    from hvd_elastic.records.cluster import summarize_cluster
    from hvd_elastic.records.json_lines import iter_records
    from hvd_elastic.views.search_page import write_search_page

    definition, place = study.definition, cluster_of(study)
    # The queue's events of another user's cluster cannot be read.
    cluster = None
    if not place.is_others:
        cluster = summarize_cluster(iter_records(place.events), place.name)
    trials = Search(study).ranked(time.time())
    write_search_page(path, study.name, definition.rules, trials, definition.metric, cluster)
    print(f"wrote {path}")


def _row(rules: Rules, trial: Trial) -> dict[str, Any]:
    """Return a trial as JSON."""
    row: dict[str, Any] = without_nan(
        {
            "trial": trial.number,
            "status": trial.status.value,
            "value": judged_value(rules, trial),
            "value_examples": judged_examples(rules, trial),
            "examples": trial.examples,
            "rung": rungs_reached(rules, trial),
            "params": trial.params,
            "slots": trial.slots,
            "slot_h": trial.slot_s / 3600,
            "job": trial.job,
            "run_id": trial.run_id,
            "reason": trial.reason,
            "points": trial.points,
        }
    )
    return row


def _print_csv(rows: Sequence[Mapping[str, Any]]) -> None:
    plain = ("trial", "status", "value", "examples", "rung", "slot_h", "job", "run_id", "reason")
    params = [*dict.fromkeys(name for row in rows for name in row["params"])]
    table = csv.writer(sys.stdout)
    table.writerow([*plain, *params])
    for row in rows:
        values = [row["params"].get(name, "") for name in params]
        table.writerow([*(row[name] for name in plain), *values])


def _print_table(study: Study, rows: Sequence[Mapping[str, Any]]) -> None:
    about = _about(study)
    number = f"{about['number']} of {count(about['most'], 'trial')}"
    print(f"study {study.name} ({about['state']}): {number}, {about['metric']}, {about['goal']}")
    params = [*dict.fromkeys(name for row in rows for name in row["params"])]
    heads = ["RANK", "TRIAL", "STATUS", "RUNG", "VALUE", "EXAMPLES", "SLOTS", "SLOT-H"]
    cells = [[*heads, *params, "WHY"]]
    for rank, row in enumerate(rows, 1):
        values = [_short(row["params"].get(name, "")) for name in params]
        cells.append(
            [
                "-" if row["value"] is None else str(rank),
                *(str(row["trial"]), row["status"], str(row["rung"])),
                *(_short(row["value"]), f"{row['examples']:,.0f}"),
                *(str(row["slots"] or ""), f"{row['slot_h']:.2f}", *values),
                one_line(row["reason"]),
            ]
        )
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in table_lines(cells, left=range(len(cells[0]))):
        print(line[:columns])


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str("-" if value is None else value)


class _StartByDefault(typer.core.TyperGroup):
    """Starts a study where no other command of the group is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = args[0] if args else "--help"
        if first.endswith(".py"):
            args = ["start", "--space", *args]
        elif first.startswith("-") and first not in ("--help", "-h"):
            args = ["start", *args]
        return super().parse_args(ctx, args)


search = group_of(
    """Try hyperparameters: each trial is a job of the queue, and the good ones get the slots.

    [bold]search --param … -- COMMAND[/bold] starts a study; its options: search start --help
    """,
    {"start": start, "show": show, "list": list_, "stop": stop, "best": best, "resume": resume},
    _StartByDefault,
)
