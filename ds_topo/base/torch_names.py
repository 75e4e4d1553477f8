"""Use private names of torch: no other module uses them for process groups.

``ROWS`` lists the names, to check them for a new release of torch.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

import torch
import torch._C._distributed_c10d as _C
import torch.distributed as dist
from torch import _C as TORCH_C
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from ds_topo.base.backends import traits_of
from ds_topo.base.ledger import ONE_CALL, Patch, Reliance, around, ledger
from ds_topo.errors import abridged, warn

# -- process groups ---------------------------------------------------------------------------------------------------

Store: TypeAlias = c10d.Store
"""A key-value store that all ranks of a job can access."""

GROUP_NAME = Patch(
    c10d,
    "_process_group_name",
    instead="A function that returns the name on which the members have agreed.",
    why="torch names a members-only group after its ranks and the number of groups in this process. If that number "
    "differs, as for tied layers on the first and last stage, members wait for each other under different names and "
    "hang.",
    during=f"{ONE_CALL} of new_group()",
)
DEFAULT_TIMEOUT = Patch(
    c10d,
    "_get_default_timeout",
    instead="A function that returns the timeout of the job.",
    why="new_group() without a timeout, as DeepSpeed calls it, uses torch's default of 30 minutes (NCCL: 10).",
    during="the process has joined its job through ds_topo",
    process_wide="new_group() looks the function up in its module, and DeepSpeed and programs call new_group().",
)


DESCRIPTION = "ds_topo:"
"""The start of the descriptions of our groups."""


def append(store: Store, key: str, text: str) -> None:
    """Append to the text of a key, atomically: several ranks may append at once."""
    store.append(key, text)  # type: ignore[attr-defined]


def get_several(store: Store, keys: Sequence[str]) -> list[bytes]:
    """Return the values of keys that exist, by one request."""
    values: list[bytes] = store.multi_get(list(keys))
    return values


def clone(store: Store) -> Store:
    """Return another connection to the same store, whose calls do not wait for those of the first one."""
    other: Store = store.clone()  # type: ignore[attr-defined]
    return other


current_backward: Callable[[], int] = TORCH_C._current_graph_task_id
"""Return the number of the backward pass that is running on this thread; -1 if none is."""


def is_whole_backward() -> bool:
    """Tell whether the running backward pass is for all leaves: without ``inputs=``, and not ``autograd.grad``."""
    return bool(torch.autograd._is_checkpoint_valid())


def served_at(store: Store) -> tuple[str, int] | None:
    """Return the host and port of a store; None if it is not a ``TCPStore``."""
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return (str(host), int(port)) if host and port else None


def _world_of_job() -> dist.ProcessGroup:
    """Return the group of all ranks of the job, or raise ValueError if ``torch.distributed`` is not initialised."""
    if (world := dist.group.WORLD) is None:
        raise ValueError("torch.distributed is not initialised: call ds_topo.init_distributed() first")
    return world


def default_store() -> Store:
    """Return the store of the job."""
    store: Store = c10d._world.pg_map[_world_of_job()][1]
    return store


def address_of_store(store: Store | None = None) -> str:
    """Return the address of a store, by default the job's, for messages; empty if it is unknown."""
    place = served_at(default_store() if store is None else store)
    return f" at {place[0]}:{place[1]}" if place else ""


def timeout_of(given: float | timedelta | None) -> timedelta:
    """Convert a timeout, which must be positive seconds, to a ``timedelta``; return the job's timeout for None."""
    if given is None:
        return job_timeout()
    advice = f"timeout={abridged(given)}: give seconds, or a datetime.timedelta, above 0"
    if isinstance(given, bool) or not isinstance(given, (int, float, timedelta)):
        raise TypeError(advice + (" (a backend is given by name: backend='gloo')" if isinstance(given, str) else ""))
    try:
        limit = given if isinstance(given, timedelta) else timedelta(seconds=given)
    except (OverflowError, ValueError) as error:  # infinite, or not a number
        raise ValueError(advice) from error
    if limit <= timedelta():
        raise ValueError(advice)
    return limit


def job_timeout() -> timedelta:
    """Return the timeout that the job passed to ``init_process_group``; ``new_group`` would use torch's default."""
    world = _world_of_job()
    if not communicates():
        return dist.default_pg_timeout
    for device in world._device_types:
        timeout = getattr(getattr(world._get_backend(device), "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    warn(
        f"the timeout of a {dist.get_backend(world)} job is unknown in torch {torch.__version__}: groups get torch's "
        f"default, {dist.default_pg_timeout}; pass timeout= to the grid"
    )
    return dist.default_pg_timeout


def communicates() -> bool:
    """Tell whether the job moves data between processes; torch's ``fake`` backend does not."""
    return traits_of(_world_of_job(), torch.device("cpu")).communicates


@around
def _job_timeout_or(original: Callable[[str], timedelta], backend: str) -> timedelta:
    return job_timeout() if dist.is_initialized() else original(backend)


def inherit_timeout() -> None:
    """Make groups that are created without a timeout inherit the job's from now on. Idempotent."""
    if DEFAULT_TIMEOUT not in ledger.in_force():
        ledger.bind(DEFAULT_TIMEOUT, _job_timeout_or)


def devices_of(group: dist.ProcessGroup) -> list[str]:
    """Return the types of devices, ``"cpu"``, ``"cuda"``, ..., that a group's backends serve."""
    return [str(device.type) for device in group._device_types]


def describe(group: dist.ProcessGroup) -> tuple[str, str]:
    """Return a group's description and its name, which is equal on all members; both may be empty."""
    description = str(getattr(group, "group_desc", "") or "").removeprefix(DESCRIPTION).partition("+ExpertPlan(")[0]
    return "" if description == "undefined" else description, c10d._world.pg_names.get(group, "")


def calls_of(group: dist.ProcessGroup) -> int:
    """Return the number of collectives of a group that this rank has called; 0 if its backend does not count them."""
    try:
        calls: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    except RuntimeError:  # nccl-lazy of torch 2.15
        return 0
    return calls


def gloo_threads() -> Iterator[int]:
    """Yield the Linux thread ids of the threads in which gloo moves bytes; torch 2.8 does not name them."""
    with suppress(OSError):  # not Linux
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # the thread has just ended
                if (task / "comm").read_text().strip() == "gloo_tcp_loop":
                    yield int(task.name)


def abort_nccl() -> None:
    """Abort blocked collectives of backends that can do this, such as NCCL. Those of gloo continue.

    The call may block, and hold the interpreter meanwhile. Afterwards a wait for the GPU returns, with results that are
    wrong, and torch has forgotten all groups: the process must end.
    """
    if dist.is_initialized():
        world = _world_of_job()
        if any(traits_of(world, device).aborts for device in world._device_types):
            c10d._abort_process_group()


def unfinished_calls() -> list[tuple[str, dist.ProcessGroup | None]]:
    """Return the collectives of gloo that this rank has called and that have not ended, the oldest first.

    torch's flight recorder knows them; if it is off, the list is empty. A group is None if torch does not have it any
    more.
    """
    dump = getattr(_C, "_dump_fr_trace", None)
    entries = pickle.loads(dump(True, False)).get("entries", ()) if dump is not None else ()
    groups = {name: group for group, name in c10d._world.pg_names.items()}
    return [
        (each["profiling_name"].removeprefix("gloo:"), groups.get(each["process_group"][0]))
        for each in entries
        if each["profiling_name"].startswith("gloo:") and not each["retired"]
    ]


def is_known(group: dist.ProcessGroup) -> bool:
    """Tell whether torch still has the group."""
    return group in c10d._world.pg_map


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroy a group and the empty entry under its tag, which torch would keep as long as the process lives."""
    world = c10d._world
    tag = world.pg_to_tag.get(group)
    dist.destroy_process_group(group)
    if tag and world.tags_to_pg.get(tag) == []:  # groups without a tag share the empty one
        del world.tags_to_pg[tag]


def key_of_address(group: dist.ProcessGroup) -> str | None:
    """Return the key of the job's store with this rank's address in the group; None for backends without one.

    Members read it while they connect: before ``new_group`` returns, or with ``TORCH_GLOO_LAZY_INIT`` at the first use
    of the group.
    """
    if not traits_of(group, torch.device("cpu")).uses_sockets:
        return None
    return f"{group.group_name}//cpu//0/{dist.get_rank(group)}"


@contextmanager
def next_group_named(name: str) -> Iterator[torch.device | None]:
    """Give the group that the ``with`` block creates this name and its own communicator; yield its ``device_id``.

    If the job is bound to a device, as DeepSpeed and torch 2.15 bind it on GPUs, torch would split the world's
    communicator. That is collective over the world, so members alone would wait for the other ranks forever. While the
    job is not bound, torch 2.15 would guess the group's device, so it must be given.
    """
    world = _world_of_job()
    bound = world.bound_device_id
    world.bound_device_id = None
    device = bound if bound is not None and traits_of(world, bound).binds_device else None
    try:
        with ledger.bound(GROUP_NAME, lambda _: lambda ranks, use_hashed_name: name):
            yield device
    finally:
        world.bound_device_id = bound


@contextmanager
def without_store() -> Iterator[None]:
    """Let the ``with`` block create a group of this rank alone without the job's store, which may be gone."""
    job = _world_of_job()
    before = c10d._world.pg_map[job]
    c10d._world.pg_map[job] = (before[0], _C.HashStore())
    try:
        yield
    finally:
        c10d._world.pg_map[job] = before


# -- the reducer ------------------------------------------------------------------------------------------------------

ZERO_GRAD_OF_MODULES = Patch(
    nn.Module,
    "zero_grad",
    instead="The same. Reducers also discard these gradients.",
    why="Gradients that accumulate in another data type or buffer are not in parameter.grad.",
    during="a reducer exists",
    process_wide="Any module or optimizer of the program may hold parameters of the reducer.",
)
ZERO_GRAD_OF_OPTIMIZERS = replace(ZERO_GRAD_OF_MODULES, owner=torch.optim.Optimizer)


def ignore_in_ddp(module: nn.Module, names: list[str]) -> None:
    """Let torch's DDP leave these parameters of a module alone, which differ between ranks."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)


ReduceOp: TypeAlias = "dist.ReduceOp | dist.ReduceOp.RedOpType"


def premultiplied_sum(factor: float) -> ReduceOp:
    """Return NCCL's ``ReduceOp`` that multiplies by ``factor`` while it sums."""
    op: ReduceOp = dist._make_nccl_premul_sum(factor)
    return op


COLLECTIVES_ASK = "has_torch_function" in inspect.unwrap(dist.broadcast).__code__.co_names
"""True if all collectives call ``__torch_function__`` of their tensors. torch 2.13 does; 2.8 does for some of them."""


# -- all names --------------------------------------------------------------------------------------------------------

ROWS: tuple[Patch | Reliance, ...] = (
    GROUP_NAME,
    DEFAULT_TIMEOUT,
    Reliance(dist.ProcessGroup, "_get_sequence_number_for_group", "It counts the collectives that a rank has called."),
    Reliance(_C, "_dump_fr_trace", "The watch reads this rank's entries of torch's flight recorder."),
    Reliance(c10d, "_abort_process_group", "The watch aborts NCCL's collectives that are blocked."),
    Reliance(
        c10d,
        "_world",
        "It tells whether a group still exists, since torch forgets all groups together with the world. It also keeps "
        "an empty list under the tag of each destroyed group, which ds_topo deletes, and the store of the job.",
    ),
    Reliance(dist.ProcessGroup, "bound_device_id", "It is None while members alone create a group."),
    Reliance(dist.ProcessGroup, "_device_types", "It lists the types of devices that a group serves."),
    Reliance(dist.ProcessGroup, "_get_backend", "It returns the backend, which has the job's timeout."),
    Reliance(torch.Tensor, "_make_wrapper_subclass", "It creates a tensor of which a process holds parts."),
    ZERO_GRAD_OF_MODULES,
    ZERO_GRAD_OF_OPTIMIZERS,
    Reliance(torch.Tensor, "_version", "It tells whether a program has written to gradients that are being reduced."),
    Reliance(torch.Tensor, "_post_accumulate_grad_hooks", "It tells whether hooks of the program change a gradient."),
    Reliance(torch, "_foreach_copy_", "It copies many gradients into a bucket by one call."),
    Reliance(torch, "_foreach_mul_", "It scales all gradients of a bucket by one call."),
    Reliance(torch, "_foreach_norm", "It computes the norms of many gradients by a few kernels."),
    Reliance(TORCH_C, "_storage_Use_Count", "It tells whether tensors share the memory of parameters in flight."),
    Reliance(TORCH_C, "_current_graph_task_id", "It tells backward passes apart."),
    Reliance(torch.autograd, "_is_checkpoint_valid", "It tells backward() from torch.autograd.grad()."),
    Reliance(TORCH_C, "_set_throw_on_mutable_data_ptr", "A stand-in for a parameter in flight gives no pointer."),
    Reliance(TORCH_C, "_set_storage_access_error_msg", "It gives no values, either.", releases="builds with NCCL"),
    Reliance(torch, "_disable_dynamo", "Compiled code calls a function eagerly; dynamo is imported late."),
    Reliance(nn.Module, "_compiled_call_impl", "It tells which modules are compiled."),
    Reliance(DistributedDataParallel, "_set_params_and_buffers_to_ignore_for_model", "DDP leaves slices alone."),
    Reliance(dist, "_make_nccl_premul_sum", "NCCL multiplies while it sums.", releases="builds with NCCL"),
    Reliance(torch.Tensor, "_base", "It tells of which tensor, such as a parameter, another is a view."),
    Reliance(torch.UntypedStorage, "_cdata", "It tells which tensors share their storage."),
)
