"""Join the job: one store, one timeout, and an error that names whoever did not come."""

from __future__ import annotations

import json
import os
import socket
import sys
import warnings
from collections import defaultdict
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # torch.distributed's, where mypy sees them

from ds_topo.errors import DisagreementError, LaunchError
from ds_topo.launch.launchers import Launch, detect_launch
from ds_topo.launch.lifeline import lifeline
from ds_topo.launch.network import GLOO_INTERFACE, check_master, choose_interface
from ds_topo.placement.summary import fold_numbers
from ds_topo.process_groups.torch_names import inherit_timeout, job_timeout

_NEW_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""torchrun's variable: 1 for a new store after each restart."""
_LEADER_SHARE = 0.9
"""Rank 0 stops waiting before the others do, so that they still read whom it missed."""


def join(
    timeout: float | timedelta | None = None,
    backend: str | None = None,
    *,
    end_with_launcher: bool = True,
    verbose: bool = True,
) -> Launch:
    """Join the job that a launcher started, with torch alone; ``ds_topo.init_distributed`` tells DeepSpeed, too.

    Works out rank, world, local rank and master from what started this process (:func:`detect_launch`), exports torch's
    and DeepSpeed's variables, waits until all ranks are there, and calls ``init_process_group``. Later groups without a
    timeout of their own, DeepSpeed's among them, get this one instead of torch's 30 minutes. Called again, or after
    somebody else's ``init_process_group``, it only says who this rank is.

    Args:
        timeout: seconds, or a ``timedelta``: of joining and of every group. Unless given, 10 minutes, or the minutes in
            ``DEEPSPEED_TIMEOUT``.
        backend: of torch; ``nccl`` where there is a GPU, else ``gloo``.
        end_with_launcher: end this rank when its launcher has ended, so that killing the launcher leaves none behind.
        verbose: rank 0 writes a line to standard error that says which launcher it found.

    Raises:
        LaunchError: no launcher, variables that are missing or contradict each other, a master that cannot be reached.
        DisagreementError: ranks that did not come within the timeout; the message names them.
        ValueError: a timeout that is not positive.
    """
    limit = as_timeout(timeout)
    if dist.is_initialized():
        return _joined_already(limit if timeout is not None else None)
    launch = prepare(end_with_launcher=end_with_launcher)
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if "nccl" in backend:
        take_device(launch)
    warn_of_restarts(launch)
    store = open_store(launch, limit)
    wait_for_all(store, launch, limit)
    create_world(store, launch, limit, backend)
    if verbose and launch.rank == 0:
        print(f"ds_topo: {launch}, backend {backend}, timeout {limit}", file=sys.stderr, flush=True)
    return launch


def as_timeout(timeout: float | timedelta | None) -> timedelta:
    """Seconds or a ``timedelta`` as a ``timedelta``; DeepSpeed's default for None.

    >>> as_timeout(90), as_timeout(timedelta(minutes=2)).total_seconds()
    (datetime.timedelta(seconds=90), 120.0)

    Raises:
        ValueError: not positive.
    """
    if timeout is None:
        minutes = os.environ.get("DEEPSPEED_TIMEOUT", "10")
        if not (minutes.isascii() and minutes.isdecimal()) or not int(minutes):
            raise ValueError(f"DEEPSPEED_TIMEOUT={minutes!r} is not a number of minutes >= 1")
        return timedelta(minutes=int(minutes))
    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if limit <= timedelta():
        raise ValueError(f"timeout={timeout}: give seconds, or a timedelta, above 0")
    return limit


def prepare(*, end_with_launcher: bool = True) -> Launch:
    """What started this process; its variables are in the environment then, and its end ends this process.

    Raises:
        LaunchError: as ``join``.
    """
    launch = detect_launch()
    if not launch.sets_variables:
        os.environ.update(launch.variables)
    if end_with_launcher:
        lifeline.attach(launch)
    address = check_master(launch)
    interface = choose_interface(launch, address)
    if interface is not None:
        os.environ[GLOO_INTERFACE] = interface
    return launch


def open_store(launch: Launch, timeout: timedelta) -> Store:
    """The job's store: torchrun's own, else one that rank 0 serves.

    Raises:
        LaunchError: the port is taken, or rank 0 is not there within the timeout.
    """
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(
            launch.master_addr,
            launch.master_port,
            launch.world_size,
            is_master=launch.rank == 0 and not of_agent,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=not of_agent,
        )
    except (dist.DistError, RuntimeError) as error:
        raise LaunchError(_why_no_store(launch, timeout, error)) from error
    # After a restart torchrun keeps its own store, and with it addresses of ranks that are gone. One that rank 0 serves
    # is new, and hosts that count their restarts differently meet there.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if of_agent else "0"
    return PrefixStore(f"ds_topo/attempt{attempt}", store)


def warn_of_restarts(launch: Launch) -> None:
    """Warn, on rank 0, where ranks would not meet after a restart.

    With ``torchrun --rdzv-backend c10d`` a host whose own ranks did not fail restarts them without counting it.
    """
    hosts = launch.node[1] if launch.node else 1
    keeps_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if launch.rank == 0 and hosts > 1 and keeps_store and restarts and os.environ.get(_NEW_STORE, "0") != "1":
        warnings.warn(
            f"torchrun --max-restarts on {hosts} hosts: each host counts its own restarts, so that ranks may not meet "
            f"after one. Start torchrun with {_NEW_STORE}=1 on every host",
            stacklevel=3,
        )


def wait_for_all(store: Store, launch: Launch, timeout: timedelta) -> None:
    """Return when every rank has called this.

    Raises:
        DisagreementError: ranks did not come within the timeout. Rank 0 names them and the others pass it on.
    """
    me = {"host": socket.gethostname(), "pid": os.getpid()}
    store.set(f"here/{launch.rank}", json.dumps(me))
    if launch.rank == 0:
        keys = [f"here/{rank}" for rank in range(launch.world_size)]
        try:
            store.wait(keys, timeout * _LEADER_SHARE)
            verdict = ""
        except (dist.DistError, RuntimeError):
            verdict = _who_is_missing(store, keys, launch, timeout * _LEADER_SHARE)
        store.set("verdict", verdict)
    else:
        try:
            store.wait(["verdict"], timeout)
        except (dist.DistError, RuntimeError) as error:
            raise LaunchError(
                f"rank {launch.rank} on {socket.gethostname()}: {launch.master_addr}:{launch.master_port} is there, "
                f"but rank 0 did not answer within {timeout}: it was not started, has ended or hangs"
            ) from error
        verdict = store.get("verdict").decode()
    if verdict:
        raise DisagreementError(verdict)


def create_world(store: Store, launch: Launch, timeout: timedelta, backend: str) -> None:
    """``init_process_group`` over the store; later groups inherit the timeout.

    The world's group is not bound to a device (``device_id=``): torch would then make every later NCCL group by
    splitting it, which all ranks must join, while a grid's groups are created by their members alone.
    """
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
        )
    except (dist.DistError, RuntimeError) as error:
        raise LaunchError(
            f"rank {launch.rank} on {socket.gethostname()}: the ranks met, but cannot connect by {backend}: {error}. "
            f"{GLOO_INTERFACE} is {os.environ.get(GLOO_INTERFACE, 'not set')}"
        ) from error
    inherit_timeout()


def _joined_already(timeout: timedelta | None) -> Launch:
    if timeout is not None and timeout != job_timeout():
        warnings.warn(
            f"the job was joined before with timeout {job_timeout()}, which stays; timeout={timeout} has no effect",
            stacklevel=3,
        )
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


def take_device(launch: Launch) -> None:
    """Make the GPU of this rank the current one.

    Raises:
        LaunchError: there is none for it.
    """
    visible = torch.cuda.device_count()
    if launch.local_rank >= visible:
        raise LaunchError(
            f"rank {launch.rank} on {socket.gethostname()} has local rank {launch.local_rank}, but {visible} GPUs: "
            "start as many ranks on a host as it has GPUs, and let each rank see all of them (srun: --gpus-per-node "
            "instead of --gpus-per-task, or --gpu-bind=none)"
        )
    torch.cuda.set_device(launch.local_rank)


def _why_no_store(launch: Launch, timeout: timedelta, error: Exception) -> str:
    where = f"{launch.master_addr}:{launch.master_port}"
    if "EADDRINUSE" in str(error):
        return (
            f"port {launch.master_port} is taken on {socket.gethostname()}: another job runs there; set MASTER_PORT to "
            f"another (deepspeed and torchrun: --master_port)"
        )
    if launch.rank == 0:
        return f"rank 0 on {socket.gethostname()} cannot listen at {where}: {error}"
    return (
        f"rank {launch.rank} on {socket.gethostname()} cannot reach rank 0 at {where} within {timeout}: was it "
        f"started, is that its address, is there a firewall? ({str(error).splitlines()[0]})"
    )


def _who_is_missing(store: Store, keys: list[str], launch: Launch, waited: timedelta) -> str:
    here = [rank for rank, key in enumerate(keys) if store.check([key])]
    missing = sorted(set(range(launch.world_size)).difference(here))
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank in here:
        by_host[json.loads(store.get(keys[rank]))["host"]].append(rank)
    came = "; ".join(f"{host}: {fold_numbers(ranks)}" for host, ranks in list(by_host.items())[:16])
    return (
        f"{len(missing)} of {launch.world_size} ranks did not come within {waited}: {fold_numbers(missing)}. "
        f"These came, {came}{' and more' if len(by_host) > 16 else ''}"
    )
