"""From whatever started this process to a rank of a job: who it is, whom it meets where, and when it ends.

``ds_topo.init_distributed()`` is built on these and tells DeepSpeed, too; ``ds_topo.launch.joining.join()`` is the same
for torch alone.
"""

from ds_topo.launch.identity import RankFilter, export_coordinates, rank_name
from ds_topo.launch.launchers import Launch, detect_launch

__all__ = ["Launch", "RankFilter", "detect_launch", "export_coordinates", "rank_name"]
