"""Differentiable collectives over an explicit process group: Megatron's f and g, their duals, and Ulysses' exchange.

``collectives.copy(x, grid.get_group("model"))`` and so on: ``copy``, ``reduce``, ``scatter``, ``gather`` for tensor
parallelism, ``all_gather`` and ``reduce_scatter`` for sequence parallelism, ``all_to_all`` between heads and sequence.
See Note [Dual pairs] in ``pairs.py`` for which one goes where.
"""

from ds_topo.collectives.checks import debug
from ds_topo.collectives.pairs import all_gather, all_to_all, copy, gather, reduce, reduce_scatter, scatter

__all__ = ["all_gather", "all_to_all", "copy", "debug", "gather", "reduce", "reduce_scatter", "scatter"]
