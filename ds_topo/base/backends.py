"""Say what each backend of ``torch.distributed`` can do, and what it requires. No other module compares their names.

A name does not tell what a backend is: torch 2.15 creates another class for ``nccl`` than earlier releases, and a
plugin or an environment variable may choose a third. So traits belong to the class of a backend.

A collective of gloo blocks the thread that waits for it. One of NCCL is queued on a stream of the device: ``wait()``
only orders the current stream after it, so another stream must wait by itself.
"""

from __future__ import annotations

import difflib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import BackendConfig

from ds_topo.base.supported import refuse_older_releases
from ds_topo.errors import abridged

refuse_older_releases()  # all modules that need torch import this one


@dataclass(frozen=True)
class BackendTraits:
    """The traits of a backend. The defaults are the careful ones, for a backend that is not in :data:`TRAITS`."""

    averages: bool = False
    """It has ``ReduceOp.AVG``."""
    premultiplies: bool = False
    """It has NCCL's ``ReduceOp`` that multiplies while it sums."""
    gathers_in_place: bool = False
    """``all_gather_into_tensor`` accepts an input that is a part of its output."""
    ordered_by_stream: bool = True
    """``Work.wait()`` returns at once, and only the current stream waits. Results may arrive later."""
    tagged_messages: bool = False
    """Messages with a tag find their receiver in any order, beside collectives of the same group."""
    aborts: bool = False
    """``abort()`` ends a collective that is blocked."""
    uses_sockets: bool = False
    """It connects ranks by sockets, whose addresses are in the job's store."""
    keeps_versions: bool = False
    """Its results do not count as writes in ``Tensor._version``. gloo counts them on GPUs, where it copies results."""
    gathers_functionally: bool = True
    """torch's functional ``all_gather_into_tensor`` works. On GPUs that of gloo ends the process (torch 2.11)."""
    communicates: bool = True
    """It moves data between processes."""
    serves_host_first: bool = False
    """A job that names it alone has its tensors on the CPU: those of an accelerator are copied there and back."""
    binds_device: bool = False
    """It connects while a group is created, on the group's device; torch guesses one from ``LOCAL_RANK`` by default."""


_NCCL = BackendTraits(averages=True, premultiplies=True, gathers_in_place=True, aborts=True)
TRAITS: dict[str, BackendTraits] = {
    "gloo": BackendTraits(
        ordered_by_stream=False,
        tagged_messages=True,
        uses_sockets=True,
        keeps_versions=True,
        serves_host_first=True,
    ),
    "mpi": BackendTraits(ordered_by_stream=False),
    "nccl": replace(_NCCL, keeps_versions=True),
    "nccl2": replace(_NCCL, binds_device=True),
    "nccl-lazy": replace(_NCCL, binds_device=True),
    "fake": BackendTraits(ordered_by_stream=False, communicates=False),
}
"""The traits of backends, by the keys in ``_KEY_OF_CLASS``, or by the name of a backend with a class of its own."""
_KEY_OF_CLASS = {
    "ProcessGroupGloo": "gloo",
    "ProcessGroupMPI": "mpi",
    "ProcessGroupNCCL": "nccl",  # named nccl-legacy in torch 2.15
    "ProcessGroupNCCL2": "nccl2",  # nccl in torch 2.15
    "ProcessGroupNCCLLazy": "nccl-lazy",
    "FakeProcessGroup": "fake",
}
_OF_TORCH = {*_KEY_OF_CLASS.values(), "nccl-legacy"}
"""Names that mean a class of torch's, so that another class under such a name has no certain trait."""


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend that serves a group's tensors on a device; empty if none does.

    ``dist.get_backend()`` is ``cpu:gloo,cuda:nccl`` or ``undefined`` for some ways to join a job.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> backend_of(dist.group.WORLD, torch.device("cpu"))
    'gloo'
    >>> dist.destroy_process_group()
    """
    for entry in dist.get_backend_config(group).split(","):
        kind, _, name = entry.rpartition(":")
        if kind in ("", device.type):
            return name.lower()
    return ""


def serving(group: dist.ProcessGroup, device: torch.device) -> object:
    """Return the backend of a group that serves a device; a group of a Python class may do so itself.

    The creator that a program gives to ``Backend.register_backend`` may return such a group.
    """
    try:
        return group._get_backend(device)
    except RuntimeError:
        return group


def traits_of(group: dist.ProcessGroup, device: torch.device) -> BackendTraits:
    """Return the traits of the backend that serves a group's tensors on a device."""
    name = backend_of(group, device)
    traits = TRAITS.get(_key_of(serving(group, device), name), BackendTraits()) if name else BackendTraits()
    if device.type != "cpu" and not traits.ordered_by_stream and traits.communicates:
        # results are copied to the device on a stream
        return BackendTraits(uses_sockets=traits.uses_sockets, gathers_functionally=False)
    return traits


def _key_of(backend: object, name: str) -> str:
    """Return the key in ``TRAITS`` of a group's backend; empty for an unknown one under a name of torch's."""
    while (inside := getattr(backend, "wrapped_pg", None)) is not None:  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        backend = inside
    return _KEY_OF_CLASS.get(type(backend).__name__) or ("" if name in _OF_TORCH else name)


def default_backend() -> str:
    """Return torch's backend for this machine's accelerator, or for its CPU."""
    return str(dist.get_default_backend_for_device(accelerator() or "cpu"))


def check_backend(backend: object) -> None:
    """Refuse a backend that torch does not know, such as ``gllo`` or ``cuda:ncll``.

    >>> check_backend("cpu:gloo,cuda:nccl")
    >>> check_backend("gllo")
    Traceback (most recent call last):
    ValueError: backend='gllo': torch knows no backend 'gllo', did you mean 'gloo'? It knows fake, gloo, ...

    Raises:
        ValueError: torch knows no backend of this name. One of its own that was left out of the build is not refused.
    """
    # torch registers those of its entry points when they are first used
    later = {each.name.lower() for each in entry_points(group="torch.distributed.backends")}
    named = TRAITS.keys() - {"nccl2", "nccl-lazy"}  # which torch before 2.14 lacks
    known = sorted({*dist.Backend.backend_list, *later, *named} - {dist.Backend.UNDEFINED})
    for part in str(backend).split(","):
        name = part.rpartition(":")[2].strip().lower()
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            question = f", did you mean {near[0]!r}?" if near else "."
            raise ValueError(
                f"backend={abridged(backend)}: torch knows no backend {abridged(name)}{question} It knows "
                f"{', '.join(known)}"
            )


def accelerator() -> torch.device | None:
    """Return this machine's accelerator, if it has one that torch can use now."""
    return torch.accelerator.current_accelerator(check_available=True)


def current_device() -> torch.device:
    """Return this thread's accelerator; the CPU on a machine without one."""
    device = accelerator()
    if device is None:
        return torch.device("cpu")
    return torch.device(device.type, torch.accelerator.current_device_index())


def device_served_by(backend: str, index: int) -> torch.device:
    """Return the device of a backend's tensors: this host's accelerator with this index, if the backend serves it.

    >>> device_served_by("gloo", 0)
    device(type='cpu')
    """
    device = accelerator()
    if device is None or TRAITS.get(backend.lower(), BackendTraits()).serves_host_first:
        return torch.device("cpu")
    served = BackendConfig(dist.Backend(backend)).get_device_backend_map()  # registers a backend of an entry point
    return torch.device(device.type, index) if device.type in served else torch.device("cpu")


def device_in_use() -> torch.device | None:
    """Return the accelerator that this thread uses; None if the process has not used one yet."""
    device = accelerator()
    is_used = device is not None and torch.get_device_module(device).is_initialized()
    return current_device() if is_used else None


# -- streams and events of any accelerator; a CPU has none ------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Wait for all work that was queued on a device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def stream_key(device: torch.device) -> int:
    """Return a number for the current stream of a device; 0 on a CPU."""
    return 0 if device.type == "cpu" else int(torch.accelerator.current_stream(device).stream_id)


class SideStream:
    """A stream beside a device's current one. On a CPU, which has no streams, everything runs in order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def after_current(self, *tensors: torch.Tensor) -> AbstractContextManager[Any]:
        """Return a context in which work is queued on this stream, after the work queued so far on the current one.

        The memory of ``tensors`` is not used again before this stream has used it.
        """
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        for tensor in tensors:
            tensor.record_stream(self._stream)
        context: AbstractContextManager[Any] = self._stream
        return context

    def mark(self) -> torch.Event | None:
        """Return an event after all work queued so far on this stream; None on a CPU."""
        return None if self._stream is None else self._stream.record_event()


def order_after(event: torch.Event | None, device: torch.device) -> None:
    """Order the current stream after an event. No-op for None."""
    if event is not None:
        torch.accelerator.current_stream(device).wait_event(event)
