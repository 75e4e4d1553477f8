"""Find out which rank runs on which host, join the job, and end with its launcher.

``hosts`` and ``placement`` answer before any process exists, with the standard library alone. ``launchers`` reads the
variables of launchers, ``joining`` connects the ranks, in one ``council``, and ``orphans`` ends a rank whose launcher
has ended. ``build_locks`` removes what a killed build of an extension leaves behind.
"""

from ds_topo.launch.launchers import Launch, RankFields, detect_launch, export_coordinates, rank_name

__all__ = ["Launch", "RankFields", "detect_launch", "export_coordinates", "rank_name"]
