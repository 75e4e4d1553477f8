"""Who speaks: the coordinates of a rank in its environment, in logs and profiles. Standard library only."""

from __future__ import annotations

import logging
import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_topo.topology import ProcessTopology

PREFIX = "DS_TOPO_"


def coordinate_variables(topology: ProcessTopology, rank: int) -> dict[str, str]:
    """The coordinate of a rank as variables of the environment; ``model`` is ``tensor``, too.

    >>> from ds_topo import ProcessTopology
    >>> coordinate_variables(ProcessTopology.from_spec("pipe=2,data=2,tensor=2"), 5)
    {'DS_TOPO_PIPE': '1', 'DS_TOPO_DATA': '0', 'DS_TOPO_MODEL': '1', 'DS_TOPO_TENSOR': '1'}

    Raises:
        TopologyError: a rank out of range.
    """
    coordinate = topology.get_coord(rank)
    variables = {f"{PREFIX}{axis.upper()}": str(index) for axis, index in coordinate._asdict().items()}
    if "model" in topology.axes:
        variables[f"{PREFIX}TENSOR"] = variables[f"{PREFIX}MODEL"]
    return variables


def export_coordinates(topology: ProcessTopology, rank: int) -> dict[str, str]:
    """Put the coordinate of this rank into its environment, for child processes, logs and profiles; return it.

    Variables of axes that an earlier topology had are removed.
    """
    variables = coordinate_variables(topology, rank)
    for name in _exported.variables:
        os.environ.pop(name, None)
    os.environ.update(variables)
    _exported.variables = variables
    _exported.coordinate = " ".join(f"{axis}={index}" for axis, index in topology.get_coord(rank)._asdict().items())
    return variables


class _Exported:
    """What ``export_coordinates`` was last told; its only writer."""

    def __init__(self) -> None:
        self.variables: dict[str, str] = {}
        self.coordinate = ""


_exported = _Exported()


def rank_name(separator: str = " ") -> str:
    """Rank, coordinate and host of this process, as far as they are known.

    For file names join them by something else: ``torch.profiler.tensorboard_trace_handler(folder, rank_name("-"))``
    writes ``rank5-pipe=1-data=0-node1.....json``.
    """
    words = [f"rank{os.environ.get('RANK', '?')}", *_exported.coordinate.split(), socket.gethostname()]
    return separator.join(words)


class RankFilter(logging.Filter):
    """Gives log records the fields ``rank``, ``world_size``, ``host`` and ``coordinate``, for any format.

    Put it on a handler; it lets every record through. The coordinate is empty until ``export_coordinates`` knows it.

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
        record.coordinate = _exported.coordinate
        return True
