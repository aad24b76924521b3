"""Long programs run with one line on the terminal: what is shown, kept, and ended."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from pathlib import Path

import pytest

from hvd_elastic.errors import BuildError
from hvd_elastic.install.quiet import ProgressLine, make_percentage, run_quietly, telling_lines
from tests.paths import LIMIT_S
from tests.waiting import Clock


def test_on_a_terminal_one_line_is_rewritten_and_never_goes_back():
    clock, out = Clock(100.0), io.StringIO()
    progress = ProgressLine("Building", out, clock, terminal=True)
    for seconds, percentage in ((1, 10), (2, 40), (3, 12)):
        clock.now = 100.0 + seconds
        progress.update(percentage)
    clock.now = 165.0
    progress.finish("done")
    text = out.getvalue()
    assert text.count("\n") == 1
    assert [part.split("\x1b")[0] for part in text.split("\r")[1:]] == [
        "Building …  10 %  0:01",
        "Building …  40 %  0:02",
        "Building …  40 %  0:03",
        "Building: done (1:05)",
    ]


def test_elsewhere_a_line_is_written_seldom():
    clock, out = Clock(100.0), io.StringIO()
    progress = ProgressLine("Building", out, clock, terminal=False)
    for _ in range(120):
        clock.now += 1
        progress.update()
    progress.finish("done")
    assert len(out.getvalue().splitlines()) == 5
    assert "\r" not in out.getvalue()


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_output_goes_to_the_log_and_not_to_the_terminal(tmp_path, capfd):
    log = tmp_path / "deep" / "log"
    run_quietly(python("print('x' * 10); print('[ 50%] y')"), label="Working", log=log)
    assert "xxxxxxxxxx" in log.read_text()
    captured = capfd.readouterr()
    assert "xxx" not in captured.out + captured.err
    assert "Working: done" in captured.out


def failure_of(output: str, log: Path) -> str:
    """The message of a program that fails after this output, as pip does after a compiler."""
    last = "".join(f"\nfile {number} of Horovod" for number in range(50))
    program = f"import sys; print({output + last!r}); sys.exit(1)"
    with pytest.raises(BuildError) as failed:
        run_quietly(python(program), label="Building", log=log)
    return str(failed.value)


GCC = """\
  In file included from horovod/common/message.cc:19:
  horovod/common/common.h:344:18: error: 'logic_error' is not a member of 'std'
    344 |       throw std::logic_error("output_index != 0 not supported");
        |                  ^~~~~~~~~~~
  gmake[2]: *** [message.cc.o] Error 1
  common/half.h:1:1: error: another"""


def test_a_failed_build_shows_the_compiler_s_first_error_not_pip_s_last_lines(tmp_path):
    text = failure_of(GCC, tmp_path / "log")
    assert "common.h:344:18: error: 'logic_error' is not a member of 'std'\n" in text
    assert "^~~~" in text
    assert "file 49 of Horovod" not in text
    linker = "/usr/bin/ld: a.o: in function `f()':\na.cc:(.text+0x1): undefined reference to `g()'"
    assert "undefined reference to `g()'" in failure_of(linker, tmp_path / "log")
    cmake = "CMake Error at horovod/torch/CMakeLists.txt:20 (message):\n  no CUDA"
    assert "(message):\n    no CUDA" in failure_of(cmake, tmp_path / "log")


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        ("a.cc:9:1: fatal error: error closing /tmp/a.s: No space left on device", "TMPDIR"),
        ("ERROR: Could not install packages: [Errno 28] No space left on device", "disk is full"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "--jobs 1"),
        (
            "WARNING: Retrying after connection broken by 'NewConnectionError(x)'\nERROR: No torch",
            "the network failed; run the same command again",
        ),
    ],
)
def test_a_full_disk_too_little_memory_and_no_network_are_named_as_such(tmp_path, output, cause):
    first, *rest = failure_of(output, tmp_path / "log").splitlines()
    assert cause in first
    assert output.splitlines()[-1] in "\n".join(rest)


def test_a_failure_shows_the_telling_lines_and_where_the_log_is(tmp_path):
    program = "import sys; print('ERROR: bad'); [print(i) for i in range(50)]; sys.exit(3)"
    with pytest.raises(BuildError) as failed:
        run_quietly(python(program), label="Building", log=tmp_path / "log")
    text = str(failed.value)
    assert "status 3" in text
    assert "ERROR: bad" in text
    assert "\n  49\n" in text
    assert "\n  7\n" not in text
    assert str(tmp_path / "log") in text


def test_a_network_that_does_not_answer_is_told_once_while_pip_tries_again(tmp_path, capfd):
    line = "WARNING: Retrying (Retry(total=4)) after connection broken by 'ConnectTimeoutError(…)'"
    program = f'echo "{line}"; echo "{line}"; sleep 0.1; echo done'
    run_quietly(["sh", "-c", program], label="Installing torch", log=tmp_path / "log")
    told, done = capfd.readouterr().out.splitlines()
    assert told == "Installing torch: the network does not answer; trying again …"
    assert done.startswith("Installing torch: done")


def test_a_full_disk_of_the_log_does_not_hide_why_the_program_failed():
    run_quietly(python("print('x' * 100_000)"), label="Working", log=Path("/dev/full"))
    program = python("print('x' * 100_000); exit('No space left on device')")
    with pytest.raises(BuildError, match="failed with status 1: the disk is full"):
        run_quietly(program, label="Working", log=Path("/dev/full"))


def test_a_program_that_is_not_there_is_named(tmp_path):
    with pytest.raises(BuildError, match="no-such-program"):
        run_quietly(["no-such-program"], label="Working", log=tmp_path / "log")


def test_an_interruption_ends_the_program_and_its_children(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # Both processes hold the pipe open for writing: it is at its end when both are gone.
    program = (
        "import subprocess, sys; f = open(sys.argv[1], 'w');"
        "print('ready', flush=True);"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(600)'];"
        "subprocess.run(sleep, pass_fds=[f.fileno()])"
    )
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_quietly(
            [*python(program), str(pipe)], label="x", log=tmp_path / "log", percentage=interrupt
        )
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""
    os.close(reader)


def interrupted_when_ready(program: str, log: Path, patience_s: float) -> None:
    def interrupt(line: str) -> None:
        if "ready" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_quietly(
            python(program), label="x", log=log, percentage=interrupt, patience_s=patience_s
        )


def test_an_interrupted_program_may_finish_what_must_not_be_cut_short(tmp_path):
    """As dpkg a package; it writes more meanwhile than a pipe holds."""
    program = (
        "import signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try:\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(600)\n"
        "except KeyboardInterrupt:\n"
        "    print('x' * 1_000_000, flush=True)\n"
        f"    open({str(tmp_path / 'done')!r}, 'w')\n"
    )
    interrupted_when_ready(program, tmp_path / "log", patience_s=LIMIT_S)
    assert (tmp_path / "done").exists()


def test_a_program_that_ignores_the_interruption_is_killed_though_nobody_reads_our_output(
    tmp_path, monkeypatch
):
    """`| tee log` ends by the same Ctrl-C."""
    reading, writing = os.pipe()
    program = (
        "import os, signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        "print('ready', os.getpid(), flush=True); time.sleep(600)"
    )
    os.close(reading)
    stdout = os.fdopen(writing, "w")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        interrupted_when_ready(program, tmp_path / "log", patience_s=0.1)
    with contextlib.suppress(BrokenPipeError):
        stdout.close()
    pid = int((tmp_path / "log").read_text().split()[-1])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=["TERM", "HUP"]
)
def test_a_lost_connection_ends_it_as_sigterm_does(tmp_path, number, status):
    """So that folders of 1.5 GB are removed."""

    def former(*_: object) -> None:
        pass

    def end(line: str) -> None:
        os.kill(os.getpid(), number)

    before = signal.signal(number, former)
    try:
        with pytest.raises(SystemExit, match=str(status)):
            run_quietly(python("print(1)"), label="x", log=tmp_path / "log", percentage=end)
        assert signal.getsignal(number) == former
    finally:
        signal.signal(number, before)


def test_a_sighup_that_nohup_has_disabled_stays_disabled(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        hang_up = f"import os, signal; os.kill({os.getpid()}, signal.SIGHUP)"
        run_quietly(python(hang_up), label="x", log=tmp_path / "log")
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("line", "percentage"),
    [("[  2%] x", 2), ("  [100%] Built target", 100), ("[ 12%", None), ("50% done", None)],
)
def test_percentages_come_from_make_alone(line, percentage):
    assert make_percentage(line) == percentage


def test_telling_lines_of_a_short_output_are_all_of_it():
    assert telling_lines(["a", "", "b"]) == ["a", "b"]


def test_the_log_of_two_programs_holds_both(tmp_path: Path):
    for word in ("one", "two"):
        run_quietly(python(f"print('{word}')"), label=word, log=tmp_path / "log")
    text = (tmp_path / "log").read_text()
    assert text.index("\none\n") < text.index("\ntwo\n")
