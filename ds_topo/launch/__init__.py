"""Find out which rank runs on which host, join the job, and end with its launcher.

``hosts`` and ``placement`` answer before any process exists, with the standard library alone: hostfiles, numbers and
Slurm's variables give a ``HostMap``, and ``Placement`` combines it with a topology. ``launchers`` reads the variables
of launchers and exports the rank's coordinate, ``joining`` connects the ranks, and ``orphans`` ends a rank whose
launcher has ended. ``build_locks`` removes what a killed build of an extension leaves behind.
``ds_topo.init_distributed()`` also initialises DeepSpeed; ``ds_topo.launch.joining.join()`` does the same with torch
alone.
"""

from ds_topo.launch.launchers import Launch, RankFields, detect_launch, export_coordinates, rank_name

__all__ = ["Launch", "RankFields", "detect_launch", "export_coordinates", "rank_name"]
