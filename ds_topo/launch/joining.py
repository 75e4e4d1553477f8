"""Join a job with one store and one timeout; an error names the ranks that did not come.

Where this host, its launcher or its network is at fault, :class:`~ds_topo.errors.LaunchError` is raised.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import weakref
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # mypy finds them only here

from ds_topo.base.backends import check_backend, default_backend, device_served_by
from ds_topo.base.supported import minutes_of_timeout
from ds_topo.base.torch_names import (
    address_of_store,
    default_store,
    inherit_timeout,
    job_timeout,
    timeout_of,
)
from ds_topo.errors import (
    DisagreementError,
    HostError,
    LaunchError,
    StoreTimeoutError,
    fold_numbers,
    ranks_by_host,
    tell,
    warn,
)
from ds_topo.launch.council import GATHERING, NOTICE_AFTER, UNANSWERED_AFTER, Council, ranks_that_came, within
from ds_topo.launch.launchers import (
    ALONE,
    Launch,
    address_of,
    detect_launch,
    is_loopback,
    is_own_address,
    warn_of_misspelt_variables,
)

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_ANYWHERE = "192.0.2.1"
"""An address that no host has (RFC 5737), which is reached over the default route."""
_NEW_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""torchrun's variable: 1 creates a new store after each restart."""


# -- network -----------------------------------------------------------------------------------------------------------


def check_master(launch: Launch) -> str:
    """Return the address of the master."""
    try:
        address = address_of(launch.master_addr)
    except HostError as error:
        raise LaunchError(
            f"MASTER_ADDR={launch.master_addr!r} (rank {launch.rank} on {socket.gethostname()}, started by "
            f"{launch.launcher}): {error}"
        ) from error
    if is_loopback(address) and launch.node is not None and launch.node[0] > 0:
        raise LaunchError(
            f"MASTER_ADDR={launch.master_addr!r} is {address} on {socket.gethostname()}, which means this host itself, "
            "but rank 0 is on another: give an address that all hosts reach"
        )
    return address


def choose_interface(launch: Launch, master: str) -> str | None:
    """Return the interface that gloo must use on this host, or None where it finds one itself.

    gloo binds to the address of the host's own name. If that is a loopback address (Debian's ``127.0.1.1``) or unknown,
    ranks of other hosts cannot connect. Then it is the interface towards the master, or on the master's own host that
    of the default route, or the only one.
    """
    is_size_unknown = launch.local_world_size is None and launch.node is None
    is_on_one_host = is_loopback(master) if is_size_unknown else launch.local_world_size == launch.world_size
    if GLOO_INTERFACE in os.environ or is_on_one_host:
        return None
    name, own = socket.gethostname(), "unknown"
    with suppress(HostError):
        own = address_of(name)
        if not is_loopback(own):
            return None
    import psutil  # a requirement of DeepSpeed

    interface_of: dict[str | None, str] = {
        each.address: interface
        for interface, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family == socket.AF_INET and not is_loopback(each.address)
    }
    of_the_only_one = interface_of if len(set(interface_of.values())) == 1 else ()
    towards = [address_towards(master), address_towards(_ANYWHERE), *of_the_only_one]
    interface = next((interface_of[address] for address in towards if address in interface_of), None)
    if interface is None:
        raise LaunchError(
            f"gloo would bind to the address of this host's own name, {name}, which is {own}: other hosts cannot reach "
            f"it. Set {GLOO_INTERFACE} to the interface towards them (`ip -brief address` lists all), or give the name "
            "another address"
        )
    return interface


def address_towards(host: str, port: int = 9) -> str | None:
    """Return this host's address as another host sees it; None if no route leads there."""
    with suppress(OSError):
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    return None


# -- joining -----------------------------------------------------------------------------------------------------------


def join(
    timeout: float | timedelta | None = None,
    backend: str | None = None,
    *,
    end_with_launcher: bool = True,
    verbose: bool = True,
) -> Launch:
    """Join the job that a launcher started, with torch alone; ``ds_topo.init_distributed`` also initialises DeepSpeed.

    This finds out rank, world size, local rank and master (:func:`detect_launch`), exports torch's and DeepSpeed's
    variables, waits until all ranks have come, and calls ``init_process_group``. Later groups without a timeout of
    their own, such as DeepSpeed's, get this timeout instead of torch's 30 minutes. One rank prints an error that ends
    several ranks alike. If ``torch.distributed`` is initialised already, it only returns the description of this rank.
    Without a launcher, this process is a job of one rank.

    Args:
        timeout: the timeout of joining and of every group, in seconds or as a ``timedelta``; by default the minutes in
            ``DEEPSPEED_TIMEOUT``, or 10 minutes.
        backend: the torch backend; by default torch's for this machine's accelerator, else ``gloo``.
        end_with_launcher: end this rank when its launcher has ended, so that no rank outlives a killed launcher.
        verbose: let rank 0 write a line to standard error that names the launcher. Without a launcher it always does.

    Raises:
        LaunchError: variables are missing or contradict each other, or the master cannot be reached.
        DisagreementError: some ranks did not come within the timeout. The message names them.
        TypeError: the timeout is not a number.
        ValueError: the timeout is not positive, or torch does not know the backend.
    """
    limit = as_timeout(timeout)
    if dist.is_initialized():
        return _joined_already(limit if timeout is not None else None)
    backend = backend or default_backend()
    check_backend(backend)
    launch = prepare(end_with_launcher=end_with_launcher, alone=True)
    take_device(launch, backend)
    warn_of_restarts(launch)
    if launch.rank == 0:
        warn_of_misspelt_variables()
    store = open_store(launch, limit)
    wait_for_all(store, launch, limit)
    create_world(store, launch, limit, backend)
    if launch.world_size > 1:
        SharedTraceback(default_store())
    if launch.rank == 0 and (verbose or launch.launcher == ALONE):
        tell(f"ds_topo: {launch}, backend {backend}, timeout {limit}")
    return launch


def as_timeout(timeout: float | timedelta | None) -> timedelta:
    """Convert seconds to a ``timedelta``; None gives DeepSpeed's default."""
    return timedelta(minutes=minutes_of_timeout()) if timeout is None else timeout_of(timeout)


def prepare(*, end_with_launcher: bool = True, alone: bool = False) -> Launch:
    """Detect the launcher, export its variables, end this process when the launcher ends, and choose gloo's interface.

    With ``alone``, a process that no launcher started is a job of one rank.
    """
    launch = detect_launch(alone=alone)
    if launch.launcher not in ("torchrun", "deepspeed", "environment"):  # these set all variables themselves
        os.environ.update(launch.variables)
    if end_with_launcher and launch.launcher not in ("environment", ALONE):  # what sets variables may end before
        from ds_topo.launch import orphans

        orphans.end_with_launcher(launch)
    address = check_master(launch)
    interface = choose_interface(launch, address)
    if interface is not None:
        os.environ[GLOO_INTERFACE] = interface
    return launch


def open_store(launch: Launch, timeout: timedelta) -> Store:
    """Return the job's store: torchrun's own, or one that rank 0 serves."""
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    where, host = f"{launch.master_addr}:{launch.master_port}", socket.gethostname()
    connect = partial(
        TCPStore,
        launch.master_addr,
        launch.master_port,
        launch.world_size,
        is_master=launch.rank == 0 and not of_agent,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=not of_agent,
    )
    try:
        store = within(timeout * UNANSWERED_AFTER, "the connection", connect, f" at {where}")
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            text = (
                f"port {launch.master_port} is in use on {host}, probably by another job: set MASTER_PORT to another "
                "port (deepspeed and torchrun: --master_port)"
            )
        elif launch.rank == 0 and not of_agent:
            text = f"rank 0 on {host} cannot listen at {where}: {str(error).splitlines()[0]}"
            if not is_own_address(address_of(launch.master_addr)):
                text += (
                    f". MASTER_ADDR={launch.master_addr!r} is not an address of {host}: give the address or name of "
                    "the host on which rank 0 runs"
                )
        else:
            server = "the launcher" if of_agent else "rank 0"
            text = (
                f"rank {launch.rank} on {host} cannot reach {server} at {where} within {timeout}: was it started, is "
                f"that its address, is there a firewall? ({str(error).splitlines()[0]})"
            )
        raise LaunchError(text) from error
    # After a restart torchrun's own store still has the addresses of ranks that are gone, so keys get a new prefix. One
    # that rank 0 serves is new, and needs none: hosts that count their restarts differently share it.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if of_agent else "0"
    return PrefixStore(f"ds_topo/attempt{attempt}", store)


def warn_of_restarts(launch: Launch) -> None:
    """Warn, on rank 0, if ranks may use different prefixes in the store after a restart.

    With ``torchrun --rdzv-backend c10d``, a host whose own ranks did not fail does not count their restart.
    """
    hosts = launch.node[1] if launch.node else 1
    keeps_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if launch.rank == 0 and hosts > 1 and keeps_store and restarts and os.environ.get(_NEW_STORE, "0") != "1":
        warn(
            f"torchrun --max-restarts on {hosts} hosts: each host counts its own restarts, so ranks may not find each "
            f"other after one. Start torchrun with {_NEW_STORE}=1 on every host"
        )


def wait_for_all(store: Store, launch: Launch, timeout: timedelta) -> None:
    """Wait until every rank has called this; raise if some do not come in time, or have another world size."""
    host, place, pid = socket.gethostname(), f"{launch.master_addr}:{launch.master_port}", os.getpid()
    rank, size = launch.rank, launch.world_size
    subject = f"rank {rank} on {host} joins the job at {place}"
    council = Council(store, "join", rank, range(size), subject, timeout, LaunchError)
    claim = json.dumps([host, pid])
    found = json.loads(council.request(timeout, lambda: store.compare_set(f"here/{rank}", "", claim)))
    if found != [host, pid]:
        raise LaunchError(
            f"rank {rank} on {host} (process {pid}): process {found[1]} on {found[0]} is rank {rank} of the job at "
            f"{place}. Give every process a RANK of its own, and every job another MASTER_PORT"
        )
    if rank == 0 and timeout * (1 - GATHERING) >= NOTICE_AFTER:  # the others have the patience
        here = [f"here/{each}" for each in range(size)]
        came = council.request(timeout, lambda: ranks_that_came(store, here, NOTICE_AFTER))
        if missing := sorted({*range(size)}.difference(came)):
            tell(
                f"ds_topo: rank 0 on {host} has waited {NOTICE_AFTER.seconds} s for {len(missing)} of {size} ranks, "
                f"{fold_numbers(missing)}, to join the job at {place}. Start a process for each rank, with WORLD_SIZE="
                f"{size}: without them joining fails after {timeout}"
            )
    me, waited = {"host": host, "world_size": size}, timeout * GATHERING
    verdict, size_of_0 = council.decide("came", me, lambda came: (_problems_of(came, launch, waited), size))
    if not verdict and size_of_0 != size:  # rank 0 does not expect this rank
        verdict = f"rank {rank} on {host} has WORLD_SIZE={size}, but rank 0 has {size_of_0}: {_SAME_SIZE}"
    if verdict:
        council.end()
        raise DisagreementError(verdict)


def create_world(store: Store, launch: Launch, timeout: timedelta, backend: str) -> None:
    """Call ``init_process_group`` with the store; later groups inherit the timeout.

    The world's group is not bound to a device (``device_id=``), because torch would create every later NCCL group by
    splitting it, which is collective over all ranks. torch 2.15 binds it to ``LOCAL_RANK`` nevertheless
    (see :func:`~ds_topo.base.torch_names.next_group_named`).
    """
    rank, size = launch.rank, launch.world_size
    init = partial(dist.init_process_group, backend, store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        within(timeout * UNANSWERED_AFTER, f"rank {rank} connects by {backend}", init, address_of_store(store))
    except StoreTimeoutError:
        raise
    except RuntimeError as error:
        raise LaunchError(
            f"rank {rank} on {socket.gethostname()}: all ranks came, but cannot connect by {backend}: {error}. "
            f"{GLOO_INTERFACE} is {os.environ.get(GLOO_INTERFACE, 'not set')}"
        ) from error
    inherit_timeout()


class SharedTraceback:
    """A ``sys.excepthook`` that prints what another rank has printed in one line; it ends with the store's job."""

    def __init__(self, store: Store) -> None:
        self._store, self._rank, self._before = weakref.ref(store), dist.get_rank(), sys.excepthook
        sys.excepthook = self
        weakref.finalize(store, self.remove).atexit = False

    def remove(self) -> None:
        """Put the former hook back, unless another one was set since, which may call this one."""
        if sys.excepthook is self:
            sys.excepthook = self._before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print the error, or a line if another rank prints the same one."""
        store = self._store()
        if store is None or not isinstance(error, Exception):
            self._before(kind, error, trace)
        else:
            from ds_topo.launch.tracebacks import print_once  # Python prints both errors if this one fails

            print_once(store, self._rank, self._before, kind, error, trace)


def _joined_already(timeout: timedelta | None) -> Launch:
    if timeout is not None and timeout != job_timeout():
        warn(f"the job was joined before with timeout {job_timeout()}, so timeout={timeout} has no effect")
    try:
        launch = detect_launch()
    except LaunchError:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        launch = Launch("init_process_group", dist.get_rank(), dist.get_world_size(), local_rank, "store", 1)
    if (launch.rank, launch.world_size) != (dist.get_rank(), dist.get_world_size()):
        raise LaunchError(
            f"torch.distributed was initialised as rank {dist.get_rank()} of {dist.get_world_size()}, but "
            f"{launch.launcher} says rank {launch.rank} of {launch.world_size}"
        )
    return launch


def take_device(launch: Launch, backend: str) -> None:
    """Make the device of this rank the current one if it is an accelerator."""
    device = device_served_by(backend, launch.local_rank)
    if device.type == "cpu":
        return
    visible = torch.accelerator.device_count()
    if launch.local_rank >= visible:
        raise LaunchError(
            f"rank {launch.rank} on {socket.gethostname()} has local rank {launch.local_rank}, but {visible} devices "
            f"of type {device.type}: start as many ranks on a host as it has GPUs, and let each rank see all of them "
            "(srun: --gpus-per-node instead of --gpus-per-task, or --gpu-bind=none)"
        )
    torch.accelerator.set_device_index(launch.local_rank)


_SAME_SIZE = "start every rank with the same WORLD_SIZE, the number of all ranks"


def _problems_of(came: Mapping[int, Mapping[str, Any]], launch: Launch, waited: timedelta) -> str:
    """Name the ranks that are missing, or have another world size than rank 0; empty if all came with the same."""
    missing = sorted(set(range(launch.world_size)).difference(came))
    others = {rank: place for rank, place in came.items() if place["world_size"] != launch.world_size}
    problems = []
    if missing:
        count = f"{len(missing)} of {launch.world_size} ranks did not come within {waited}"
        problems.append(
            f"{count}: {fold_numbers(missing)}. These came: {_by_host(came)}. Start a process for each missing "
            "rank, or raise the timeout if some are slower"
        )
    if others:
        sizes = ", ".join(map(str, sorted({place["world_size"] for place in others.values()})))
        differ = f"{len(others)} ranks have WORLD_SIZE={sizes}, but rank 0 has {launch.world_size}"
        problems.append(f"{differ} ({_by_host(others)}): {_SAME_SIZE}")
    return ". Of these, ".join(problems)


def _by_host(places: Mapping[int, Mapping[str, Any]]) -> str:
    return ranks_by_host((place["host"], rank) for rank, place in places.items())
