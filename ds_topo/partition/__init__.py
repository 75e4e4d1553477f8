"""Gradients to the ranks that own them, and what these made of them back to all: ZeRO's two exchanges, over torch.

A flat tensor of a group of ``n`` ranks is cut into regions, each region evenly into ``n`` slices, slice ``i`` of every
region to rank ``i``: :mod:`~ds_topo.partition.layout`. :mod:`~ds_topo.partition.exchange` sums regions to the owners of
their slices, and gathers slices into whole regions.
"""

from ds_topo.partition.exchange import Exchange, Pending, exchange_of
from ds_topo.partition.layout import PartitionLayout, Region

__all__ = ["Exchange", "PartitionLayout", "Pending", "Region", "exchange_of"]
