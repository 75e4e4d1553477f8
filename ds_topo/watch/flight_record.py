"""What torch's flight recorder knows when a fault has happened: the last collectives of this rank, in a file.

The recorder is on by default (``TORCH_FR_BUFFER_SIZE=2000``; 0 is off). For NCCL torch writes such files itself.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ds_topo.process_groups.torch_names import flight_record

_PLACE = "TORCH_FR_DUMP_TEMP_FILE"


def save_flight_record(rank: int) -> Path | None:
    """Write this rank's record; None where there is none, or it cannot be written.

    To where ``TORCH_FR_DUMP_TEMP_FILE`` says, followed by the rank, as torch does; by default to
    ``/tmp/comm_lib_trace_rank_0``, on each host. ``torchfrtrace -p comm_lib_trace_rank_ FOLDER`` compares the records
    of all ranks, once they are in one folder.
    """
    record = flight_record()
    if not record:
        return None
    path = Path(f"{os.environ.get(_PLACE) or Path(tempfile.gettempdir(), 'comm_lib_trace_rank_')}{rank}")
    try:
        path.write_bytes(record)
    except OSError:  # a full disk, say: no reason to hide the fault behind it
        return None
    return path
