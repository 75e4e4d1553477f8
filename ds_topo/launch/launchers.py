"""Which launcher started this process, and what it says about rank, world and master. Standard library only.

torchrun and DeepSpeed's own launcher set every variable that torch needs. ``srun`` (``deepspeed --launcher slurm`` too)
and MPI (``--launcher openmpi``, ``mpich``, ``impi``) set their own, which are translated here.
"""

from __future__ import annotations

import os
import shlex
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ds_topo.errors import HostError, LaunchError
from ds_topo.launch.mpi import MPI_LAUNCHERS, MpiVariables, mpi_master
from ds_topo.placement.slurm import in_step, slurm_map

DEFAULT_PORT = 29500
"""torch's and DeepSpeed's."""
_REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SLURM_PORTS = (20000, 30000)
"""Below the range from which systems take ports for outgoing connections."""


@dataclass(frozen=True)
class Launch:
    """One rank of a job, as its launcher describes it.

    Args:
        launcher: ``torchrun``, ``deepspeed``, ``srun``, ``mpirun (Open MPI)``, ... or ``environment``: variables that
            were set by hand.
        rank: of the job.
        world_size: the number of ranks.
        local_rank: on this host; the index of its device.
        master_addr: the host of rank 0.
        master_port: where rank 0 listens.
        local_world_size: the ranks on this host, where the launcher says it.
        node: the number of this host and of all hosts, where the launcher says it.
        job: which job, where there is a name for it.

    Raises:
        LaunchError: numbers that contradict each other.

    >>> launch = Launch("srun", 3, 4, 1, "node1", 20007, local_world_size=2, node=(1, 2), job="job 7, step 0")
    >>> print(launch)
    4 ranks, 2 on this host, started by srun (job 7, step 0), master node1:20007
    >>> launch.variables["RANK"], launch.variables["CROSS_SIZE"]
    ('3', '2')
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int
    local_world_size: int | None = None
    node: tuple[int, int] | None = None
    job: str = ""

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise LaunchError(
                f"{self.launcher} says rank {self.rank} of a world of {self.world_size}: ranks are 0 to world size - 1"
            )
        if self.local_rank < 0 or (self.local_world_size is not None and self.local_rank >= self.local_world_size):
            raise LaunchError(
                f"{self.launcher} says local rank {self.local_rank} of {self.local_world_size} ranks on this host"
            )
        if not 0 < self.master_port < 2**16:
            raise LaunchError(f"{self.launcher}: MASTER_PORT={self.master_port} is not a port, 1 to 65535")

    def __str__(self) -> str:
        here = "" if self.local_world_size in (None, self.world_size) else f", {self.local_world_size} on this host"
        job = f" ({self.job})" if self.job else ""
        by = "by variables of the environment" if self.launcher == "environment" else f"started by {self.launcher}{job}"
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"{ranks}{here}, {by}, master {self.master_addr}:{self.master_port}"

    @property
    def is_on_one_host(self) -> bool | None:
        """Whether all ranks are on this host; None where the launcher does not say."""
        return None if self.local_world_size is None else self.local_world_size == self.world_size

    @property
    def variables(self) -> dict[str, str]:
        """The variables that torch and DeepSpeed read, as DeepSpeed's own launcher sets them."""
        variables = {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }
        if self.local_world_size is not None:
            variables |= {"LOCAL_SIZE": str(self.local_world_size), "LOCAL_WORLD_SIZE": str(self.local_world_size)}
        if self.node is not None:
            variables |= {"CROSS_RANK": str(self.node[0]), "CROSS_SIZE": str(self.node[1])}
        return variables

    @property
    def sets_variables(self) -> bool:
        """Whether the launcher set torch's variables itself, so that nothing is to be added."""
        return self.launcher in ("torchrun", "deepspeed", "environment")


def detect_launch(environ: Mapping[str, str] | None = None, arguments: Sequence[str] | None = None) -> Launch:
    """What started this process, from its environment.

    Complete sets of torch's variables come first: a ``torchrun`` inside an ``srun`` is torchrun. Then MPI, whose ranks
    inherit Slurm's variables of the daemons that started them, then Slurm. ``MASTER_ADDR`` and ``MASTER_PORT`` are the
    user's own where they are set.

    Args:
        environ: ``os.environ`` unless given.
        arguments: of the command line, ``sys.argv`` unless given; for advice.

    Raises:
        LaunchError: no launcher, or one whose variables are incomplete or contradict each other; the message says which
            are missing and how to start.

    >>> detect_launch({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "29500"})
    Launch(launcher='environment', rank=0, world_size=2, local_rank=0, master_addr='a', master_port=29500, ...)
    """
    environ = os.environ if environ is None else environ
    if all(environ.get(name) for name in _REQUIRED):
        return _from_torch_variables(environ)
    present = [mpi for mpi in MPI_LAUNCHERS if mpi.rank in environ and mpi.local_rank in environ]
    if present:
        return _from_mpi(present[0], environ)
    if in_step(environ):
        return _from_slurm(environ)
    raise LaunchError(_what_is_missing(environ, sys.argv if arguments is None else arguments))


def _from_torch_variables(environ: Mapping[str, str]) -> Launch:
    launcher, local = "environment", "LOCAL_WORLD_SIZE"
    if "TORCHELASTIC_RUN_ID" in environ:
        launcher = "torchrun"
    elif "CROSS_RANK" in environ and "LOCAL_SIZE" in environ:
        launcher, local = "deepspeed", "LOCAL_SIZE"
    else:
        local = local if environ.get(local) else "LOCAL_SIZE"
        _check_against_slurm(environ)
    number = _reader(environ, launcher)
    node = None
    if launcher == "deepspeed":
        node = (number("CROSS_RANK"), number("CROSS_SIZE"))
    elif launcher == "torchrun" and environ.get("GROUP_WORLD_SIZE"):
        node = (number("GROUP_RANK"), number("GROUP_WORLD_SIZE"))
    return Launch(
        launcher,
        number("RANK"),
        number("WORLD_SIZE"),
        number("LOCAL_RANK"),
        environ["MASTER_ADDR"],
        number("MASTER_PORT"),
        number(local) if environ.get(local) else None,
        node,
    )


def _check_against_slurm(environ: Mapping[str, str]) -> None:
    """``export RANK=$SLURM_PROCID`` in a batch script gives every task the script's own number, 0."""
    if in_step(environ) and environ.get("SLURM_STEP_NUM_TASKS") == environ["WORLD_SIZE"]:
        for ours, theirs in (("RANK", "SLURM_PROCID"), ("LOCAL_RANK", "SLURM_LOCALID")):
            if environ.get(theirs, environ[ours]) != environ[ours]:
                raise LaunchError(
                    f"{ours}={environ[ours]}, but srun says {theirs}={environ[theirs]}: do not set {ours} in the batch "
                    "script, where it is the script's own; it is taken from Slurm"
                )


def _from_slurm(environ: Mapping[str, str]) -> Launch:
    number = _reader(environ, "srun")
    world = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    job = f"job {environ.get('SLURM_JOB_ID', '?')}, step {environ['SLURM_STEP_ID']}"
    rank, world_size = number("SLURM_PROCID"), number(world)
    try:
        host_map = slurm_map(environ)
        if host_map.size != world_size:
            raise HostError(f"{world}={world_size}, but the tasks per node make {host_map.size}")
        first, host = host_map.host_of(0), host_map.host_of(rank)
    except HostError as error:
        raise LaunchError(f"srun ({job}): {error}") from error
    address = environ.get("MASTER_ADDR") or first.name
    port = number("MASTER_PORT") if environ.get("MASTER_PORT") else _slurm_port(environ, job)
    node = (host_map.host_index(rank), len(host_map.hosts))
    launch = Launch("srun", rank, world_size, number("SLURM_LOCALID"), address, port, len(host.slots), node, job)
    return _agreeing(launch, environ)


def _slurm_port(environ: Mapping[str, str], job: str) -> int:
    """A reserved port (``srun --resv-ports``), or one that two jobs on a node hardly share."""
    reserved = environ.get("SLURM_STEP_RESV_PORTS", "").split(",")[0].split("-")[0]
    if reserved.isascii() and reserved.isdecimal():
        return int(reserved)
    first, end = _SLURM_PORTS
    return first + zlib.crc32(job.encode()) % (end - first)


def _from_mpi(mpi: MpiVariables, environ: Mapping[str, str]) -> Launch:
    number = _reader(environ, mpi.launcher)
    rank, world_size = number(mpi.rank), number(mpi.world_size)
    local_rank, local_world_size = number(mpi.local_rank), number(mpi.local_world_size)
    port = number("MASTER_PORT") if environ.get("MASTER_PORT") else DEFAULT_PORT
    address = environ.get("MASTER_ADDR") or mpi_master(environ, rank, world_size, local_world_size)
    launch = Launch(mpi.launcher, rank, world_size, local_rank, address, port, local_world_size)
    return _agreeing(launch, environ)


def _agreeing(launch: Launch, environ: Mapping[str, str]) -> Launch:
    """The launch, unless a variable that is set already says something else."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        if environ.get(name, launch.variables[name]) != launch.variables[name]:
            raise LaunchError(
                f"{name}={environ[name]} is set, but {launch.launcher} says {launch.variables[name]}: unset {name}"
            )
    return launch


def _reader(environ: Mapping[str, str], launcher: str) -> Callable[[str], int]:
    def number(name: str) -> int:
        value = environ.get(name)
        if not value:
            raise LaunchError(f"{name} is not set, though this process was started by {launcher}")
        if not (value.isascii() and value.isdecimal()) or len(value) > 9:
            raise LaunchError(f"{name}={value!r} is not a whole number (the launcher is {launcher})")
        return int(value)

    return number


def _what_is_missing(environ: Mapping[str, str], arguments: Sequence[str]) -> str:
    missing = [name for name in _REQUIRED if not environ.get(name)]
    about_this_rank = [name for name in _REQUIRED[:3] if environ.get(name)]
    if about_this_rank:
        there = ", ".join(f"{name}={environ[name]}" for name in _REQUIRED if environ.get(name))
        return f"{there} set, but {', '.join(missing)} missing: set all of them, or none and use a launcher"
    script = shlex.join([word for word in arguments[:3] if word and word != "-c"]) or "train.py"
    if environ.get("SLURM_JOB_ID"):
        return (
            f"this process is inside Slurm job {environ['SLURM_JOB_ID']}, but is none of its tasks. Start it with\n"
            f"  srun --ntasks-per-node 4 python {script}"
        )
    return (
        f"no launcher started this process ({', '.join(missing)} missing). Start it with one of\n"
        f"  torchrun --nproc-per-node 4 {script}\n"
        f"  deepspeed --num_gpus 4 {script}\n"
        f"  deepspeed --hostfile hosts {script}\n"
        f"  srun --nodes 2 --ntasks-per-node 4 python {script}\n"
        f"  mpirun -n 4 python {script}"
    )
