"""Options of sbatch as its users write them: in words, in scripts and in the environment."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hvd_elastic.errors import UsageError

_LONG = dict(
    re.findall(
        r"(\w)=(\S+)",
        "A=account a=array b=begin C=constraint c=cpus-per-task D=chdir d=dependency e=error "
        "F=nodefile G=gpus H=hold h=help J=job-name N=nodes n=ntasks o=output p=partition q=qos "
        "t=time V=version W=wait w=nodelist x=exclude",
    )
)
"""Long names of options by their letters."""
_FLAGS = frozenset("HIOQVWhksv")
"""Letters of options without a value, behind which other options may follow in the same word."""
_SHORTENED = (
    *("--array", "--chdir", "--dependency", "--exclude", "--gpus", "--hold", "--job-name"),
    *("--nodefile", "--nodelist", "--nodes", "--ntasks", "--ntasks-per-node", "--output"),
    *("--partition", "--signal", "--test-only", "--time", "--version", "--wait", "--begin"),
)
"""Options that this package looks at, of which sbatch takes any first part that is clear."""
_FREE_TEXT = ("--comment", "--wckey", "--mail-user", "--export")
VARIABLES = {
    "SBATCH_MEM_PER_NODE": "--mem",
    "SBATCH_TIMELIMIT": "--time",
    **{
        f"SBATCH_{name.upper().replace('-', '_')}": f"--{name}"
        for name in (
            *("account", "constraint", "cpus-per-gpu", "exclusive", "gpus", "gpus-per-node"),
            *("gpus-per-task", "gres", "mem-per-cpu", "mem-per-gpu", "partition", "qos"),
            *("reservation", "wckey"),
        )
    },
}
"""Variables that say what sbatch is to ask for; others, such as of the job's name, are ours."""


@dataclass(frozen=True)
class SbatchOption:
    """An option of sbatch.

    Attributes:
        name: its long name where this package knows it.
        value: its value; empty: it has none.
    """

    name: str
    value: str = ""

    def __str__(self) -> str:
        """Return the option as one word.

        >>> [str(SbatchOption(*each)) for each in (("--account", "a"), ("-L", "b"), ("-k",))]
        ['--account=a', '-Lb', '-k']
        """
        between = "=" if self.value and self.name.startswith("--") else ""
        return f"{self.name}{between}{self.value}"


def parse_options(text: str) -> Iterator[SbatchOption]:
    """Yield the options in one word of a command line, which may be several one-letter ones.

    Raises:
        UsageError: it is no option, or several that blanks separate.

    >>> texts = ("-N4", "-Ha1-3", "--exclude a,b", "--arr=2")
    >>> [str(each) for text in texts for each in parse_options(text)]
    ['--nodes=4', '--hold', '--array=1-3', '--exclude=a,b', '--array=2']
    """
    match = re.fullmatch(r"-[A-Za-z].*|(--[A-Za-z][\w-]*)(?:(?:=|\s+)(.*))?", text)
    if match is None:
        raise UsageError(
            f"--sbatch {text!r} is no option of sbatch: write it as one word, such as "
            "--sbatch=--account=vision"
        )
    if name := match[1]:
        value = match[2] or ""
        if name not in _SHORTENED:
            name = next((each for each in _SHORTENED if each.startswith(name)), name)
        yield _one(text, name, value)
        return
    rest = text[1:]
    while rest:
        letter, rest = rest[0], rest[1:]
        name = f"--{_LONG[letter]}" if letter in _LONG else f"-{letter}"
        if letter in _FLAGS:
            yield SbatchOption(name)
        else:
            yield _one(text, name, rest.strip())
            return


def _one(text: str, name: str, value: str) -> SbatchOption:
    if name not in _FREE_TEXT and re.search(r"\s--?[A-Za-z]", value):
        raise UsageError(
            f"--sbatch {text!r} has several options: give each one by a --sbatch of its own"
        )
    return SbatchOption(name, value)


def options_in(environment: Mapping[str, str]) -> list[SbatchOption]:
    """Return what the variables of sbatch in an environment ask for.

    >>> [str(each) for each in options_in({"SBATCH_QOS": "high", "SBATCH_JOB_NAME": "x"})]
    ['--qos=high']
    """
    return [
        SbatchOption(name, environment[variable])
        for variable, name in VARIABLES.items()
        if variable in environment
    ]


def as_line(option: str) -> str:
    r"""Return a ``#SBATCH`` line with one option, in which blanks and ``#`` would end it.

    >>> as_line('--comment=a "b" #c'), as_line("-La b")
    ('#SBATCH --comment="a \\"b\\" #c"', '#SBATCH -L"a b"')
    """
    cut = option.find("=") + 1 if option.startswith("--") else 2
    name, value = option[:cut], option[cut:]
    if re.search(r"""[\s"'\\#]""", value):
        value = '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
    return f"#SBATCH {name}{value}"
