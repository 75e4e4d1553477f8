"""Define the exceptions of ds_topo.

Where DeepSpeed raises a built-in exception for the same mistake, ours also derives from that one, so that code written
for DeepSpeed still catches it.
"""

from __future__ import annotations

import inspect
import re
import reprlib
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any


class _Abridged(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:  # Python refuses to print very long integers
        return super().repr_int(x, level) if x.bit_length() < 1000 else f"<an integer of {x.bit_length()} bits>"

    def repr_Tensor(self, x: Any, level: int) -> str:  # noqa: N802
        return super().repr_instance(x, level) if x.numel() == 1 else f"<a tensor of shape {list(x.shape)}>"

    repr_Parameter = repr_Tensor  # noqa: N815


_ABRIDGED = _Abridged()
_ABRIDGED.maxstring = _ABRIDGED.maxother = 100
_ABRIDGED.maxlist = _ABRIDGED.maxtuple = _ABRIDGED.maxdict = _ABRIDGED.maxset = 12
_ABRIDGED.maxlevel = 3


def abridged(value: object) -> str:
    """Return ``repr(value)`` for messages, abridged to about a line.

    >>> abridged("pipe=2"), len(abridged("x" * 100_000)), len(abridged(10**5000))
    ("'pipe=2'", 100, 26)
    """
    return _ABRIDGED.repr(value)


def printable(text: str) -> str:
    r"""Return text with characters that a terminal could obey, or cannot show, as escapes; lines stay lines.

    >>> printable("step\x1b[31m\nnext")
    'step\\x1b[31m\nnext'
    """
    return "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text)


def listed(names: Sequence[object], shown: int = 8) -> str:
    """Return names for messages; of a long list only the first ones.

    >>> listed(["a", "b"]), listed([]), listed([str(number) for number in range(10)])[-18:]
    ("['a', 'b']", 'none', "'7'] and 2 further")
    """
    more = f" and {len(names) - shown} further" if len(names) > shown else ""
    return f"{list(names[:shown])}{more}" if names else "none"


def by_value(said: Iterable[tuple[int, str, str]], shown: int = 4) -> str:
    """Describe which ranks, on which hosts, have which value, from triples of these; one line for each value.

    >>> print(by_value([(0, "a", "x"), (1, "a", "y"), (2, "b", "x")]))
    <BLANKLINE>
      ranks [0, 2] on ['a', 'b'] have x
      ranks [1] on ['a'] have y
    """
    owners_of: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for rank, host, value in said:
        owners_of[value].append((rank, host))
    lines = []
    for value, owners in sorted(owners_of.items(), key=lambda item: (-len(item[1]), item[1]))[:shown]:
        hosts = list(dict.fromkeys(host for _, host in owners))
        lines.append(f"\n  ranks {listed([rank for rank, _ in owners])} on {listed(hosts, 4)} have {value}")
    more = f"\n  and {len(owners_of) - shown} further values" if len(owners_of) > shown else ""
    return f"{''.join(lines)}{more}"


def bytes_text(size: float, base: int = 1000) -> str:
    """Return bytes with a unit, in powers of 1,000, or of 1,024 as benchmarks of collectives count.

    >>> bytes_text(900), bytes_text(12_345_678), bytes_text(999_700), bytes_text(3 * 2**29, base=1024)
    ('900 B', '12.3 MB', '1 MB', '1.5 GiB')
    """
    units = ("B", "kB", "MB", "GB", "TB") if base == 1000 else ("B", "KiB", "MiB", "GiB", "TiB")
    power = next((power for power in (4, 3, 2, 1) if size >= 0.9995 * base**power), 0)
    return f"{size / base**power:.{3 if base == 1000 else 4}g} {units[power]}"


def first_line(error: BaseException | type[BaseException]) -> str:
    """Describe an exception in one line.

    >>> first_line(ValueError("no\\nway"))
    'ValueError: no'
    """
    text = str(error).strip().partition("\n")[0][:200]
    kind = type(error).__name__
    return f"{kind}: {text}" if text else kind


_NUMBERED = re.compile(r"(.*?)([0-9]{1,18})")


def fold_node_list(names: Sequence[str]) -> str:
    """Fold names that differ only in their last number, where the numbers are consecutive, as Slurm writes nodes.

    >>> fold_node_list(["n01", "n02", "n03", "n7", "gpu-a"])
    'n[01-03],n7,gpu-a'
    """
    runs: list[list[tuple[str, str]]] = []
    for name in names:
        match = _NUMBERED.fullmatch(name)
        prefix, digits = (match[1], match[2]) if match else (name, "")
        first, last = (runs[-1][0][1], runs[-1][-1][1]) if runs and prefix == runs[-1][0][0] else ("", "")
        if digits and last and digits == f"{int(last) + 1:0{len(first)}d}":
            runs[-1].append((prefix, digits))
        else:
            runs.append([(prefix, digits)])
    return ",".join(f"{run[0][0]}[{run[0][1]}-{run[-1][1]}]" if len(run) > 1 else "".join(run[0]) for run in runs)


def fold_numbers(numbers: Sequence[int]) -> str:
    """Write ascending numbers as ranges.

    >>> fold_numbers([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    return fold_node_list([str(number) for number in numbers]).translate({ord("["): "", ord("]"): ""})


def ranks_by_host(places: Iterable[tuple[str, int]]) -> str:
    """Write ranks by host, for the first eight hosts.

    >>> ranks_by_host([("a", 2), ("b", 7), ("a", 3)])
    'a (ranks 2-3), b (rank 7)'
    """
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for host, rank in places:
        ranks_of[host].append(rank)
    named = [f"{host} (rank{'s' if len(ranks) > 1 else ''} {fold_numbers(ranks)})" for host, ranks in ranks_of.items()]
    return ", ".join(named[:8]) + (f" and {len(named) - 8} more hosts" if len(named) > 8 else "")


def unanswered(error: RuntimeError, limit: timedelta) -> str:
    """Explain an error of the store: it did not answer within the limit, or the connection to it was lost."""
    if "timeout" in str(error).lower():
        return f"no answer within {limit}: {error}"
    return (
        "the connection to the store of the job was lost: the process that serves it (rank 0, or the launcher on its "
        f"host) has ended, or the link to it has failed: {error}"
    )


def refuse_others(call: str, others: Mapping[str, object], instead: Mapping[str, str]) -> None:
    """Raise ``TypeError`` for arguments that a function does not have, and say what to write instead."""
    if others:
        said = "; ".join(f"{name}: {instead.get(name, 'there is no such argument')}" for name in others)
        raise TypeError(f"{call} {said}")


def require_switches(**switches: object) -> None:
    """Raise ``TypeError`` unless all of these are true or false."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}={abridged(value)}: give True or False")


_LIBRARIES = ("ds_topo", "deepspeed", "torch", "contextlib")


def tell(text: str) -> None:
    """Print text on standard error at once, also if the process ends right afterwards."""
    print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Emit a ``RuntimeWarning`` at the line of the program that called ds_topo, DeepSpeed or torch."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and str(frame.f_globals.get("__name__")).split(".")[0] in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, RuntimeWarning, stacklevel=level)


class TopologyError(ValueError):
    """A topology, or an argument of a query to one, is invalid. The message gives the rule and valid choices."""


class UnknownAxisError(TopologyError, AttributeError, TypeError):
    """An axis is not in the topology. DeepSpeed raises ``AttributeError`` or ``TypeError``."""


class CoordinateError(TopologyError, AssertionError):
    """A coordinate is outside its axis. DeepSpeed fails an assertion."""


class MissingWorldSizeError(TopologyError):
    """A degree is -1, what is left of the world, and the number of ranks was not given."""


class WorldSizeError(TopologyError, AssertionError, RuntimeError):
    """The product of the degrees is not the number of processes. DeepSpeed fails an assertion, or raises."""


class MissingTopologyError(TopologyError, RuntimeError):
    """A pipeline has no topology. DeepSpeed raises ``RuntimeError``."""


class ExpertSizeError(TopologyError, AssertionError):
    """A size of expert or partition groups does not divide the ranks. DeepSpeed fails an assertion."""


class EngineOptionError(TopologyError, RuntimeError):
    """A config, argument or model cannot work with an engine on this grid. The message gives a remedy."""


class ExpertGroupError(RuntimeError, ValueError):
    """Expert groups do not fit each other, or the engine that uses them. The message gives a remedy."""


class HostError(TopologyError):
    """Hosts, a hostfile, a filter of hosts or a list of nodes cannot be used. The message names the place."""


class LaunchError(RuntimeError):
    """A job cannot start: no launcher started it, or something that joining needs is missing or wrong."""


class EndOfSamplesError(RuntimeError, StopIteration):
    """A rank has too few samples for a pipeline's step, so no rank starts it. DeepSpeed raises ``StopIteration``."""


class DisagreementError(RuntimeError):
    """Ranks of one job have different plans, or some did not take part. The message names ranks and hosts."""


class StoreTimeoutError(DisagreementError, TimeoutError):
    """The job's store does not answer, so ranks cannot be compared. The message names its server."""


class ReplicaError(RuntimeError):
    """Ranks that must have the same values have different ones. The message names the tensor, ranks and hosts."""


class QuorumError(RuntimeError):
    """The replicas of a job did not find each other."""


class VerificationError(RuntimeError):
    """Runs of a program cannot be compared: one failed, or ended early. The message has the last lines of a rank."""


class FailedRankError(RuntimeError):
    """Another rank has failed in a call that this rank was in. The message names it, its host and its own error."""


class GroupCreationError(RuntimeError):
    """A process group was not created although its ranks agreed, because one of them, or the store, is gone."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or loaded. The message names it, and ranks, hosts and files."""

    def __str__(self) -> str:
        """Return the message. Names from a disk cannot control the terminal that shows it."""
        return printable(super().__str__())


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """There is no checkpoint, or none with that tag. The message lists the existing ones."""


class DamagedCheckpointError(CheckpointError):
    """Files of a checkpoint are missing, or differ from what was written. The message names them."""


class CheckpointVersionError(CheckpointError):
    """A checkpoint was written by a later release of ds_topo."""


class UnsafeCheckpointError(CheckpointError):
    """A file would run code when it is read. The message names the types, and how to allow them."""


class CheckpointLayoutError(CheckpointError, TopologyError):
    """A checkpoint has a layout whose files the current layout cannot read. The message has both layouts."""


class CheckpointModelError(CheckpointError):
    """A checkpoint was saved from another model. The message names the first parameter that differs."""


class CheckpointSpaceError(CheckpointError, OSError):
    """The disk has too little space for a checkpoint. Nothing was written."""
