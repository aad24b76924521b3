"""A node of a copy from a shared store: it fetches its share and receives the rest.

Commands in addition to those of a node: {"do": "list" | "fetch" | "forget"}. Messages in addition:
{"say": "listed" | "fetched"}. If the user gave no list, one node fetches all files and reports
which ones it got.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from hvd_elastic.programs.copy.comparison import StoreError, check_free
from hvd_elastic.programs.copy.fetch_command import fill, placeholders, variables
from hvd_elastic.programs.copy.frames import LinkError, pack, unpack
from hvd_elastic.programs.copy.node import Destination
from hvd_elastic.programs.copy.store import SharedError, Target, lock_folder, open_own_folder
from hvd_elastic.programs.copy.tree import (
    FETCHED,
    File,
    Folders,
    check_inside,
    copied_mode,
    decode,
    encode,
    identity,
    is_foreign,
    make_folders,
    read_tree,
    remove_entry,
    shown,
    walk,
)
from hvd_elastic.programs.hold_command import become_subreaper
from hvd_elastic.programs.processes import descendants, end_processes

# After this number of failures in a row the command is at fault and not the file.
MOST_FAILED = 5
# Time between SIGTERM and SIGKILL for commands at the end.
GRACE_S = 1.0
# Bytes of a failed command's error output that are read to report the last line.
TOLD_BYTES = 2000
# The kernel's file times are at most this far behind the clock.
CLOCK_NS = 20_000_000
ALL = 0  # the number of the only item if there is no list


class Listed(NamedTuple):
    """A file of the user's list; its size is None if unknown."""

    path: str
    size: int | None


class Fetched(NamedTuple):
    """Result of fetching: numbers of the files that came and that failed, and the first reason."""

    came: list[int]
    failed: list[int]
    why: str


class CommandError(Exception):
    """The user's command failed, or the file is not what the list says."""


class Pull:
    """Fetches listed files with the user's command and gives them their final names.

    Args:
        place: path of the destination.
        command: the user's command, with its placeholders.
        files: the list; None if the command itself knows the files.
        copy: identifier of the copy.
        jobs: maximum number of commands at the same time.
        umask: umask of the command.
    """

    def __init__(
        self,
        place: bytes,
        command: str,
        files: list[Listed] | None,
        copy: str,
        jobs: int,
        umask: int,
    ) -> None:
        self.place = os.path.realpath(place)
        self.files = files or []
        self.has_list = files is not None
        self._command = command
        self._copy = copy
        self._jobs = jobs
        self._umask = umask
        self._folders = Folders(self.place)
        self._naming = threading.Lock()
        self._starting = threading.Lock()
        """Held while a command is started."""
        self._stopped = False
        self._lock = self._own = -1
        self._work = os.path.join(self.place, encode(FETCHED))
        self.fetched = os.path.join(self._work, b"files")

    def find_listed(self) -> list[tuple[int, int, int, int]]:
        """Return number, size, time and mode of the listed files that exist already.

        Raises:
            StoreError: the destination is not a folder, or there is not enough room.
        """
        if not os.path.isdir(self.place):
            if os.path.lexists(self.place):
                raise StoreError(f"{self._folders.shown()} is no folder there")
        found = []
        wanted = count = 0
        there = os.path.isdir(self.place)
        for index, file in enumerate(self.files):
            check_inside(file.path)
            status = self._folders.status(file.path) if there else None
            if status is not None and stat.S_ISDIR(status.st_mode):
                raise StoreError(
                    f"{self._folders.shown(file.path)} is a folder there and a file in the list"
                )
            if (
                status is not None
                and stat.S_ISREG(status.st_mode)
                and file.size in (None, status.st_size)
                and not is_foreign(status)
            ):
                mode = copied_mode(status)
                found.append((index, status.st_size, status.st_mtime_ns, mode))
            else:
                wanted += file.size or 0
                count += 1
        check_free(self.place, wanted, count)
        return found

    def fetch(self, indices: list[int]) -> Fetched:
        """Run the command for these files; they stay in ``fetched`` until :meth:`name` is called.

        Raises:
            StoreError, OSError: the destination cannot be used.
        """
        make_folders(self.place)
        if not self.has_list:
            try:
                self._run({"dst": decode(self.place)})
            except CommandError as error:
                return Fetched([], [ALL], str(error))
            return Fetched([ALL], [], "")
        if self._lock < 0:
            if self._own >= 0:
                os.close(self._own)  # the host that shares it may have removed it
            # Another host that shares the folder holds the lock.
            with contextlib.suppress(SharedError):
                self._lock = lock_folder(self._folders, FETCHED, self._copy)
            shared = self._lock < 0
            self._own = open_own_folder(self._folders, FETCHED) if shared else self._lock
        for index in indices:
            folder = os.path.dirname(os.path.join(self.fetched, encode(self.files[index].path)))
            make_folders(folder)
        if "path" in placeholders(self._command):
            return self._fetch_each(indices)
        return self._fetch_together(indices)

    def _fetch_together(self, indices: list[int]) -> Fetched:
        paths = [encode(self.files[index].path) for index in indices]
        descriptor, name = tempfile.mkstemp(prefix="list-", dir=os.fsdecode(self._work))
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(b"".join(path + b"\n" for path in paths))
            self._run({"dst": decode(self.fetched), "list": decode(os.fsencode(name))})
        except CommandError as error:
            return Fetched([], indices, str(error))
        finally:
            os.unlink(name)
        came, failed, why = [], [], ""
        for index in indices:
            problem = self._problem(index)
            if problem:
                failed.append(index)
                why = why or problem
            else:
                came.append(index)
        return Fetched(came, failed, why)

    def _fetch_each(self, indices: list[int]) -> Fetched:
        came: list[int] = []
        failed: list[int] = []
        reasons: list[str] = []
        in_a_row = 0
        taking = threading.Lock()

        def one(index: int) -> None:
            nonlocal in_a_row
            problem = "not tried"
            if in_a_row < MOST_FAILED:
                try:
                    self._run({"dst": decode(self.fetched), "path": self.files[index].path})
                    problem = self._problem(index)
                except CommandError as error:
                    problem = str(error)
            with taking:
                in_a_row = in_a_row + 1 if problem else 0
                if problem:
                    reasons.append(problem)
                (failed if problem else came).append(index)

        with ThreadPoolExecutor(self._jobs) as pool:
            for done in [pool.submit(one, index) for index in indices]:
                done.result()
        return Fetched(came, failed, reasons[0] if reasons else "")

    def open(self, index: int) -> int:
        """Open a fetched file that does not have its final name; return its descriptor."""
        return os.open(self._name_of(index), os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._own)

    def _name_of(self, index: int) -> bytes:
        """Return the name of a fetched file in our own folder: others may rename that folder."""
        return os.path.join(os.path.basename(self.fetched), encode(self.files[index].path))

    def name(self, index: int) -> tuple[tuple[int, int, int, int], tuple[int, int]]:
        """Give a fetched file its final name; return number, size, time and mode, and identity.

        Raises:
            OSError: it cannot be renamed.
        """
        path = self.files[index].path
        with self._naming:
            folder = ""
            for part in path.split("/")[:-1]:
                folder = f"{folder}/{part}" if folder else part
                if self._folders.status(folder) is None:
                    parent, name = self._folders.of(folder)
                    # Another host that shares the folder was faster.
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, 0o777 & ~self._umask, dir_fd=parent)
            parent, name = self._folders.of(path)
            # Of the file that has come: others may replace it as soon as it has its name.
            number = os.open(self._name_of(index), os.O_PATH | os.O_NOFOLLOW, dir_fd=self._own)
            try:
                os.rename(self._name_of(index), name, src_dir_fd=self._own, dst_dir_fd=parent)
                status = os.fstat(number)
            finally:
                os.close(number)
        found = index, status.st_size, status.st_mtime_ns, copied_mode(status)
        return found, identity(status)

    def foreign(self, patterns: list[str]) -> dict[str, tuple[int, int]]:
        """Return the identity of each file and link that another user may have put there.

        They are by path. A file of another user that appears in a folder below the destination
        while the command runs is the command's: as root, tar and ``rsync -a`` keep owners.
        """
        found = {}
        folders = Folders(self.place)  # of this moment: the command may replace some
        try:
            for path in walk(self.place, patterns)[0].paths:
                status = folders.status(path)
                if status is not None and is_foreign(status) and folders.others_write(path):
                    found[path] = identity(status)
        finally:
            folders.close()
        return found

    def is_open(self) -> bool:
        """Return whether other users can put files into the destination itself."""
        folders = Folders(self.place)
        try:
            return folders.others_write("any")
        finally:
            folders.close()

    def is_new(self, file: File, begun_ns: int) -> bool:
        """Return whether a file was created or changed at or after ``begun_ns``."""
        status = self._folders.status(file.path)
        return status is not None and status.st_ctime_ns >= begun_ns

    def stop(self) -> None:
        """Start no further command; those that run are not ended."""
        with self._starting:
            self._stopped = True

    def close(self, keep: bool) -> None:
        """Release the destination for other copies.

        Args:
            keep: leave partial files there, so that the command can resume them.
        """
        keep = keep and any(names for _, _, names in os.walk(self.fetched))
        with contextlib.suppress(OSError, SharedError, StoreError):
            if not keep and self._lock < 0 and os.path.isdir(self._work):
                self._lock = lock_folder(self._folders, FETCHED, self._copy)
            if not keep and self._lock >= 0:
                remove_entry(self._folders.folder(""), encode(FETCHED))
        self._folders.close()

    def _problem(self, index: int) -> str:
        """Return why a fetched file is not the listed one; "" if it is."""
        file = self.files[index]
        where = shown(file.path)
        try:
            status = os.stat(self._name_of(index), dir_fd=self._own, follow_symlinks=False)
        except OSError:
            return f"the command ended well, and {where} is not below {{dst}}"
        if not stat.S_ISREG(status.st_mode):
            return f"what the command made of {where} is no file"
        if file.size not in (None, status.st_size):
            return f"{where} has {status.st_size} bytes and not {file.size} as in the list"
        return ""

    def _run(self, values: dict[str, str]) -> None:
        text = encode(fill(self._command, values))
        added = {encode(name): encode(value) for name, value in variables(values).items()}
        environment = {**os.environb, **added}
        argv = [b"/bin/sh", b"-c", b'umask "$0"; eval "$1"', b"%03o" % self._umask, text]
        with tempfile.TemporaryFile() as errors:
            with self._starting:
                if self._stopped:
                    raise CommandError("the copy has ended")
                popen = subprocess.Popen(
                    argv,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    start_new_session=True,
                )
            status = popen.wait()
            if status == 0:
                return
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - TOLD_BYTES))
            lines = errors.read().decode("utf-8", "replace").replace("\r", "\n").split("\n")
        told = [line.strip() for line in lines if line.strip()]
        ended = f"signal {-status}" if status < 0 else f"exit status {status}"
        raise CommandError(f"{ended}: {told[-1]}" if told else ended)


class PullNode(Destination):
    """A destination that fetches its share itself."""

    # There is no source to compare with: a file that was fetched, or has the listed size, is right.
    trusts = True

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._umask = os.umask(0o22)
        self._pull: Pull | None = None
        self._failed = False
        self._numbers: dict[str, int] = {}
        self._orders: queue.Queue[list[int]] = queue.Queue()

    def open_session(self) -> None:
        """Start the thread that fetches, then as any destination."""
        become_subreaper()
        threading.Thread(target=self._fetch_on_order, daemon=True).start()
        super().open_session()

    def obey(self, do: str, message: dict[str, Any]) -> None:
        """Carry out one command; fetching continues in its own thread."""
        if do == "list":
            listed = unpack(message["files"])
            self._pull = Pull(
                os.path.expanduser(encode(self.config["place"])),
                self.config["command"],
                None if listed is None else [Listed(path, size) for path, size in listed],
                self.config["copy"],
                self.config["jobs"],
                self._umask,
            )
            self.say("listed", have=pack(self._pull.find_listed()))
        elif do == "fetch":
            self._orders.put(unpack(message["files"]))
        elif do == "forget":
            assert self._plan is not None, "it has a tree by then"
            listed = message["files"]
            numbers = self._plan.needed if listed is None else map(self._number, listed)
            self._forget(numbers, message["why"])
        elif do == "tree":
            tree = read_tree(unpack(message["tree"]))
            self._numbers = {file.path: number for number, file in enumerate(tree.files)}
            self._begin_copy(tree)
            if self._plan is not None and self._target is not None:
                # No other host has what this one was to bring.
                files = tree.files
                lost = [n for n in self._plan.needed if files[n].path in self.fetched_here]
                self._forget(lost, "it was changed after it was fetched")
        else:
            super().obey(do, message)

    def _forget(self, numbers: Iterable[int], why: str) -> None:
        """Give up files of the tree that have not arrived."""
        assert self._target is not None, "it is ready by then"
        for number in numbers:
            if self._target.lacks(number):
                self._target.give_up(number, why)
        if self._target.arrived:
            self._complete(self._target)

    def _number(self, index: int) -> int:
        """Return the number in the tree of a listed file."""
        assert self._pull is not None, "it was given the list first"
        return self._numbers[self._pull.files[index].path]

    def leave(self) -> None:
        """End the commands and all their child processes."""
        if self._pull is not None:
            self._pull.stop()
        end_processes(descendants, GRACE_S)
        super().leave()
        if self._pull is not None:
            target = self._target
            whole = target is not None and target.finished and not target.gone
            if len(self._numbers) < len(self._pull.files):
                whole = whole and not self._failed
            self._pull.close(keep=not whole)

    def _fetch_on_order(self) -> None:
        while True:
            indices = self._orders.get()
            try:
                self._fetch(indices)
            except StoreError as error:
                self.fail(str(error))
            except OSError as error:
                where = f"{shown(os.fsdecode(error.filename))}: " if error.filename else ""
                self.fail(f"{where}{error.strerror or error}")

    def _fetch(self, indices: list[int]) -> None:
        pull = self._pull
        assert pull is not None, "it was given the list first"
        target = self._target
        order = indices
        if target is not None:
            indices = [index for index in indices if target.lacks(self._number(index))]
        patterns = self.config["patterns"]
        before: dict[str, tuple[int, int]] = {}
        was_open = False
        if not pull.has_list:
            make_folders(pull.place)
            before = pull.foreign(patterns)
            # Not afterwards: the command may give the destination its owner in the store.
            was_open = pull.is_open()
        begun_ns = time.time_ns() - CLOCK_NS
        done = pull.fetch(indices) if indices else Fetched([], [], "")
        if self._ending:
            return
        self._failed = self._failed or bool(done.failed)
        if not pull.has_list:
            now = pull.foreign(patterns) if done.came else {}
            tree = walk(pull.place, patterns)[0] if done.came else None
            doubted = [path for path in now if was_open or before.get(path) == now[path]]
            if doubted:
                why = (
                    f"{shown(doubted[0])} belongs to another user, so it may not be what the "
                    "command fetched; remove it, or choose another destination. So that the "
                    "command keeps no owners, give tar --no-same-owner, rsync --no-owner"
                )
                done, tree = Fetched([], [ALL], why), None
            if tree:
                self.fetched_here.update((file.path, now.get(file.path)) for file in tree.files)
            sizes = (
                [file.size for file in tree.files if pull.is_new(file, begun_ns)] if tree else []
            )
            self.say(
                "fetched",
                tree=tree and pack(list(tree)),
                files=pack([]),
                sizes=pack(sizes),
                failed=pack(done.failed),
                came=pack(done.came),
                why=done.why,
            )
            return
        files = []
        if target is None:
            for index in done.came:
                found, self.fetched_here[pull.files[index].path] = pull.name(index)
                files.append(found)
        else:
            self._adopt(target, pull, done.came)
        failed = set(done.failed)
        self.say(
            "fetched",
            tree=None,
            files=pack(files),
            sizes=pack([entry[1] for entry in files]),
            failed=pack(done.failed),
            came=pack([index for index in order if index not in failed]),
            why=done.why,
        )
        if target is not None and target.arrived:
            self._complete(target)

    def _adopt(self, target: Target, pull: Pull, indices: list[int]) -> None:
        """Add files fetched in place of a lost host to the copy; the feeding link is made again."""
        with self._taking:
            if self._link is not None:
                self._link.drop()
            if self._receiving is not None:
                self._receiving.join()
            for index in indices:
                number = self._number(index)
                try:
                    target.adopt(number, pull.open(index))
                except LinkError:
                    # Its partial content was of another version and is dropped now.
                    target.adopt(number, pull.open(index))


def main() -> None:
    """Read the configuration from stdin and run the node."""
    PullNode(json.loads(sys.stdin.buffer.readline().decode("ascii"))).run()
