"""What README and docs say, held against the code: links, commands, options, events, hostfiles."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer._click.exceptions import ClickException

from hvd_elastic.cli.app import SECTIONS
from hvd_elastic.hosts.hostfile import parse_hosts
from hvd_elastic.records.events import EVENT_TYPES
from hvd_elastic.tools.copy.copying import check_destination
from scripts import commands_doc
from tests.paths import ROOT, WORKER_PYTHONPATH

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("hvd-elastic", "runclust", "copyclust", "killclust", "checkclust", "virtclust")
COMMANDS = commands_doc.all_commands()
# What the first words of a command must be made of, so that prose is not taken for one.
GROUPS = {name.rsplit(" ", 1)[0] for name in COMMANDS if name.count(" ") == 2} | {
    "hvd-elastic",
    "virtclust",
}

_LINK = re.compile(r"\[[^\]\n]+\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```(?P<language>[\w-]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`([^`\n]+)`")
_OPTION = re.compile(r"--?[A-Za-z][\w-]*")
_ADVISED = re.compile(rf"\b(?:{'|'.join(PROGRAMS)})\b(?:(?!   )[^.;,:()'\"`|\n])*")
"""A command in a message, up to the end of its sentence."""

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", read(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def command_lines(text: str) -> Iterator[str]:
    """Calls of our programs in fenced blocks (a prompt before them or not) and in code words."""
    for fence in _FENCE.finditer(text):
        if fence["language"] in ("", "console", "sh"):
            for line in fence["body"].splitlines():
                words = line.removeprefix("$ ").split(" #", 1)[0].strip().removesuffix("\\")
                if words.startswith(PROGRAMS):
                    yield words
                    yield from inner_commands(words)
    for code in _CODE.findall(_FENCE.sub("", text)):
        if code.startswith(PROGRAMS):
            yield code


def inner_commands(line: str) -> Iterator[str]:
    """Calls of our programs within a word of a line, as in ``--prepare 'A && B'``."""
    with contextlib.suppress(ValueError):  # the line goes on in the next one
        for word in shlex.split(line, comments=True):
            for command in re.split(r"\s*(?:&&|;)\s*", word):
                if re.match(rf"(?:{'|'.join(PROGRAMS)}) ", command):
                    yield command


def split_command(line: str) -> tuple[str, list[str]]:
    """The full name of the command in a line, and the words after it."""
    words = shlex.split(line, comments=True)
    if re.match(r"hvd-elastic search (--[a-z]|\S+\.py)", line):
        words.insert(2, "start")  # which may be left out
    name, rest = words[0], words[1:]
    while name in GROUPS and rest and not rest[0].startswith("-"):
        name, rest = f"{name} {rest[0]}", rest[1:]
    return name, rest


def unknown_options(name: str, words: list[str]) -> list[str]:
    """The options among the words of a command that it does not have."""
    known = commands_doc.options_of(COMMANDS[name])
    given = []
    for word in words:
        # From here on they are words of the user's own command.
        if word == "--" or (name == "runclust" and not word.startswith("-") and "/" not in word):
            break
        given.append(word.partition("=")[0])
    return [word for word in given if _OPTION.fullmatch(word) and word not in known]


def check_use(name: str, words: list[str]) -> None:
    """Check the arguments of a tool as the tool does, before it reaches a host."""
    if name not in ("killclust", "copyclust") or "--help" in words:
        return
    try:
        given = COMMANDS[name].make_context(name, words).params
    except ClickException:  # the end of it is left out
        return
    if name == "killclust":
        ways = [given["run_id"], given["every"], given["strays"], given["user_processes"]]
        assert sum(map(bool, ways)) == 1, "it needs one of --run, --all, --strays, ..."
    elif given["places"] and not given["from_each"]:
        *source, destination = given["places"]
        assert len(source) == (0 if given["pull"] else 1)
        if not (destination.isupper() or "{" in destination):  # such as DST
            check_destination("".join(source), destination.replace("$PWD", "/here"))


def texts_of(path: Path) -> Iterator[str]:
    """The strings of a module; what they are filled in with is an X."""
    for node in ast.walk(ast.parse(read(path))):
        if isinstance(node, ast.JoinedStr):
            parts = [each.value if isinstance(each, ast.Constant) else "X" for each in node.values]
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_the_readme_is_short_and_every_page_is_in_the_contents() -> None:
    assert len(read(ROOT / "README.md").splitlines()) <= 150
    contents = _LINK.findall(read(ROOT / "docs" / "README.md"))
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages <= set(contents)


@pages
def test_relative_links_resolve(page: Path) -> None:
    for target in _LINK.findall(_FENCE.sub("", read(page))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}"


@pages
def test_commands_and_options_exist(page: Path) -> None:
    for line in command_lines(read(page)):
        name, words = split_command(line)
        if name in GROUPS:
            assert all(word in ("--help", "-h", "--version", "…") for word in words), line
            continue
        assert name in COMMANDS, f"{page.name}: {line!r}: there is no command {name!r}"
        assert unknown_options(name, words) == [], f"{page.name}: {line!r}"
        check_use(name, words)


def test_commands_that_messages_advise_have_their_options() -> None:
    checked = 0
    for path in [*ROOT.glob("hvd_elastic/**/*.py"), *ROOT.glob("datasets_prep/*.py")]:
        for text in texts_of(path):
            for line in _ADVISED.findall(text):
                name, words = split_command(line)
                if name in COMMANDS:  # else it is a group, or prose
                    checked += 1
                    assert unknown_options(name, words) == [], f"{path}: {line!r}"
                    if name == "killclust" and words:
                        check_use(name, words)
    assert checked > 100


@pages
def test_options_named_in_prose_exist(page: Path) -> None:
    known = {option for command in COMMANDS.values() for option in commands_doc.options_of(command)}
    known |= {"--version"}
    for scripts in ("scripts/examples/*.py", "datasets_prep/*.py", "benchmarks/workload.py"):
        for script in ROOT.glob(scripts):
            known |= set(re.findall(r'"(--[a-z-]+)"', read(script)))
    other_programs = {
        # scripts/commands_doc.py, scripts/recipe.sh
        *("--check", "--framework"),
        # horovodrun
        *("--host-discovery-script", "--network-interfaces"),
        # uv, docker
        *("--seed", "--build-arg", "--network", "--ipc"),
        # sbatch
        *("--begin", "--chdir", "--comment", "--cpus-per-gpu", "--cpus-per-task", "--dependency"),
        *("--gid", "--uid", "--wrap"),
        *("--exclude", "--exclusive", "--export", "--gpus", "--gpus-per-node", "--gpus-per-task"),
        *("--hold", "--job-name", "--mail-type", "--mem", "--nodefile", "--nodelist", "--ntasks"),
        *("--ntasks-per-node", "--requeue", "--signal", "--test-only", "--wait"),
    }
    for code in _CODE.findall(_FENCE.sub("", read(page))):
        word = code.split(" ")[0].partition("=")[0]
        if word.startswith("--") and word != "--":
            assert word in known | other_programs, f"{page.name}: `{code}`"


def test_every_command_is_in_the_manual() -> None:
    text = read(ROOT / "docs" / "commands.md")
    assert not [name for name in COMMANDS if name not in text]
    # In the sections of --help, and in their order.
    places = [text.index(f"\n## {title}\n") for title in SECTIONS]
    for title, begin, end in zip(SECTIONS, places, [*places[1:], len(text)], strict=True):
        here = set(re.findall(r"^### hvd-elastic (\S+)", text[begin:end], re.MULTILINE))
        assert here == {name for name in SECTIONS[title] if name != "cluster"}


def test_option_tables_are_current() -> None:
    text = read(commands_doc.PAGE)
    assert text == commands_doc.renew(text), "run: python scripts/commands_doc.py"


def test_events_of_the_manual_are_those_of_the_schema() -> None:
    text = read(ROOT / "docs" / "run-folder.md")
    section = re.search(r"^## Events$(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    assert section is not None
    documented = re.findall(r"^\| `(\w+)` \|", section[1], re.MULTILINE)
    assert len(documented) == len(set(documented))
    assert set(documented) == EVENT_TYPES.keys()


@pages
def test_hostfile_examples_are_read(page: Path) -> None:
    for fence in _FENCE.finditer(read(page)):
        if fence["language"] == "hostfile":
            assert len(parse_hosts(fence["body"], page.name)) > 0


def test_there_are_hostfile_examples() -> None:
    assert sum(read(page).count("```hostfile") for page in PAGES) >= 2


def test_the_diff_of_the_examples_is_shown() -> None:
    command = ["diff", "scripts/examples/digits_single.py", "scripts/examples/digits.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"$ {shlex.join(command)}\n{done.stdout}```" in read(ROOT / "docs" / "get-started.md")


def without_launcher() -> dict[str, str]:
    """The environment of a script that is simply run."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    return {**ours, "PYTHONPATH": WORKER_PYTHONPATH, "OMP_NUM_THREADS": "1"}


def test_eight_changed_lines_are_enough(tmp_path: Path) -> None:
    """The lines that are called needed make the plain script elastic."""
    plain = read(ROOT / "scripts" / "examples" / "digits_single.py")
    changes = {
        "\nparser = ": "\nimport hvd_elastic.torch as hvd\nparser = ",
        "\ntorch.manual_seed": "\nhvd.init()\ntorch.manual_seed",
        "\nloader = DataLoader(": (
            "\noptimizer = hvd.DistributedOptimizer(optimizer, model)\nloader = hvd.DataLoader("
        ),
        "\ndef train():": "\n@hvd.run\ndef train(state):",
        "in range(args.epochs)": "in hvd.epochs(args.epochs)",
        "\ntrain()\n": "\ntrain(hvd.State(model=model, optimizer=optimizer))\n",
    }
    elastic = plain
    for before, after in changes.items():
        assert elastic.count(before) == 1
        elastic = elastic.replace(before, after)
    assert len(set(elastic.splitlines()) - set(plain.splitlines())) == 8
    script = tmp_path / "train.py"
    script.write_text(elastic, encoding="utf-8")
    pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    for name, n in (("train", 200), ("test", 20)):
        images = rng.random((n, 1, 8, 8), dtype=np.float32)
        np.savez(tmp_path / f"{name}.npz", images=images, labels=rng.integers(0, 10, n))
    command = [sys.executable, str(script), "--data", str(tmp_path), "--epochs", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=without_launcher())
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout


STEPS_OF_PAGES = {
    "early-stopping": None,
    "ema": 5 * 8,
    "gradient-accumulation": 30,
    "local-steps": 95,
    "max-steps": 100,
    "mixed-precision": 3 * 8,
    "token-losses": 3 * 8,
    "torch-compile": 3 * 8,
}


@pytest.mark.parametrize("page", STEPS_OF_PAGES)
def test_the_script_of_a_page_runs(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from hvd_elastic.worker import context

    monkeypatch.setattr(context, "_context", None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for name in [name for name in os.environ if name.startswith(("HVD_", "HOROVOD_"))]:
        monkeypatch.delenv(name)
    text = read(ROOT / "docs" / f"{page}.md")
    (script,) = [f["body"] for f in _FENCE.finditer(text) if f["language"] == "python"]
    exec(script, {})
    trained = context.current().worker.progress
    assert STEPS_OF_PAGES[page] in (None, trained.step)
    match page:
        case "max-steps":
            assert (trained.epoch, trained.position) == (12, 128)
        case "gradient-accumulation":
            assert trained.examples == 30 * 4 * 16
        case "early-stopping":
            assert 0 < trained.epoch < 100


@pages
def test_nothing_names_a_place_of_one_machine(page: Path) -> None:
    for unwanted in ("/root/", "/home/", "/var/tmp/"):
        assert unwanted not in read(page)


def test_numpy_reads_a_checkpoint_as_the_manual_shows(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from hvd_elastic.torch.checkpoint import TorchContent
    from hvd_elastic.worker.progress import Progress
    from tests.unit.checkpoint.written import write_alone

    state = {
        "objects": {"model": torch.nn.Linear(3, 2).state_dict()},
        "plain": {"bits": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)},
    }
    manifest = write_alone(tmp_path, TorchContent(state, set()), Progress(step=7)).path
    text = read(ROOT / "docs" / "run-folder.md")
    (example,) = [f["body"] for f in _FENCE.finditer(text) if f["language"] == "python"]
    names: dict[str, Any] = {}
    exec(example, names)
    progress, arrays = names["read_checkpoint"](manifest)
    assert progress["step"] == 7
    weight = state["objects"]["model"]["weight"]
    assert np.array_equal(arrays["model.weight"], weight.numpy())
    bits = arrays["bits"]
    assert (bits.astype("uint32") << 16).view("float32").tolist() == [1.5, -2.0]


def test_the_scripts_that_save_and_load_models_run_as_shown(tmp_path: Path) -> None:
    """The best checkpoint becomes a run, and its model is used for inference."""
    pytest.importorskip("torch")
    home = {**without_launcher(), "HVD_ELASTIC_HOME": str(tmp_path)}
    run = {"HVD_ELASTIC_RUN_FOLDER": str(tmp_path / "runs" / "digits-1")}
    written = {**run, "HVD_ELASTIC_CHECKPOINT_EVERY": "3600"}
    said = ""
    # The last two in one process, as PyTorch is imported for a second or more.
    for names, more in (
        (["distributed-validation"], {}),
        (["best-checkpoint", "inference"], written),
    ):
        pages = [_FENCE.finditer(read(ROOT / "docs" / f"{name}.md")) for name in names]
        examples = [next(f["body"] for f in page if f["language"] == "python") for page in pages]
        command = [sys.executable, "-c", "for each in sys.argv[1:]: exec(each, {})"]
        command[-1] = f"import sys\n{command[-1]}"
        done = subprocess.run(
            [*command, *examples],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={**home, **more},
        )
        assert done.returncode == 0, done.stderr
        said = done.stdout
    assert said.splitlines()[-1] == "1", "the sum of the inputs is positive"
    for folder in (tmp_path, tmp_path / "runs" / "digits-1"):
        assert (folder / "saved" / "best.pt").stat().st_size > 0
    assert (folder / "saved" / "final.pt").exists()


def test_each_promise_of_security_names_tests_that_there_are() -> None:
    tests = "".join(read(path) for path in (ROOT / "tests").rglob("test_*.py"))
    sections = read(ROOT / "docs" / "security.md").split("\n## ")
    against = [each for each in sections if each.startswith(("Another", "A host", "Data"))]
    assert len(against) == 4
    for section in against:
        for promise in section.split("\n- **")[1:]:
            named = re.findall(r"`(test_\w+)`", promise)
            assert named, f"no test shows: {promise[:60]}"
            missing = [name for name in named if f"def {name}(" not in tests]
            assert not missing, f"{promise[:40]}: there is no {missing}"
