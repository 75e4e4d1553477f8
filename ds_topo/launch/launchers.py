"""Find out which launcher started this process and which rank it is, and export its coordinate. Standard library only.

torchrun and DeepSpeed's own launcher set every variable that torch needs. ``srun`` (also ``deepspeed --launcher
slurm``) and MPI (also ``--launcher openmpi``, ``mpich``, ``impi``) set their own, which are translated here.
"""

from __future__ import annotations

import difflib
import ipaddress
import logging
import os
import shlex
import socket
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING

from ds_topo.errors import HostError, LaunchError, TopologyError, abridged, warn
from ds_topo.topology.axes import check_meanings, parse_spec

if TYPE_CHECKING:
    from ds_topo.topology import ProcessTopology

DEFAULT_PORT = 29500
"""The default port of torch and DeepSpeed."""
ALONE = "no launcher"
"""The launcher of a process that is a job of one rank."""
PREFIX = "DS_TOPO_"
COORDINATE = f"{PREFIX}COORDINATE"
"""The variable with the whole coordinate, ``pipe=1 data=0``, which tells what other variables are exported."""
TOPOLOGY_OVERRIDE, REFERENCE = f"{PREFIX}VERIFY_TOPOLOGY", f"{PREFIX}VERIFY_REFERENCE"
"""The variables by which ``ds-topo verify`` sets the topology of a program's grid, and marks a run as the reference."""
_SWITCHES = tuple(
    f"{PREFIX}{name}" for name in ("WATCH", "FIRST_CAUSE", "DEBUG_COLLECTIVES", "VERIFY_TOPOLOGY", "VERIFY_REFERENCE")
)
"""The variables that ds_topo reads."""
_REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
JOB_PORTS = range(20000, 30000)
"""Ports below the range from which systems choose ports of outgoing connections."""
_OMPI, _MV2 = "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_"
_MPI_VARIABLES = {
    "mpirun (Open MPI)": [f"{_OMPI}{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
    "mpirun (MVAPICH2)": [f"{_MV2}{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
    "mpiexec (hydra)": ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
}
"""The variables of each MPI launcher for rank, world size, local rank and local world size. ``srun --mpi=pmi2`` sets
the first two of hydra alone."""


@dataclass(frozen=True)
class Launch:
    """One rank of a job, as its launcher describes it.

    Args:
        launcher: ``torchrun``, ``deepspeed``, ``srun``, ``mpirun (Open MPI)``, ... or ``environment`` for variables
            that were set by hand, or ``no launcher`` for a job of one rank.
        local_rank: the rank on this host, which is the index of its device.
        local_world_size: the number of ranks on this host, if known.
        node: the number of this host and the number of all hosts, if known.

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
        by = f"because no launcher started this process{job}" if self.launcher == ALONE else by
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"{ranks}{here}, {by}, master {self.master_addr}:{self.master_port}"

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


# -- detection ---------------------------------------------------------------------------------------------------------


def detect_launch(
    environ: Mapping[str, str] | None = None, arguments: Sequence[str] | None = None, *, alone: bool = False
) -> Launch:
    """Find out from the environment what started this process.

    A complete set of torch's variables comes first: a ``torchrun`` inside an ``srun`` is torchrun. Then comes MPI, as
    its ranks inherit Slurm's variables from the daemons that started them, then Slurm. ``MASTER_ADDR`` and
    ``MASTER_PORT`` override the launcher's where they are set.

    Args:
        environ: the environment; ``os.environ`` by default.
        arguments: the command line, for the advice in messages; ``sys.argv`` by default.
        alone: without a launcher, return a job of one rank. Inside a Slurm job this process may be meant as one of
            several tasks, so it raises there.

    Raises:
        LaunchError: there is no launcher, or its variables are incomplete or contradict each other.

    >>> detect_launch({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "29500"})
    Launch(launcher='environment', rank=0, world_size=2, local_rank=0, master_addr='a', master_port=29500, ...)
    """
    environ = os.environ if environ is None else environ
    if all(environ.get(name) for name in _REQUIRED):
        return _from_torch_variables(environ)
    mpi = next((name for name, (rank, _, local, _) in _MPI_VARIABLES.items() if {rank, local} <= environ.keys()), None)
    if mpi is None and not in_step(environ):
        words = sys.argv if arguments is None else arguments
        program = shlex.join([word for word in words[:3] if word and word != "-c"]) or "train.py"
        ranks = _ranks_wanted(words)
        if alone and not any(environ.get(name) for name in (*_REQUIRED[:3], "SLURM_JOB_ID")):
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = int(free.getsockname()[1])
            more = f"torchrun --nproc-per-node {ranks} {program} starts {ranks} ranks"
            return Launch(ALONE, 0, 1, 0, "127.0.0.1", port, local_world_size=1, node=(0, 1), job=more)
        raise LaunchError(_what_is_missing(environ, program, ranks))
    launch = _from_slurm(environ) if mpi is None else _from_mpi(mpi, environ)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        if environ.get(name, launch.variables[name]) != launch.variables[name]:
            raise LaunchError(
                f"{name}={environ[name]} is set, but {launch.launcher} says {launch.variables[name]}: unset {name}"
            )
    return launch


def _from_torch_variables(environ: Mapping[str, str]) -> Launch:
    launcher, local = "environment", "LOCAL_WORLD_SIZE"
    if "TORCHELASTIC_RUN_ID" in environ:
        launcher = "torchrun"
    elif "CROSS_RANK" in environ and "LOCAL_SIZE" in environ:
        launcher, local = "deepspeed", "LOCAL_SIZE"
    else:
        local = local if environ.get(local) else "LOCAL_SIZE"
        if in_step(environ) and environ.get("SLURM_STEP_NUM_TASKS") == environ["WORLD_SIZE"]:
            # `export RANK=$SLURM_PROCID` in a batch script gives every task the script's own number, 0
            for ours, theirs in (("RANK", "SLURM_PROCID"), ("LOCAL_RANK", "SLURM_LOCALID")):
                if environ.get(theirs, environ[ours]) != environ[ours]:
                    raise LaunchError(
                        f"{ours}={environ[ours]}, but srun says {theirs}={environ[theirs]}: do not set {ours} in the "
                        "batch script, where it has the script's own value; it is read from Slurm"
                    )
    number = _reader(environ, launcher)
    node = None
    if launcher == "deepspeed":
        node = (number("CROSS_RANK"), number("CROSS_SIZE"))
    elif launcher == "torchrun" and environ.get("GROUP_WORLD_SIZE"):
        node = (number("GROUP_RANK"), number("GROUP_WORLD_SIZE"))
    rank, world_size, local_rank, port = map(number, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"))
    local_size = number(local) if environ.get(local) else None
    return Launch(launcher, rank, world_size, local_rank, environ["MASTER_ADDR"], port, local_size, node)


def in_step(environ: Mapping[str, str]) -> bool:
    """Return whether ``srun`` started this process, rather than a batch script or a shell of ``salloc``."""
    return "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ


def _from_slurm(environ: Mapping[str, str]) -> Launch:
    from ds_topo.launch.hosts import slurm_map  # Slurm alone needs it

    number = _reader(environ, "srun")
    world = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    job = f"job {environ.get('SLURM_JOB_ID', '?')}, step {environ['SLURM_STEP_ID']}"
    rank, world_size = number("SLURM_PROCID"), number(world)
    try:
        host_map = slurm_map(environ, of_step=True)
        if host_map.size != world_size:
            raise HostError(f"{world}={world_size}, but the tasks per node make {host_map.size}")
        first, host = host_map.host_of(0), host_map.host_of(rank)
    except HostError as error:
        raise LaunchError(f"srun ({job}): {error}") from error
    address = environ.get("MASTER_ADDR") or first.name
    reserved = environ.get("SLURM_STEP_RESV_PORTS", "").split(",")[0].split("-")[0]  # srun --resv-ports
    if environ.get("MASTER_PORT"):
        port = number("MASTER_PORT")
    elif reserved.isascii() and reserved.isdecimal():
        port = int(reserved)
    else:  # one that two jobs on a node are unlikely to share
        port = JOB_PORTS[zlib.crc32(job.encode()) % len(JOB_PORTS)]
    node = (host_map.host_index(rank), len(host_map.hosts))
    return Launch("srun", rank, world_size, number("SLURM_LOCALID"), address, port, len(host.slots), node, job)


def _from_mpi(launcher: str, environ: Mapping[str, str]) -> Launch:
    number = _reader(environ, launcher)
    rank, world_size, local_rank, local_size = map(number, _MPI_VARIABLES[launcher])
    port = number("MASTER_PORT") if environ.get("MASTER_PORT") else DEFAULT_PORT
    address = environ.get("MASTER_ADDR") or mpi_master(environ, rank, world_size, local_size)
    return Launch(launcher, rank, world_size, local_rank, address, port, local_size)


def _reader(environ: Mapping[str, str], launcher: str) -> Callable[[str], int]:
    def number(name: str) -> int:
        value = environ.get(name)
        if not value:
            raise LaunchError(f"{name} is not set, though this process was started by {launcher}")
        if not (value.isascii() and value.isdecimal()) or len(value) > 9:
            raise LaunchError(f"{name}={value!r} is not a whole number (the launcher is {launcher})")
        return int(value)

    return number


def _ranks_wanted(words: Sequence[str]) -> int:
    """Return the ranks of the topology among a program's arguments, the fewest where a degree is -1, or 4."""
    for word in words:
        spec = word.partition("=")[2] if word.startswith("--") else word
        with suppress(TopologyError):
            axes, degrees, extra_axes, _ = parse_spec(spec.replace("=-1", "=2"))
            check_meanings(axes, extra_axes)
            return prod(degrees)
    return 4


def _what_is_missing(environ: Mapping[str, str], script: str, ranks: int) -> str:
    missing = [name for name in _REQUIRED if not environ.get(name)]
    if any(environ.get(name) for name in _REQUIRED[:3]):
        there = ", ".join(f"{name}={environ[name]}" for name in _REQUIRED if environ.get(name))
        return f"{there} set, but {', '.join(missing)} missing: set all of them, or none and use a launcher"
    if environ.get("SLURM_JOB_ID"):
        return (
            f"this process is inside Slurm job {environ['SLURM_JOB_ID']}, but is none of its tasks. Start it with\n"
            f"  srun --ntasks {ranks} python {script}"
        )
    return (
        f"no launcher started this process ({', '.join(missing)} missing). Start it with one of\n"
        f"  torchrun --nproc-per-node {ranks} {script}\n"
        f"  deepspeed --num_gpus {ranks} {script}\n"
        f"  deepspeed --hostfile hosts {script}\n"
        f"  srun --ntasks {ranks} python {script}\n"
        f"  mpirun -n {ranks} python {script}"
    )


def mpi_master(environ: Mapping[str, str], rank: int, world_size: int, local_world_size: int) -> str:
    """Return the address of rank 0, which MPI's variables do not contain.

    On several hosts, rank 0 sends it through MPI where mpi4py is installed, as in DeepSpeed. Otherwise it is the host
    on which Open MPI's ``mpirun`` runs, and rank 0 checks that.
    """
    if world_size == local_world_size:
        return "127.0.0.1"
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # not installed, or without an MPI library
        pass
    else:
        return str(MPI.COMM_WORLD.bcast(socket.gethostbyname(socket.gethostname()) if rank == 0 else None, root=0))
    advice = "give it, `mpirun -x MASTER_ADDR=HOST ...` (Open MPI) or `mpiexec -genv MASTER_ADDR HOST ...` (hydra)"
    address = _address_of_mpirun(environ)
    if address is None:
        raise LaunchError(f"MASTER_ADDR, the host of rank 0, is not set, and mpi4py is not installed: {advice}")
    if rank == 0 and not is_own_address(address):
        raise LaunchError(
            f"MASTER_ADDR, the host of rank 0, is not set: mpirun runs on {address}, but rank 0 on "
            f"{socket.gethostname()}; {advice}"
        )
    return address


def _address_of_mpirun(environ: Mapping[str, str]) -> str | None:
    """Return the first address in Open MPI 4's ``1212612608.0;tcp://10.77.0.1,10.1.0.1:35055``.

    >>> _address_of_mpirun({"OMPI_MCA_orte_hnp_uri": "1212612608.0;tcp://10.77.0.1,10.1.0.1:35055"})
    '10.77.0.1'
    """
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "").partition("tcp://")[2]
    return uri.rpartition(":")[0].split(",")[0] or None


def address_of(name: str) -> str:
    """Return the first address of a host."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise HostError(
            f"host {name!r} cannot be resolved to an address: {error}; check its spelling, /etc/hosts and DNS"
        ) from None


def is_loopback(address: str) -> bool:
    """Return whether an address can be reached from its own host only.

    >>> is_loopback("127.0.1.1"), is_loopback("10.0.0.1")
    (True, False)
    """
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_own_address(address: str) -> bool:
    """Return whether this host has the address."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


# -- the coordinate in the environment, in logs and in file names ------------------------------------------------------


def export_coordinates(topology: ProcessTopology, rank: int) -> Callable[[], None]:
    """Put the coordinate of this rank into its environment, for logs, profiles and child processes.

    ``model`` is exported as ``tensor``, too. Return a function that restores the variables, unless other ones have been
    exported since.

    >>> from ds_topo import ProcessTopology
    >>> restore = export_coordinates(ProcessTopology.from_spec("pipe=2,tensor=2"), 3)
    >>> [os.environ[f"DS_TOPO_{name}"] for name in ("PIPE", "MODEL", "TENSOR", "COORDINATE")]
    ['1', '1', '1', 'pipe=1 model=1']
    >>> restore()
    """
    coordinate = topology.get_coord(rank)._asdict()
    variables = {f"{PREFIX}{axis.upper()}": str(index) for axis, index in coordinate.items()}
    if "model" in coordinate:
        variables[f"{PREFIX}TENSOR"] = str(coordinate["model"])
    variables[COORDINATE] = " ".join(f"{axis}={index}" for axis, index in coordinate.items())

    def exported() -> dict[str, str]:
        axes = [part.partition("=")[0].upper() for part in os.environ.get(COORDINATE, "").split()]
        names = [f"{PREFIX}{axis}" for axis in [*axes, *(["TENSOR"] if "MODEL" in axes else [])]]
        return {name: os.environ[name] for name in [*names, COORDINATE] if name in os.environ}

    def replace(old: Mapping[str, str], new: Mapping[str, str]) -> None:
        for name in old:
            os.environ.pop(name, None)
        os.environ.update(new)

    def restore() -> None:
        if exported() == variables:
            replace(variables, before)

    before = exported()
    replace(before, variables)
    return restore


def misspelt_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that seem to be meant for ds_topo, which does not read them, and the variables that it reads.

    Others that begin with the same letters may belong to a program.

    >>> misspelt_variables({"DS_TOPO_WACTH": "5", "DSTOPO_WATCH": "5", "DS_TOPO_WATCH": "5", "DS_TOPO_CACHE": "a"})
    {'DS_TOPO_WACTH': 'DS_TOPO_WATCH', 'DSTOPO_WATCH': 'DS_TOPO_WATCH'}
    """
    axes = [part.partition("=")[0].upper() for part in environment.get(COORDINATE, "").split()]
    known = {COORDINATE, *_SWITCHES, f"{PREFIX}TENSOR", *(f"{PREFIX}{axis}" for axis in axes)}
    switches = {name[len(PREFIX) :].replace("_", ""): name for name in _SWITCHES}
    found: dict[str, str] = {}
    for name in environment:
        letters = name.upper().replace("_", "").replace("-", "")
        if name not in known and letters.startswith("DSTOPO"):
            for near in difflib.get_close_matches(letters.removeprefix("DSTOPO"), switches, n=1, cutoff=0.75):
                found[name] = switches[near]
    return found


@cache
def warn_of_misspelt_variables() -> None:
    """Warn of variables that ds_topo would ignore; once in a process."""
    for name, near in misspelt_variables(os.environ).items():
        warn(
            f"the environment variable {name}={abridged(os.environ[name])} has no effect: did you mean {near}? Rename "
            "it, or unset it"
        )


def named(rank: int, host: str, coordinate: str = "") -> str:
    """Describe a rank.

    >>> named(3, "node1", "data=1 model=1")
    'rank 3 (data=1 model=1) on node1'
    """
    return f"rank {rank} ({coordinate}) on {host}" if coordinate else f"rank {rank} on {host}"


def rank_name(separator: str = " ") -> str:
    """Return rank, coordinate and host of this process, as far as they are known.

    Use another separator for file names: ``torch.profiler.tensorboard_trace_handler(folder, rank_name("-"))`` writes
    ``rank5-pipe=1-data=0-node1.....json``.
    """
    words = [f"rank{os.environ.get('RANK', '?')}", *os.environ.get(COORDINATE, "").split(), socket.gethostname()]
    return separator.join(words)


class RankFields(logging.Filter):
    """Gives log records the fields ``rank``, ``world_size``, ``host`` and ``coordinate``, for any format.

    Add it to a handler; it lets every record pass (``grid.is_logging_rank()`` selects ranks). The coordinate is empty
    until there is a grid.

    >>> handler = logging.StreamHandler()
    >>> handler.addFilter(RankFields())
    >>> handler.setFormatter(logging.Formatter("%(asctime)s [rank %(rank)s %(coordinate)s %(host)s] %(message)s"))
    """

    def __init__(self) -> None:
        super().__init__()
        self._host = socket.gethostname()

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields."""
        record.rank = os.environ.get("RANK", "?")
        record.world_size = os.environ.get("WORLD_SIZE", "?")
        record.host = self._host
        record.coordinate = os.environ.get(COORDINATE, "")
        return True
