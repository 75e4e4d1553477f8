"""Name a rank that dies, stops or fails on every other rank in time, and end the ranks that wait for it.

``first_cause`` lets all ranks know of a rank that fails alone, in every job. ``job_watch`` starts a ``watch`` for a job
that asks for one. "The life of a fault" in the package's README describes both.

``session`` checks that a running cluster is ready for a layout (``ds-topo check``). ``probes`` runs collectives, and
``faults`` draws conclusions from values alone.
"""

from typing import TYPE_CHECKING

from ds_topo.base import lazy_attributes
from ds_topo.health.first_cause import guard, job_watch, watch_limit

if TYPE_CHECKING:
    from ds_topo.health.watch import Watch as Watch

__all__ = ["Watch", "guard", "job_watch", "watch_limit"]
__getattr__, __dir__ = lazy_attributes(__name__, {"Watch": "watch"})
