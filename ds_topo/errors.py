"""Exceptions of ds_topo.

Where DeepSpeed raises another built-in exception for the same mistake, ours derives from that one too, so that code
written against DeepSpeed still catches it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence


class _Abridged(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:  # Python refuses to print very long ones
        return super().repr_int(x, level) if x.bit_length() < 1000 else f"<an integer of {x.bit_length()} bits>"


_ABRIDGED = _Abridged()
_ABRIDGED.maxstring = _ABRIDGED.maxother = 100
_ABRIDGED.maxlist = _ABRIDGED.maxtuple = _ABRIDGED.maxdict = _ABRIDGED.maxset = 12
_ABRIDGED.maxlevel = 3


def abridged(value: object) -> str:
    """``repr(value)`` for messages: at most a line or so, whatever a person has typed.

    >>> abridged("pipe=2"), len(abridged("x" * 100_000)), len(abridged(10**5000))
    ("'pipe=2'", 100, 26)
    """
    return _ABRIDGED.repr(value)


def listed(names: Sequence[object], shown: int = 8) -> str:
    """Names for a message, not too many.

    >>> listed(["a", "b"]), listed([]), listed([str(number) for number in range(10)])[-18:]
    ("['a', 'b']", 'none', "'7'] and 2 further")
    """
    more = f" and {len(names) - shown} further" if len(names) > shown else ""
    return f"{list(names[:shown])}{more}" if names else "none"


class TopologyError(ValueError):
    """A topology, or a question to one, that cannot be answered: the message says what is wrong and what would do."""


class UnknownAxisError(TopologyError, AttributeError, TypeError):
    """An axis that the topology does not have (DeepSpeed raises ``AttributeError`` or ``TypeError`` here)."""


class CoordinateError(TopologyError, AssertionError):
    """A coordinate outside its axis (DeepSpeed fails an assertion here)."""


class WorldSizeError(TopologyError, AssertionError, RuntimeError):
    """Degrees whose product is not the number of processes (DeepSpeed's grid fails an assertion, its module raises)."""


class MissingTopologyError(TopologyError, RuntimeError):
    """A pipeline without a topology (DeepSpeed raises ``RuntimeError`` here)."""


class ExpertSizeError(TopologyError, AssertionError):
    """A size of expert or partition groups that does not divide (DeepSpeed fails an assertion here)."""


class EngineOptionError(TopologyError, RuntimeError):
    """An option of DeepSpeed's config that assumes another order of ranks than the topology's."""


class ExpertGroupError(RuntimeError, ValueError):
    """Expert groups, or an engine that uses them, that do not go together: the message says what would."""


class HostError(TopologyError):
    """Hosts, a hostfile, a filter of hosts or a list of nodes that cannot be used: the message says where and why."""


class LaunchError(RuntimeError):
    """A job that cannot start: nothing launched it, or what it needs to join is missing or does not fit."""


class EndOfSamplesError(RuntimeError, StopIteration):
    """A step of a pipeline that no rank starts, because one has too few samples (DeepSpeed: ``StopIteration``)."""


class DisagreementError(RuntimeError):
    """Ranks of one job came with different plans, or did not come: the message names ranks and hosts."""


class StoreTimeoutError(DisagreementError, TimeoutError):
    """The job's store does not answer, so nobody can say what the other ranks bring: the message names its server."""


class ReplicaError(RuntimeError):
    """Ranks that must have the same values have not: the message names the tensor, ranks and hosts."""


class GroupCreationError(RuntimeError):
    """A process group that its ranks agreed on was not created, because one of them, or the store, is gone."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be saved or loaded: the message names it, and ranks, hosts and files."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """There is no checkpoint, or none of that tag: the message lists those that there are."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that is not as it was written: the message names the files."""


class CheckpointVersionError(CheckpointError):
    """A checkpoint of a later release."""


class UnsafeCheckpointError(CheckpointError):
    """A file that would run code when it is read: the message names the types, and how to allow them."""


class CheckpointLayoutError(CheckpointError, TopologyError):
    """A checkpoint of a layout whose files this one cannot read as they are: the message has both."""


class CheckpointModelError(CheckpointError):
    """A checkpoint of another model: the message names the first parameter that differs."""


class CheckpointSpaceError(CheckpointError, OSError):
    """Not enough room on the disk for a checkpoint; nothing was written."""
