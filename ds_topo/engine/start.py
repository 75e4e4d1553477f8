"""The first call of a training program: join the job under any launcher, DeepSpeed included."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_topo.launch.extension_locks import remove_abandoned_locks
from ds_topo.launch.joining import as_timeout, join
from ds_topo.launch.launchers import Launch
from ds_topo.watch import start_watch, watch_limit


def init_distributed(
    timeout: float | timedelta | None = None,
    backend: str | None = None,
    *,
    end_with_launcher: bool = True,
    verbose: bool = True,
    watch: float | None = None,
) -> Launch:
    """Join the job; in place of ``deepspeed.init_distributed`` and ``torch.distributed.init_process_group``.

    The same program then runs under ``deepspeed`` (pdsh, openmpi, mpich, impi, slurm, ``--no_ssh``), ``torchrun``,
    ``srun`` and ``mpirun``: rank, world, local rank and master come from whatever started it. All groups that are
    created later without a timeout of their own, DeepSpeed's among them, have this one. See
    :func:`ds_topo.launch.joining.join`, which does the same without DeepSpeed, for the arguments and what is raised.

    Args:
        timeout: seconds, or a ``timedelta``: of joining and of every group. Unless given, 10 minutes, or the minutes in
            ``DEEPSPEED_TIMEOUT``.
        backend: of torch; that of DeepSpeed's accelerator unless given.
        end_with_launcher: end this rank when its launcher has ended, so that killing the launcher leaves none behind.
        verbose: rank 0 writes a line to standard error that says which launcher it found.
        watch: seconds without a sign of a rank after which it is named on all others, and those that wait for it are
            ended: a :class:`~ds_topo.watch.watch.Watch` until the end of the process. None: no watch. The environment
            decides before it: ``DS_TOPO_WATCH=60``, or ``off``.

    Returns:
        What the launcher says of this rank: ``rank``, ``world_size``, ``local_rank``, ...

    Raises:
        LaunchError: no launcher, variables that are missing or contradict each other, a master that cannot be reached.
        DisagreementError: ranks that did not come within the timeout; the message names them.
        ValueError: a timeout, or seconds of the watch, that are not positive.
    """
    backend = backend or get_accelerator().communication_backend_name()
    launch = join(timeout, backend, end_with_launcher=end_with_launcher, verbose=verbose)
    remove_abandoned_locks()
    # torch is initialised: DeepSpeed takes it over
    deepspeed.init_distributed(
        dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=as_timeout(timeout)
    )
    if get_accelerator().device_name() == "cpu":
        _unlink_shared_memory(launch)
    limit = watch_limit(watch)
    if limit is not None:
        start_watch(limit)
    return launch


def _unlink_shared_memory(launch: Launch) -> None:
    """Take the names of DeepSpeed's shared buffers away, 66 MiB a rank, which it never does.

    Ranks that have them open keep them; now they are gone when the last rank is, however it ends.
    """
    dist.barrier()
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_{launch.master_addr}_{launch.master_port}_*"
    for leftover in Path("/dev/shm").glob(name):
        leftover.unlink(missing_ok=True)
    dist.barrier()
