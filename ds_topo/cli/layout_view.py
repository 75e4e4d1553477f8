"""A layout as the commands show it: a topology, the user's own names of its axes, and its hosts if they are known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ds_topo.errors import TopologyError, UnknownAxisError
from ds_topo.placement.hosts import HostMap
from ds_topo.placement.placement import Placement, fit, group_axes
from ds_topo.topology import ProcessTopology
from ds_topo.topology.axes import axis_in_spec, check_meanings
from ds_topo.topology.rank_tables import model_parallel_axes
from ds_topo.topology.spec import EXTRA_MARK, read_config

ROW = 8
"""Ranks in a row where hosts are not known."""


@dataclass(frozen=True)
class LayoutView:
    """What ``show`` shows.

    Args:
        topology: as given.
        names: the user's own name of each axis: ``tensor`` where it says ``tensor``.
        host_map: the hosts, if they are known.
    """

    topology: ProcessTopology
    names: dict[str, str]
    host_map: HostMap | None

    @classmethod
    def of(cls, text: str, host_map: HostMap | None) -> LayoutView:
        """The layout of a spec, or of a DeepSpeed config (``*.json``) with a ``"topology"`` section.

        Raises:
            TopologyError: malformed, not for these hosts, or with an axis that training would not know.
        """
        spec = read_config(text) if text.endswith(".json") else text
        if host_map is not None:
            topology = fit(spec, host_map)
        else:
            try:
                topology = ProcessTopology.from_spec(spec)
            except TopologyError as error:
                if "needs world_size=" not in str(error):
                    raise
                raise TopologyError(
                    f"{text}: one degree is -1, what is left of the slots: give --hostfile FILE, "
                    "--hosts N --slots M, or --slurm"
                ) from None
        check_meanings(topology.axes, topology.extra_axes)
        given = (
            (part.partition("=")[0].strip() for part in spec.split(",")) if isinstance(spec, str) else list(dict(spec))
        )
        unmarked = (name.removeprefix(EXTRA_MARK).strip() for name in given)
        return cls(topology, {axis_in_spec(name): name for name in unmarked}, host_map)

    @property
    def spec(self) -> str:
        """The spec with the user's names."""
        if not self.topology.layout.is_row_major:
            return self.topology.spec
        sizes = zip(self.topology.axes, self.topology.dims, strict=True)
        extra = self.topology.extra_axes
        return ",".join(f"{EXTRA_MARK if axis in extra else ''}{self.names[axis]}={size}" for axis, size in sizes)

    @property
    def axis_names(self) -> list[str]:
        """The user's names of all axes, in order."""
        return [self.names[axis] for axis in self.topology.axes]

    @property
    def placement(self) -> Placement | None:
        """With hosts, if they are known."""
        return None if self.host_map is None else Placement(self.topology, self.host_map)

    @property
    def rows(self) -> list[tuple[str, Sequence[int]]]:
        """Name and ranks of every host; of every eight ranks where hosts are not known."""
        if self.host_map is not None:
            return list(zip(self.host_map.hosts.names, self.host_map.ranks_on_hosts, strict=True))
        world = self.topology.world_size()
        chunks = [range(first, min(first + ROW, world)) for first in range(0, world, ROW)]
        return [(f"{chunk[0]}-{chunk[-1]}" if len(chunk) > 1 else f"{chunk[0]}", chunk) for chunk in chunks]

    @property
    def stages(self) -> list[int]:
        """The pipeline stage of every rank; its index along the outermost axis where there is no pipeline."""
        axes = self.topology.axes
        axis = axes.index("pipe") if "pipe" in axes else 0
        return [self.topology.layout.index_of(rank, axis) for rank in range(self.topology.world_size())]

    @property
    def stage_axis(self) -> str:
        """The user's name of the axis that ``stages`` are of."""
        return self.names["pipe" if "pipe" in self.topology.axes else self.topology.axes[0]]

    def axis_to_draw(self, name: str | None) -> str:
        """The axis whose links a picture shows: the named one, or the first whose groups cross hosts.

        Raises:
            UnknownAxisError: an axis that is not in the topology.
        """
        if name is not None:
            axis = axis_in_spec(name)
            if axis not in self.topology.axes:
                raise UnknownAxisError(f"axis {name!r} is not in the topology {self.spec!r}: {self.axis_names}")
            return axis
        wide = [axis for axis, size in zip(self.topology.axes, self.topology.dims, strict=True) if size > 1]
        placement = self.placement
        if placement is not None:
            wide = [axis for axis in wide if placement.span(axis).crossing_groups] or wide
        return wide[0] if wide else self.topology.axes[0]

    def coordinate(self, rank: int) -> str:
        """``1,0,3``."""
        return ",".join(map(str, self.topology.layout.coordinate_of(rank)))

    def named_coordinate(self, rank: int) -> str:
        """``pipe=1, data=0, tensor=3``."""
        indices = self.topology.layout.coordinate_of(rank)
        return ", ".join(f"{name}={index}" for name, index in zip(self.axis_names, indices, strict=True))

    def group_names(self) -> list[tuple[tuple[str, ...], str]]:
        """The axes of each kind of group that training creates, and what to call it.

        Where the user calls tensor parallelism ``tensor``, the group over it and ``pipe`` is ``model``.
        """
        return [(axes, self._group_name(axes)) for axes in group_axes(self.topology)]

    def _group_name(self, axes: tuple[str, ...]) -> str:
        if len(axes) > 1 and axes == model_parallel_axes(self.topology) and "model" not in self.names.values():
            return "model"
        return self.label(axes)

    def label(self, axes: Iterable[str]) -> str:
        """Axes by the user's names, ``pipe x tensor``."""
        return " x ".join(self.names[axis] for axis in axes)


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "host"), counted(2048, "host")
    ('1 host', '2,048 hosts')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
