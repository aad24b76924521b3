"""``hvd-elastic cloud``: start machines of a cloud, list them, end them, and compare prices."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

from hvd_elastic.cli.engines.slurm_options import parse_nodes
from hvd_elastic.cli.options import (
    AsJson,
    SshConfigOption,
    argument,
    command,
    group_of,
    number_option,
    option,
    whole_number_option,
)
from hvd_elastic.cli.output import print_json, print_table
from hvd_elastic.cli.runs.run_options import check_ssh_config
from hvd_elastic.cli.runs.scaling_options import parse_budget
from hvd_elastic.engines.base import WaitReport
from hvd_elastic.engines.cloud.engine import CloudHosts
from hvd_elastic.engines.cloud.machines import Machines
from hvd_elastic.engines.cloud.provider import Machine, Offer, Provider, provider_named
from hvd_elastic.engines.cloud.reach import Reach
from hvd_elastic.engines.cloud.records import (
    CloudFolder,
    Definition,
    all_folders,
    check_name,
    owner,
)
from hvd_elastic.errors import HvdElasticError, RunError, UsageError
from hvd_elastic.formatting import count, date_words, duration_words
from hvd_elastic.hosts.hostfile import write_hostfile
from hvd_elastic.hosts.ssh_config import ssh_config_for
from hvd_elastic.policy.spot import MachinePlan, slot_price
from hvd_elastic.records.process_lock import is_locked

_KEYS = ("id_ed25519.pub", "id_ecdsa.pub", "id_rsa.pub")
_POLL_S = 2.0
_LEAST_S = 30.0
"""Shortest life of a machine that can be asked for [s]."""


@dataclass(frozen=True)
class ProviderOptions:
    """The options that say which provider is asked, and what it needs to know."""

    provider_name: Annotated[
        str | None,
        option(
            "who has the machines: aws (the default), or command (programs of yours)", "--provider"
        ),
    ] = None
    programs: Annotated[
        Path | None,
        option("folder with the programs start, list and stop, for --provider command"),
    ] = None
    region: Annotated[
        str | None, option("region, for aws (default: AWS_DEFAULT_REGION, or ~/.aws/config)")
    ] = None

    @property
    def provider(self) -> str:
        """Return the name of the provider."""
        return self.provider_name or "aws"

    @property
    def is_given(self) -> bool:
        """Return whether a provider is named by any option."""
        return self.provider_name is not None or bool(self.settings)

    @property
    def settings(self) -> dict[str, str]:
        """Return the options of the provider that are given, by name."""
        found = {f: getattr(self, f) for f in ("region", *_OF_AWS) if getattr(self, f, None)}
        if self.programs is not None:
            found["programs"] = str(self.programs.absolute())
        return {name: str(value) for name, value in found.items()}


_OF_AWS = ("image", "key_name", "security_group", "subnet", "addresses")


@dataclass(frozen=True)
class PoolOptions(ProviderOptions):
    """The options that say which machines."""

    types: Annotated[
        str | None, option("types of machine, such as g5.12xlarge,g6.12xlarge", "--type")
    ] = None
    zones: Annotated[
        str | None, option("zones, such as us-east-1a,us-east-1b (default: all)", "--zone")
    ] = None
    spot: Annotated[bool, option("spot machines, which the cloud may end at any time")] = False

    @property
    def type_list(self) -> tuple[str, ...]:
        found = _words(self.types)
        if not found:
            raise UsageError(
                "say which machines: --type g5.12xlarge (see: hvd-elastic cloud prices)"
            )
        return found


@dataclass(frozen=True)
class UpOptions(PoolOptions):
    """The options of ``cloud up``."""

    instances: Annotated[
        str | None, option("fewest and most machines, such as 4-16", metavar="N[-M]")
    ] = None
    max_hours: Annotated[
        float | None,
        number_option("hours after which every machine ends itself", "--max-hours", above=True),
    ] = None
    budget: Annotated[
        str | None, option("most that all machines cost an hour, such as 40/h", metavar="PRICE")
    ] = None
    hostfile: Annotated[
        Path | None, option("file to write the hosts to (default: in the folder of the cloud)")
    ] = None
    slots: Annotated[
        int | None, whole_number_option("workers on each machine (default: its GPUs)", "--slots")
    ] = None
    login: Annotated[str | None, option("user to log in as (default for aws: ubuntu)")] = None
    public_key: Annotated[
        Path | None,
        option(
            "public key that each machine lets in (default for aws without --key-name: yours in "
            "~/.ssh)",
            metavar="FILE",
        ),
    ] = None
    image: Annotated[
        str | None, option("image, for aws (default: newest Deep Learning Base, Ubuntu 22.04)")
    ] = None
    key_name: Annotated[str | None, option("key pair, for aws", "--key-name")] = None
    security_group: Annotated[
        str | None, option("security groups, for aws: ssh from here, all traffic inside")
    ] = None
    subnet: Annotated[str | None, option("subnet, for aws")] = None
    addresses: Annotated[
        str | None, option("addresses to use, for aws: public (the default) or private")
    ] = None
    ssh_config: SshConfigOption = None
    prepare: Annotated[
        str | None,
        option(
            "run here for each new machine, before it is used; $HOSTFILE names the machine",
            metavar="COMMAND",
        ),
    ] = None
    no_start: Annotated[
        bool, option("start nothing now: run --cloud asks for machines", "--no-start")
    ] = False
    dry_run: Annotated[
        bool, option("print what would be started and what it costs", "--dry-run")
    ] = False
    as_json: AsJson = False

    def definition(self, name: str) -> Definition:
        """Return what is asked for.

        Raises:
            UsageError: an option is missing or not valid.
        """
        check_name(name)
        types = self.type_list
        if self.instances is None:
            raise UsageError("say how many machines: --instances 4, or --instances 4-16")
        least, most = parse_nodes(self.instances, "--instances")
        if self.max_hours is None:
            raise UsageError(
                "say when the machines end at the latest, whatever happens: --max-hours 12"
            )
        max_s = self.max_hours * 3600
        if max_s < _LEAST_S:
            raise UsageError(f"--max-hours {self.max_hours:g} is less than {_LEAST_S:g} s")
        if self.addresses not in (None, "public", "private"):
            raise UsageError(f"--addresses is public or private, not '{self.addresses}'")
        check_ssh_config(self.ssh_config)
        login = self.login or ("ubuntu" if self.provider == "aws" else "")
        return Definition(
            name,
            self.provider,
            self.settings,
            types,
            _words(self.zones),
            least,
            most,
            self.spot,
            max_s,
            None if self.budget is None else parse_budget(self.budget),
            self.slots,
            login,
            ssh_config_for(None, self.ssh_config),
            self._key(),
            str((self.hostfile or CloudFolder(name).hosts).absolute()),
            self.prepare or "",
            time.time() + max_s,
        )

    def _key(self) -> str:
        path = self.public_key
        if path is None:
            if self.provider != "aws" or self.key_name is not None:
                return ""
            folder = Path.home() / ".ssh"
            path = next((folder / k for k in _KEYS if (folder / k).is_file()), None)
            if path is None:
                raise UsageError(
                    f"no public key is in {folder}, so nobody could log in: ssh-keygen -t ed25519 "
                    "makes one; or give --key-name, or --public-key FILE"
                )
        try:
            text = path.expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--public-key {path}: it cannot be read ({error})") from error
        if len(text.splitlines()) != 1 or not text.startswith(("ssh-", "ecdsa-", "sk-")):
            raise UsageError(f"--public-key {path}: it is not one line with a public key of ssh")
        return text


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, (text or "").replace(",", " ").split())))


# -- up ----------------------------------------------------------------------------------------


@command(UpOptions)
def up(
    options: UpOptions,
    name: Annotated[str, argument("Name of the cloud, such as lab.", "NAME")],
) -> None:
    """Start machines, and write a hostfile with their prices.

    As many machines as there are, up to the most, and none if there are fewer than the fewest. Each
    ends itself after --max-hours, whatever happens to this computer. Repeat the command to replace
    machines that have ended.

    Examples:
      hvd-elastic cloud up lab --type g5.12xlarge --instances 4 --max-hours 12 --dry-run

      hvd-elastic cloud up lab --type g5.12xlarge,g6.12xlarge --instances 4-16 --spot
      --max-hours 12 --budget 40/h --hostfile hosts

      hvd-elastic cloud up lab --provider command --programs ./mycloud --type any
      --instances 2 --max-hours 1 --hostfile hosts
    """
    definition = options.definition(name)
    provider = definition.open_provider()
    folder = CloudFolder(name)
    if options.dry_run:
        _show_plan(Machines(folder, provider, _tell, definition=definition), options.as_json)
        return
    _refuse_taken(folder, provider)
    with contextlib.closing(folder.use("hvd-elastic cloud up")):
        with folder.changing():
            definition = _merge(folder, provider, definition)
            folder.write(definition)
        if options.no_start:
            Machines(folder, provider, _tell).offers()  # shows that the types are there
            _tell(f"nothing is started; train with: hvd-elastic run --cloud {name} -- …")
            return
        ready = _start(folder, provider, definition)
    if options.as_json:
        row = {"cloud": name, "hostfile": definition.hostfile, "deadline": definition.deadline}
        print_json({**row, "machines": [*map(_machine_row, ready)]})
        return
    print(definition.hostfile)
    price = _price([each.offer.price for each in ready])
    what = f"{count(len(ready), 'machine')} for {price}, until "
    ssh = ["--ssh-config", definition.ssh_config] if definition.ssh_config else []
    words = shlex.join(["hvd-elastic", "run", "--hostfile", definition.hostfile, *ssh])
    print(
        f"{what}{date_words(definition.deadline)}. Train with: {words} -- python train.py   "
        f"End them with: hvd-elastic cloud down {name}",
        file=sys.stderr,
    )


def _there(provider: Provider, **tags: str) -> list[Machine]:
    """Return the machines with these tags that have not ended."""
    return [each for each in provider.list(tags) if each.state != "ended"]


def _strangers(machines: Sequence[Machine]) -> str:
    """Return whose machines these are if they are not ours; empty: ours, or none."""
    return ", ".join(sorted({each.tags.get("owner", "?") for each in machines} - {owner()}))


def _refuse_taken(folder: CloudFolder, provider: Provider) -> None:
    """Raise RunError if machines run under the name that are not of the cloud of this folder."""
    found = _there(provider, cloud=folder.name)
    if others := _strangers(found):
        raise RunError(
            f"the name {folder.name} is in use: {count(len(found), 'machine')} of {others} under "
            "it. Take another name"
        )
    if found and not folder.exists:
        raise RunError(
            f"{count(len(found), 'machine')} of a cloud {folder.name} of yours run, which this "
            f"computer has no record of. End them first: hvd-elastic cloud down {folder.name} with "
            "the same --provider"
        )


def _merge(folder: CloudFolder, provider: Provider, asked: Definition) -> Definition:
    """Return what holds from now on, if the cloud is there already."""
    if not folder.exists:
        return asked
    old = folder.read()
    if old.ending:
        raise RunError(
            f"cloud {old.name} is being ended; finish that first: hvd-elastic cloud down {old.name}"
        )
    if (old.provider, dict(old.settings)) != (asked.provider, dict(asked.settings)):
        raise RunError(
            f"cloud {old.name} was started with other options of its provider ({old.provider} "
            f"{dict(old.settings)}): take another name, or: hvd-elastic cloud down {old.name}"
        )
    if Machines(folder, provider, _tell, definition=old).live():
        _tell(f"cloud {old.name} is there: its deadline stays {date_words(old.deadline)}")
        return replace(asked, deadline=old.deadline)
    return asked


def _start(folder: CloudFolder, provider: Provider, definition: Definition) -> list[Machine]:
    """Start what is missing and return all machines that can be used; or leave nothing behind."""
    machines, reach = Machines(folder, provider, _tell), Reach(definition)
    hosts = CloudHosts(Path(definition.hostfile), machines, reach, _tell)
    before = {intent.token for intent in folder.intents()}
    try:
        held = machines.live()
        missing = definition.most - len(held)
        if missing > 0:
            machines.start(missing, held, _plan(definition))
        number = len(machines.live())
        if number < definition.least:
            raise RunError(
                f"{count(number, 'machine')} of at least {definition.least} could be started"
                f"{_within(definition)}: ask for further types or zones, for fewer, or later"
            )
        ready = [*hosts.wait()]
        if why := hosts.stay():
            _tell(f"{count(len(why), 'machine')} lost: {'; '.join(sorted({*why.values()}))}")
            machines.stop([*why])
        ready = [each for each in ready if each.id not in why]
        if len(ready) < definition.least:
            why |= hosts.given_up
            raise RunError(
                f"{len(ready)} of at least {count(definition.least, 'machine')} can be used: "
                f"{'; '.join(sorted({*why.values()}))}. Is port 22 open for this computer in "
                "their security group, and does the image have Python and the key?"
            )
        write_hostfile(Path(definition.hostfile), reach.hosts_of(ready))
        return ready
    except BaseException:  # Ctrl-C too
        try:
            if tokens := {intent.token for intent in folder.intents()} - before:
                _tell("what was started is ended again")
                machines.end_all(tokens)
        except BaseException:
            _tell(f"machines may still be running: hvd-elastic cloud down {definition.name}")
            raise
        if not folder.intents():
            folder.remove()
        raise


def _plan(definition: Definition) -> MachinePlan:
    """Return how many machines of each kind ``cloud up`` starts: all of one."""
    most, spot = definition.most, definition.spot
    return MachinePlan(most * spot, most * (not spot), "")


def _show_plan(machines: Machines, as_json: bool) -> None:
    asked = machines.definition
    planned = machines.preview(asked.most, _plan(asked))
    number = sum(n for _, n in planned)
    costs = [offer.price for offer, n in planned for _ in range(n)]
    price = sum(each or 0.0 for each in costs)
    unknown = None in costs
    if as_json:
        pools = [{**asdict(offer), "count": n} for offer, n in planned]
        print_json({"machines": pools, "price": None if unknown else price})
        return
    rows = [["MACHINES", "TYPE", "ZONE", "MARKET", "SLOTS", "PRICE/H"]]
    rows += [[str(n), *_pool_cells(offer)] for offer, n in planned]
    print_table(rows)
    hours = asked.max_s / 3600
    print(
        f"{count(number, 'machine')}: {_price(costs)}, at most {price * hours:.2f} in "
        f"{duration_words(asked.max_s)}. Nothing was started."
    )
    if number < asked.least:
        raise RunError(
            f"{count(number, 'machine')} of at least {asked.least} would be started{_within(asked)}"
        )


def _price(prices: Sequence[float | None]) -> str:
    """Return what machines cost together, in words.

    >>> _price([0.3, None])
    '0.30 an hour and machines whose price is not known'
    """
    known = "" if None not in prices else " and machines whose price is not known"
    return f"{sum(each or 0.0 for each in prices):.2f} an hour{known}"


def _within(asked: Definition) -> str:
    return "" if asked.budget is None else f" within --budget {asked.budget:g} an hour"


# -- down --------------------------------------------------------------------------------------


@command(ProviderOptions)
def down(
    options: ProviderOptions,
    name: Annotated[str | None, argument("Name of the cloud.", "NAME")] = None,
    expired: Annotated[
        bool, option("end all machines of yours that are past their deadline", "--expired")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """End the machines of a cloud for good; done when the cloud says that all have ended.

    A cloud that this computer does not know, such as one of another folder of yours, is found by
    its name with --provider.

    Examples:
      hvd-elastic cloud down lab

      hvd-elastic cloud down --expired
    """
    if (name is None) == (not expired):
        raise UsageError("say what to end: hvd-elastic cloud down NAME, or --expired")
    ended = _end_expired(options) if name is None else _end(name, options)
    if as_json:
        print_json({"ended": ended})
    else:
        print(f"{count(ended, 'machine')} ended; none is left")


def _end(name: str, options: ProviderOptions) -> int:
    folder = CloudFolder(check_name(name))
    if not folder.exists and options.is_given:
        definition = Definition(name, options.provider, options.settings, ())
        found = _there(definition.open_provider(), cloud=name)
        if not any(each.tags.get("owner") == owner() for each in found):
            others = _strangers(found)
            why = f"the machines of that name are of {others}" if others else "none is there"
            raise RunError(f"no machine of a cloud {name} of yours ({owner()}) runs: {why}")
        folder.write(definition)
    folder = CloudFolder.open(name)
    machines = Machines(folder, folder.read().open_provider(), _tell)
    if is_locked(folder.path / "user"):
        using = (folder.path / "user").read_text(encoding="utf-8").strip()
        _tell(f"{using or 'a run'} uses cloud {name}, and loses its machines")
    machines.mark_ending()
    ended = machines.end_all()
    folder.remove()
    return ended


def _end_expired(options: ProviderOptions) -> int:
    """End what is past its deadline, at each provider that this computer knows or is told of."""
    ended, fails = 0, []
    for where, settings in _providers(options):
        try:
            provider = provider_named(*settings)
            past = [each.id for each in _there(provider, owner=owner()) if _is_past(each)]
            if past:
                _tell(f"{where}: {count(len(past), 'machine')} past the deadline")
            left, waiting = {*past}, WaitReport(_tell)
            while left:
                provider.stop(sorted(left))
                waiting.say(f"{where}: waiting for {count(len(left), 'machine')} to end")
                time.sleep(_POLL_S)
                left &= {each.id for each in _there(provider, owner=owner())}
            ended += len(past)
        except HvdElasticError as error:
            fails.append(f"{where}: {error}")
    for folder in all_folders():
        try:
            if folder.read().deadline < time.time() and not fails:
                ended += _end(folder.name, options)
        except HvdElasticError as error:
            fails.append(f"cloud {folder.name}: {error}")
    if fails:
        raise RunError("; ".join(fails))
    return ended


def _is_past(machine: Machine) -> bool:
    deadline = _deadline_of(machine)
    return deadline is not None and deadline < time.time()


def _deadline_of(machine: Machine) -> float | None:
    """Return the deadline that a machine is tagged with [Unix s]; None: it has none."""
    try:
        deadline = datetime.fromisoformat(machine.tags.get("deadline", ""))
    except ValueError:
        return None
    if deadline.tzinfo is None:
        deadline = deadline.replace(tzinfo=timezone.utc)
    return deadline.timestamp()


def _providers(options: ProviderOptions) -> list[tuple[str, tuple[str, Mapping[str, str]]]]:
    """Return each provider that this computer knows or is told of, once: words, and its settings.

    Raises:
        RunError: there is none, so nobody can say what runs.
    """
    found: dict[str, tuple[str, Mapping[str, str]]] = {}
    known = []
    for folder in all_folders():
        with contextlib.suppress(RunError):  # its machines are found without its definition
            known.append((folder.read().provider, folder.read().settings))
    asked = [(options.provider, options.settings)] if options.is_given else []
    for name, settings in [*known, *asked]:
        place = {k: v for k, v in settings.items() if k in ("region", "programs")}
        found[json.dumps([name, place], sort_keys=True)] = name, place
    if not found:
        raise RunError(
            "no cloud is known on this computer, so no provider was asked: name it, such as "
            "--provider aws --region us-east-1"
        )
    return [(" ".join([name, *place.values()]), (name, place)) for name, place in found.values()]


# -- list and prices ---------------------------------------------------------------------------


@command(ProviderOptions)
def list_(
    options: ProviderOptions,
    all_: Annotated[
        bool, option("also machines of other users, and of clouds not known here", "--all")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the machines that run, as the cloud itself says, and what they cost.

    Examples:
      hvd-elastic cloud list

      hvd-elastic cloud list --all --provider aws --region us-east-1
    """
    rows: list[dict[str, Any]] = []
    known: set[str] = set()
    fails = []
    for folder in all_folders():
        try:
            machines = Machines(folder, folder.read().open_provider(), _tell).look()
        except HvdElasticError as error:
            fails.append(f"cloud {folder.name}: {error}")
            continue
        known |= {each.id for each in machines}
        rows += [_machine_row(each) for each in machines]
        if not machines and not as_json:
            _tell(f"cloud {folder.name} has no machine")
    for where, settings in _providers(options) if all_ or options.is_given else ():
        try:
            provider = provider_named(*settings)
            found = _there(provider, **({} if all_ else {"owner": owner()}))
        except HvdElasticError as error:
            fails.append(f"{where}: {error}")
            continue
        more = [each for each in found if each.id not in known]
        known |= {each.id for each in more}
        rows += [_machine_row(each) for each in more]
    if as_json:
        print_json(rows)
    elif rows or not fails:
        _show_machines(rows)
    if fails:
        raise RunError("; ".join(fails))


def _show_machines(rows: Sequence[dict[str, Any]]) -> None:
    columns = ("cloud", "id", "state", "type", "zone", "market", "price", "address", "ends in")
    cells = [[name.upper() for name in columns]]
    cells += [[_cell(row[name]) for name in columns] for row in rows]
    print_table(cells)
    owners = Counter(row["owner"] for row in rows)
    of = ", ".join(f"{number} of {name}" for name, number in owners.items())
    price = _price([row["price"] for row in rows])
    print(f"{count(len(rows), 'machine')}{f' ({of})' if of else ''}, {price}")


@command(PoolOptions)
def prices(options: PoolOptions, as_json: AsJson = False) -> None:
    """Compare the prices of machines by type and zone, cheapest for a slot first.

    Examples:
      hvd-elastic cloud prices --type g5.12xlarge,g6.12xlarge --spot --region us-east-1
    """
    provider = provider_named(options.provider, options.settings)
    found = provider.offers(options.type_list, _words(options.zones), options.spot)
    offers = sorted(found, key=slot_price)
    if as_json:
        print_json([asdict(each) for each in offers])
        return
    rows = [["TYPE", "ZONE", "MARKET", "SLOTS", "PRICE/H", "SLOT/H"]]
    rows += [[*_pool_cells(each), _cell(slot_price(each))] for each in offers]
    print_table(rows)


def _pool_cells(offer: Offer) -> list[str]:
    market = "spot" if offer.spot else "on demand"
    return [offer.type, offer.zone or "–", market, str(offer.slots), _cell(offer.price)]


def _machine_row(machine: Machine) -> dict[str, Any]:
    tags, offer, deadline = machine.tags, machine.offer, _deadline_of(machine)
    return {
        "cloud": tags.get("cloud", ""),
        "id": machine.id,
        "state": machine.state,
        "type": offer.type,
        "zone": offer.zone,
        "market": "spot" if offer.spot else "on demand",
        "price": offer.price,
        "address": machine.address,
        "owner": tags.get("owner", ""),
        "started": machine.started,
        "deadline": tags.get("deadline", ""),
        "ends in": "–" if deadline is None else duration_words(max(0.0, deadline - time.time())),
    }


def _cell(value: object) -> str:
    if isinstance(value, float):
        return "–" if value == float("inf") else f"{value:.3f}"
    return "–" if value in (None, "") else str(value)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


cloud = group_of(
    "Start machines of a cloud, and end them: nothing is left running.",
    {"up": up, "list": list_, "down": down, "prices": prices},
)
