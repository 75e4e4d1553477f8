"""Ranks that ``mpirun`` started: Open MPI, MPICH and Intel MPI (hydra), MVAPICH2."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from ds_topo.errors import LaunchError


@dataclass(frozen=True)
class MpiVariables:
    """The variables in which an MPI launcher says who a rank is; ``srun --mpi=pmi2`` sets none of the local ones."""

    launcher: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


MPI_LAUNCHERS = (
    MpiVariables(
        "mpirun (Open MPI)",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    MpiVariables(
        "mpirun (MVAPICH2)",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    MpiVariables("mpiexec (hydra)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def mpi_master(environ: Mapping[str, str], rank: int, world_size: int, local_world_size: int) -> str:
    """The address of rank 0, which MPI's variables do not say.

    On one host that is this one. On several, rank 0 tells the others through MPI where mpi4py is installed (as
    DeepSpeed does); else it is where Open MPI's ``mpirun`` runs, which rank 0 checks.

    Raises:
        LaunchError: it cannot be found out; the message says how to give it.
    """
    if world_size == local_world_size:
        return "127.0.0.1"
    address = _told_by_rank_0(rank)
    if address is not None:
        return address
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


def _told_by_rank_0(rank: int) -> str | None:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # not installed, or without an MPI library
        return None
    mine = socket.gethostbyname(socket.gethostname()) if rank == 0 else None
    return str(MPI.COMM_WORLD.bcast(mine, root=0))


def _address_of_mpirun(environ: Mapping[str, str]) -> str | None:
    """The first address in Open MPI 4's ``1212612608.0;tcp://10.77.0.1,10.1.0.1:35055``.

    >>> _address_of_mpirun({"OMPI_MCA_orte_hnp_uri": "1212612608.0;tcp://10.77.0.1,10.1.0.1:35055"})
    '10.77.0.1'
    """
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "").partition("tcp://")[2]
    return uri.rpartition(":")[0].split(",")[0] or None


def is_own_address(address: str) -> bool:
    """Whether this host has an address."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
