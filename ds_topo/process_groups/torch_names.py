"""Private names of torch: this is the only module that reads or replaces them for process groups.

``ROWS`` lists them for whoever supports a new release of torch.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeAlias

import torch
import torch._C._distributed_c10d as _C
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ds_topo.ledger import Change, Reliance, ledger

Store: TypeAlias = c10d.Store
"""A key-value store that all ranks of a job reach."""

GROUP_NAME = Change(
    c10d,
    "_process_group_name",
    instead="a name that the members of the next group have agreed on",
    why="torch names a members-only group after its ranks and the number of groups that this process has; where that "
    "number differs (tied layers on the first and last stage, say) members look for each other under different names "
    "and hang",
    during="the creation of one group",
)
DEFAULT_TIMEOUT = Change(
    c10d,
    "_get_default_timeout",
    instead="the job's own timeout, while there is a job",
    why="new_group without a timeout, as DeepSpeed calls it, takes torch's 30 minutes (NCCL: 10) whatever the job's is",
    during="the process has joined its job through ds_topo",
)
ROWS: tuple[Change | Reliance, ...] = (
    GROUP_NAME,
    DEFAULT_TIMEOUT,
    Reliance(c10d.Store, "append", "ranks write what they bring into one key"),
    Reliance(c10d, "_get_default_store", "ranks compare their plans through the job's store"),
    Reliance(c10d.Store, "clone", "the watch has a connection of its own"),
    Reliance(c10d.Store, "multi_get", "the watch reads several values by one request"),
    Reliance(dist.ProcessGroup, "_get_sequence_number_for_group", "the watch compares ranks by the same step"),
    Reliance(_C, "_dump_fr_trace", "the watch saves what torch's flight recorder has of this rank"),
    Reliance(c10d, "_abort_process_group", "the watch ends NCCL's collectives that are blocked"),
    Reliance(c10d.PrefixStore, "underlying_store", "messages say where the store is"),
    Reliance(c10d, "_get_default_group", "the job's timeout, which new_group does not inherit"),
    Reliance(
        c10d,
        "_world",
        "whether a group still exists: torch forgets all of them with the world's own; and the empty list of groups "
        "that it keeps under the tag of each one that was destroyed",
    ),
    Reliance(dist.ProcessGroup, "bound_device_id", "taken away while a group is created by its members alone"),
    Reliance(dist.ProcessGroup, "_device_types", "the devices that a group serves"),
    Reliance(dist.ProcessGroup, "_get_backend", "the job's timeout"),
    Reliance(torch.Tensor, "_make_wrapper_subclass", "a tensor of which a process has parts, for torch's checkpoints"),
)


DESCRIPTION = "ds_topo:"
"""What descriptions of our groups begin with."""


def append(store: Store, key: str, text: str) -> None:
    """Add to the text of a key, which many ranks may do at once."""
    store.append(key, text)  # type: ignore[attr-defined]


def get_several(store: Store, keys: Sequence[str]) -> list[bytes]:
    """The values of keys that exist, by one request."""
    values: list[bytes] = store.multi_get(list(keys))
    return values


def clone(store: Store) -> Store:
    """Another connection to the same store: calls through it do not wait for those through the first one."""
    other: Store = store.clone()  # type: ignore[attr-defined]
    return other


def served_at(store: Store) -> tuple[str, int] | None:
    """Where a store is served; None where it is not a ``TCPStore``."""
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return (str(host), int(port)) if host and port else None


def default_store() -> Store:
    """The store of the job."""
    return c10d._get_default_store()


def address_of_store() -> str:
    """Where the store of the job is served, for messages; empty where torch does not tell."""
    place = served_at(default_store())
    return f" at {place[0]}:{place[1]}" if place else ""


def timeout_of(given: float | timedelta | None) -> timedelta:
    """A timeout in seconds or as a ``timedelta``; the job's for None.

    Raises:
        TypeError: neither.
        ValueError: not positive.
    """
    if given is None:
        return job_timeout()
    if isinstance(given, bool) or not isinstance(given, (int, float, timedelta)):
        raise TypeError(f"timeout={given!r}: give seconds, or a datetime.timedelta")
    limit = given if isinstance(given, timedelta) else timedelta(seconds=given)
    if limit <= timedelta():
        raise ValueError(f"timeout={given!r}: give seconds, or a datetime.timedelta, above 0")
    return limit


def job_timeout() -> timedelta:
    """The timeout that the job gave to ``init_process_group``; ``new_group`` would use torch's 30 minutes instead."""
    world = c10d._get_default_group()
    if dist.get_backend(world) == "fake":
        return dist.default_pg_timeout
    for device in world._device_types:
        timeout = getattr(getattr(world._get_backend(device), "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    warnings.warn(
        f"torch {torch.__version__} does not tell the timeout of a {dist.get_backend(world)} job: groups get torch's "
        f"{dist.default_pg_timeout}; pass timeout= to the grid",
        RuntimeWarning,
        stacklevel=3,
    )
    return dist.default_pg_timeout


def inherit_timeout() -> None:
    """Give groups that are created without a timeout the job's, from now on. Idempotent."""
    if DEFAULT_TIMEOUT not in ledger.in_force():
        ledger.bind(DEFAULT_TIMEOUT, _job_timeout_or)


def _job_timeout_or(original: Callable[[str], timedelta]) -> Callable[[str], timedelta]:
    def default_timeout(backend: str) -> timedelta:
        return job_timeout() if dist.is_initialized() else original(backend)

    return default_timeout


def devices_of(group: dist.ProcessGroup) -> list[str]:
    """The types of devices, ``"cpu"``, ``"cuda"``, ..., that a group's backends serve."""
    return [str(device.type) for device in group._device_types]


def describe(group: dist.ProcessGroup) -> tuple[str, str]:
    """What a group is over, for people, and its name, which is the same on all members; both may be empty."""
    description = str(getattr(group, "group_desc", "") or "").removeprefix(DESCRIPTION).partition("+ExpertPlan(")[0]
    return "" if description == "undefined" else description, c10d._world.pg_names.get(group, "")


def calls_of(group: dist.ProcessGroup) -> int:
    """How many collectives of a group this rank has called."""
    calls: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return calls


def abort_nccl() -> None:
    """End NCCL's collectives that are blocked; gloo's are not ended by that."""
    if dist.is_initialized() and "nccl" in dist.get_backend():
        c10d._abort_process_group()


def flight_record() -> bytes:
    """What torch's flight recorder holds of this rank's collectives but NCCL's; nothing where it is off, or is not.

    A pickle, in the format that ``torchfrtrace`` reads: with the groups, which gloo does not tell the recorder.
    """
    dump = getattr(_C, "_dump_fr_trace", None)
    record = pickle.loads(dump()) if dump is not None else {}
    if not record.get("entries"):
        return b""
    record["pg_config"] = {
        name: {"name": name, "desc": group.group_desc, "ranks": str(dist.get_process_group_ranks(group))}
        for group, name in c10d._world.pg_names.items()
    }
    return pickle.dumps(record)


def is_known(group: dist.ProcessGroup) -> bool:
    """Whether torch still has the group."""
    return group in c10d._world.pg_map


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroy it, and the entry under its tag, which torch keeps, empty, for as long as the process lives."""
    world = c10d._world
    tag = world.pg_to_tag.get(group)
    dist.destroy_process_group(group)
    if tag and world.tags_to_pg.get(tag) == []:  # the empty tag is everybody's
        del world.tags_to_pg[tag]


def key_of_address(group: dist.ProcessGroup) -> str | None:
    """The key of the job's store where gloo showed this rank's address to the group; None for other backends.

    It is read while members connect: before ``new_group`` returns, or at their first use of the group where
    ``TORCH_GLOO_LAZY_INIT`` is set.
    """
    if "cpu:gloo" not in dist.get_backend_config(group):
        return None
    return f"{group.group_name}//cpu//0/{dist.get_rank(group)}"


@contextmanager
def next_group_named(name: str) -> Iterator[None]:
    """Give the group that is created inside this name, and a communicator of its own.

    Where the job is bound to a device, as DeepSpeed binds it on GPUs, torch would split the world's communicator, which
    is collective over the world: members alone would wait for the others for ever.
    """
    world = c10d._get_default_group()
    bound = world.bound_device_id
    world.bound_device_id = None
    try:
        with ledger.bound(GROUP_NAME, lambda _: lambda ranks, use_hashed_name: name):
            yield
    finally:
        world.bound_device_id = bound
