"""Find out which rank of which job a process is, join the job, and end with its launcher.

``launchers`` reads the variables of launchers and exports the rank's coordinate, ``joining`` connects the ranks, and
``lifeline`` ends a rank whose launcher has ended. ``ds_topo.init_distributed()`` also initialises DeepSpeed;
``ds_topo.launch.joining.join()`` does the same with torch alone.
"""

from ds_topo.launch.launchers import Launch, RankFilter, detect_launch, export_coordinates, rank_name

__all__ = ["Launch", "RankFilter", "detect_launch", "export_coordinates", "rank_name"]
