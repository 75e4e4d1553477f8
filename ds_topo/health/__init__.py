"""Name a rank that dies, stops or fails on every other rank in time, and end the ranks that wait for it.

``first_cause`` lets all ranks know of a rank that fails alone, in every job. Its first failure imports
``blocked_calls``, which ends a call that waits for the failed rank, over the ``connections`` of gloo.

``job_watch`` starts a ``watch`` for a job that asks for one: its judging thread ends gloo's blocked collectives.
``heartbeat`` exchanges beats and findings through the store, and ``witness`` answers for a rank that cannot. Both use
``activity``, which infers what a rank is doing and whether it is stuck after a fault.

``session`` checks that a running cluster is ready for a layout: versions, clocks and topologies must be equal
everywhere, every group must give right results, and no link may be much slower than its neighbors. ``probes`` runs
collectives, and ``faults`` draws conclusions from values alone.
"""

from typing import TYPE_CHECKING

from ds_topo.base import lazy_attributes
from ds_topo.health.first_cause import guard, job_watch, watch_limit

if TYPE_CHECKING:
    from ds_topo.health.watch import Watch as Watch

__all__ = ["Watch", "guard", "job_watch", "watch_limit"]
__getattr__, __dir__ = lazy_attributes(__name__, {"Watch": "watch"})
