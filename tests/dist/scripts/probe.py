"""What training jobs of the tests have in common, whatever framework they use.

Before the first step of every generation, and every few steps, each rank appends to
``<folder>/digests.jsonl`` a digest of its parameters, buffers and optimizer state; the tests
compare them. With ``--augment`` each rank appends to ``<folder>/examples.jsonl`` the bytes of each
example that it is given, and a hash of the host that read it. Files in ``<folder>`` steer it:

``enough``        training ends with the epoch
``stuck``         steps take for ever, as long as it is there
``stuck-<host>``  the same on that host alone
``stuck-from``    the same from the step on whose number is in it
                  (``wants-change`` is made there once the leader asks a rank for a change)
``slow-<host>``   examples take three times as long on that host
``gate-<host>``   workers of that host stand still before they meet the others of a new generation;
                  each says so by making ``at-gate-<worker>``
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import time
import zlib
from pathlib import Path

from hvd_elastic.communicator.ring import HorovodCommunicator
from hvd_elastic.worker import context

HOST, WORKER = os.environ["HVD_ELASTIC_HOST"], os.environ["HVD_ELASTIC_WORKER"]
_SIGNS = itertools.cycle((1, -1))


def host_mark():
    """A hash of this host, with another sign each time: no part of what ranks compare."""
    return next(_SIGNS) * zlib.crc32(HOST.encode())


LIFE = os.environ["DIST_TEST_LIFE"]
DIGEST_EVERY = 10
POLL_S = 0.02


def options():
    """Return a parser of the options that every script has."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--examples", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--max-batch-size", type=int, help="adapt the batch up to this size")
    parser.add_argument("--step-time", type=float, default=0.05)
    parser.add_argument("--example-time", type=float, default=0.0, help="for each in a pass")
    parser.add_argument("--unequal-shares", action="store_true", help="though the batch is fixed")
    parser.add_argument("--epochs", type=int, default=10**9)
    parser.add_argument("--seed", type=int, help="of the first parameters; else each rank's own")
    parser.add_argument("--augment", type=float, help="at random, in so many seconds an example")
    parser.add_argument("--double", action="store_true", help="64-bit numbers")
    return parser


class Probe:
    """Tells what this rank holds, and stands still where a test wants it to.

    Args:
        args: the options.
        add: adds a tensor of the framework to a hash.
    """

    def __init__(self, args, tensor_bytes):
        self._args = args
        self._tensor_bytes = tensor_bytes
        self._told = 0
        if args.seed is None:
            args.seed = int.from_bytes(os.urandom(4), "little")  # equal only by synchronisation
        start = HorovodCommunicator.start

        def start_after_gate(communicator, env):
            gate = args.folder / f"gate-{HOST}"
            while gate.exists():
                (args.folder / f"at-gate-{WORKER}").touch()
                time.sleep(POLL_S)
            start(communicator, env)

        setattr(HorovodCommunicator, "start", start_after_gate)  # noqa: B010

    def tell_if_due(self, whole, same):
        """Tell a digest of the whole state of a new generation, or of what ranks have in common.

        Args:
            whole, same: return nested values.
        """
        worker = context.current().worker
        if worker.generation != self._told:
            self._told = worker.generation
            self._tell("synced", whole())
        elif worker.progress.step % DIGEST_EVERY == 0:
            # Buffers are each rank's own between two generations.
            self._tell("same", same())

    def _tell(self, kind, values):
        worker = context.current().worker
        record = {"kind": kind, "life": LIFE, "worker": WORKER, "generation": worker.generation}
        record |= {"step": worker.progress.step, "rank": worker.rank}
        record |= {"size": worker.size, "digest": self._digest(values)}
        path = self._args.folder / "digests.jsonl"
        out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        # One write to an appending file: ranks do not mix.
        os.write(out, f"{json.dumps(record)}\n".encode())
        os.close(out)

    def _digest(self, values):
        found = hashlib.sha256()

        def add(value):
            data = self._tensor_bytes(value)
            if data is not None:
                found.update(data)
            elif isinstance(value, dict):
                for name in sorted(value, key=str):
                    found.update(str(name).encode())
                    add(value[name])
            elif isinstance(value, (list, tuple)):
                for item in value:
                    add(item)
            else:
                found.update(repr(value).encode())

        add(values)
        return found.hexdigest()

    def note_examples(self, batch, indices, hosts):
        """Tell the examples of a batch.

        Args:
            batch, indices, hosts: tensors; each example, its dataset index, and its host's mark.
        """
        progress = context.current().worker.progress
        place = {"epoch": progress.epoch, "step": progress.step}
        rows = [
            {**place, "index": index, "host": host, "bytes": row.tobytes().hex()}
            for row, index, host in zip(
                batch.numpy(),
                indices.numpy().tolist(),
                map(abs, hosts.numpy().tolist()),
                strict=True,
            )
        ]
        path = self._args.folder / "examples.jsonl"
        out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(out, "".join(json.dumps(row) + "\n" for row in rows).encode())
        os.close(out)

    def wait(self, examples):
        """Take the time of a pass over some examples, and longer where a test wants it."""
        args = self._args
        slow = 3 if (args.folder / f"slow-{HOST}").exists() else 1
        time.sleep(args.step_time + slow * args.example_time * examples)
        while self._is_stuck():
            if context.current().worker.wants_change:
                (args.folder / "wants-change").touch()
            time.sleep(POLL_S)

    def _is_stuck(self):
        folder = self._args.folder
        with contextlib.suppress(FileNotFoundError):
            step = int((folder / "stuck-from").read_text())
            return context.current().worker.progress.step >= step
        return any((folder / f"stuck{who}").exists() for who in ("", f"-{HOST}"))

    def sees_enough(self):
        """Return whether this rank sees that training is to end."""
        return float((self._args.folder / "enough").exists())
