"""Keep on this computer what is known of a cloud: its definition, and each order before it is sent.

An order is on disk, with its token, before the cloud hears of it. So whoever comes after a crash
finds the machines by that token, whatever the process that asked for them has heard.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from io import FileIO
from pathlib import Path

import msgspec

from hvd_elastic.config import home
from hvd_elastic.engines.cloud.provider import Offer, Provider, provider_named
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.own_files import private_folder
from hvd_elastic.records.process_lock import lock_held, take_lock
from hvd_elastic.replaced_files import write_whole

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,38}")
_ORDERS = "orders"


@dataclass(frozen=True)
class Definition:
    """What a user has asked for under a name.

    Attributes:
        name: name of the cloud.
        provider: name of its provider.
        settings: options of that provider, by name.
        types, zones: types of machine and zones that may be asked for; no zones: all.
        least, most: bounds of the number of machines.
        spot: whether machines may be spot machines.
        max_s: longest life of a machine [s].
        budget: largest price of all machines together [currency per hour]; None: no limit.
        slots: workers on each machine; None: what the provider says of its type.
        login: user to log in as; empty: that of the ssh configuration.
        ssh_config: path of the ssh configuration; None: the user's own.
        public_key: public key that may log in, put there by the machine itself; empty: none.
        hostfile: where the hosts are written.
        prepare: command of this computer that prepares a new machine; empty: none is needed.
        deadline: when all machines end [Unix s].
        ending: whether the machines are being ended for good, so that none is started.
    """

    name: str
    provider: str
    settings: Mapping[str, str]
    types: tuple[str, ...]
    zones: tuple[str, ...] = ()
    least: int = 1
    most: int = 1
    spot: bool = False
    max_s: float = 3600.0
    budget: float | None = None
    slots: int | None = None
    login: str = ""
    ssh_config: str | None = None
    public_key: str = ""
    hostfile: str = ""
    prepare: str = ""
    deadline: float = 0.0
    ending: bool = False

    def open_provider(self) -> Provider:
        """Return the provider; errors as of :func:`.provider.provider_named`."""
        return provider_named(self.provider, self.settings)


@dataclass(frozen=True)
class Intent:
    """An order that was or will be sent, until all its machines have ended.

    Attributes:
        token: its token, a tag of its machines.
        offer: the pool, with the price at that time.
        count: how many machines were asked for.
        at: when [Unix s].
        by: run or cluster that has asked; empty: ``cloud up``.
        ids: machines that were started; None: the answer is not known.
    """

    token: str
    offer: Offer
    count: int
    at: float
    by: str = ""
    ids: tuple[str, ...] | None = None


class CloudFolder:
    """The folder of a cloud, ``$HVD_ELASTIC_HOME/clouds/NAME``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = clouds_folder() / name
        self._used: tuple[int, int] | None = None
        """Device and inode of the lock that :meth:`use` has taken last."""

    @classmethod
    def open(cls, name: str) -> CloudFolder:
        """Return the folder of a cloud that is there.

        Raises:
            RunError: there is none.
        """
        folder = cls(check_name(name))
        if not folder.exists:
            known = ", ".join(each.name for each in all_folders())
            has = f"clouds here: {known}" if known else "there is none here"
            raise RunError(
                f"no cloud is named {name} ({has}). Start one with: hvd-elastic cloud up {name} "
                "--type TYPE --instances N --max-hours H"
            )
        return folder

    @property
    def exists(self) -> bool:
        return (self.path / "cloud.json").exists()

    @property
    def hosts(self) -> Path:
        """Hostfile that is written if the user names no other."""
        return self.path / "hosts"

    def read(self) -> Definition:
        """Return the definition.

        Raises:
            RunError: it cannot be read.
        """
        path = self.path / "cloud.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=Definition)
        except (OSError, msgspec.DecodeError) as error:
            raise RunError(
                f"{path} cannot be read: {error}. The machines are found without it: hvd-elastic "
                f"cloud list --all"
            ) from error

    def write(self, definition: Definition) -> None:
        """Write the definition so that it survives a crash of this computer."""
        private_folder(self.path / _ORDERS)
        self._write(self.path / "cloud.json", json.dumps(asdict(definition), indent=1))

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the lock under which orders are sent, and the definition is changed."""
        with lock_held(self.path / "changing", lambda: None):
            yield

    def use(self, by: str) -> FileIO:
        """Return a lock that only one run or cluster holds at a time; closing it frees it.

        Raises:
            RunError: another one holds it.
        """
        path = self.path / "user"
        private_folder(self.path / _ORDERS)
        lock = take_lock(path)
        if lock is None:
            raise RunError(
                f"cloud {self.name} is used by {path.read_text('utf-8').strip() or 'another'}: "
                "wait for its end, or start another cloud with: hvd-elastic cloud up"
            )
        lock.truncate(0)
        lock.write(by.encode())
        found = os.fstat(lock.fileno())
        self._used = found.st_dev, found.st_ino
        return lock

    def check_use(self) -> None:
        """Check that the cloud is still the one that :meth:`use` was called for, if it was.

        Raises:
            RunError: it was ended, and another one of this name was started, which others use.
        """
        if self._used is None:
            return
        with contextlib.suppress(FileNotFoundError):  # it was ended: there are no machines
            found = (self.path / "user").stat()
            if (found.st_dev, found.st_ino) != self._used:
                raise RunError(
                    f"cloud {self.name} was ended and started again meanwhile (cloud down, cloud "
                    "up), so its machines are not used any more"
                )

    def begin(self, intent: Intent) -> None:
        """Write an order, before it is sent."""
        self._write(self._order(intent.token), json.dumps(asdict(intent)))

    def answer(self, intent: Intent, ids: tuple[str, ...]) -> None:
        """Note which machines an order has started."""
        self.begin(replace(intent, ids=ids))

    def forget(self, token: str) -> None:
        """Remove an order whose machines have ended, or that started none."""
        self._order(token).unlink(missing_ok=True)

    def intents(self) -> list[Intent]:
        """Return the orders, oldest first.

        Raises:
            RunError: one cannot be read.
        """
        found = []
        for path in (self.path / _ORDERS).glob("*.json"):
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=Intent))
            except FileNotFoundError:
                continue  # forgotten meanwhile
            except (OSError, msgspec.DecodeError) as error:
                raise RunError(
                    f"{path} cannot be read: {error}. It names machines that were asked for: look "
                    f"for the tag token={path.stem} at the cloud, then remove the file"
                ) from error
        return sorted(found, key=lambda intent: intent.at)

    def remove(self) -> None:
        """Remove the folder, when no machine is left."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _order(self, token: str) -> Path:
        return self.path / _ORDERS / f"{token}.json"

    @staticmethod
    def _write(path: Path, text: str) -> None:
        try:
            write_whole(path, text + "\n", mode=0o600, synced=True)
        except OSError as error:
            raise RunError(
                f"{path} cannot be written ({error.strerror}), so no machine is asked for: it "
                "could not be found again"
            ) from error


def clouds_folder() -> Path:
    """Return the folder that holds one folder for each cloud."""
    return home() / "clouds"


def all_folders() -> list[CloudFolder]:
    """Return the folders of all clouds that this computer knows."""
    try:
        names = sorted(path.name for path in clouds_folder().iterdir())
    except FileNotFoundError:
        return []
    return [folder for name in names if (folder := CloudFolder(name)).exists]


def check_name(name: str) -> str:
    """Return the name of a cloud.

    Raises:
        UsageError: it is none.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"'{name}' cannot name a cloud: take at most 39 lower-case letters, digits and '-', "
            "such as lab"
        )
    return name


def owner() -> str:
    """Return whose the machines of this computer are, ``user@computer``: a tag of each of them.

    It is made once, so that it stays when the computer gets another name.
    """
    path = home() / "cloud_owner"
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(encoding="utf-8").strip()
    private_folder(home()) if not home().exists() else None
    write_whole(path, f"{getpass.getuser()}@{socket.gethostname()}\n", synced=True)
    return path.read_text(encoding="utf-8").strip()


def setting_s(name: str, default: float) -> float:
    """Return a time that the environment may set [s], as tests do."""
    text = os.environ.get(f"HVD_ELASTIC_CLOUD_{name}_S", "")
    try:
        return float(text) if text else default
    except ValueError:
        raise UsageError(
            f"HVD_ELASTIC_CLOUD_{name}_S is a number of seconds, not '{text}'"
        ) from None
