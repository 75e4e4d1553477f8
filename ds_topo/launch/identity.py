"""Who speaks: the coordinates of a rank in its environment, in logs and profiles. Standard library only."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_topo.topology import ProcessTopology

PREFIX = "DS_TOPO_"
COORDINATE = f"{PREFIX}COORDINATE"
"""All of the coordinate in one variable, ``pipe=1 data=0``; it also says which others are exported."""


def coordinate_variables(topology: ProcessTopology, rank: int) -> dict[str, str]:
    """The coordinate of a rank as variables of the environment; ``model`` is ``tensor``, too.

    >>> from ds_topo import ProcessTopology
    >>> for name, value in coordinate_variables(ProcessTopology.from_spec("pipe=2,tensor=2"), 3).items():
    ...     print(f"{name}={value}")
    DS_TOPO_PIPE=1
    DS_TOPO_MODEL=1
    DS_TOPO_TENSOR=1
    DS_TOPO_COORDINATE=pipe=1 model=1

    Raises:
        TopologyError: a rank out of range.
    """
    coordinate = topology.get_coord(rank)._asdict()
    variables = {f"{PREFIX}{axis.upper()}": str(index) for axis, index in coordinate.items()}
    if "model" in coordinate:
        variables[f"{PREFIX}TENSOR"] = str(coordinate["model"])
    return variables | {COORDINATE: " ".join(f"{axis}={index}" for axis, index in coordinate.items())}


def export_coordinates(topology: ProcessTopology, rank: int) -> Callable[[], None]:
    """Put the coordinate of this rank into its environment, for logs, profiles and child processes.

    Every grid of the whole job does it until its ``destroy()``.

    Returns:
        What takes it back: the variables are then as before, unless somebody has exported others since.
    """
    variables, before = coordinate_variables(topology, rank), _exported()
    _replace(before, variables)

    def take_back() -> None:
        if _exported() == variables:
            _replace(variables, before)

    return take_back


def _exported() -> dict[str, str]:
    """The variables that the environment has of the last export."""
    axes = [part.partition("=")[0].upper() for part in os.environ.get(COORDINATE, "").split()]
    names = [f"{PREFIX}{axis}" for axis in [*axes, *(["TENSOR"] if "MODEL" in axes else [])]]
    return {name: os.environ[name] for name in [*names, COORDINATE] if name in os.environ}


def _replace(old: Mapping[str, str], new: Mapping[str, str]) -> None:
    for name in old:
        os.environ.pop(name, None)
    os.environ.update(new)


def rank_name(separator: str = " ") -> str:
    """Rank, coordinate and host of this process, as far as they are known.

    For file names join them by something else: ``torch.profiler.tensorboard_trace_handler(folder, rank_name("-"))``
    writes ``rank5-pipe=1-data=0-node1.....json``.
    """
    words = [f"rank{os.environ.get('RANK', '?')}", *os.environ.get(COORDINATE, "").split(), socket.gethostname()]
    return separator.join(words)


class RankFilter(logging.Filter):
    """Gives log records the fields ``rank``, ``world_size``, ``host`` and ``coordinate``, for any format.

    Put it on a handler; it lets every record through. The coordinate is empty until there is a grid.

    >>> handler = logging.StreamHandler()
    >>> handler.addFilter(RankFilter())
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
