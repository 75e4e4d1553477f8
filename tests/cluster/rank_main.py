"""Run one rank of ``Cluster.run_ranks``: join the process group, call the function, write the result to a file."""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any


def main(call: Path, end: float) -> None:
    """Call the function that the file names, until the time ``end`` of the machine's monotonic clock."""
    timeout = max(0.1, end - time.monotonic())
    faulthandler.dump_traceback_later(timeout, exit=True)
    import torch
    import torch.distributed as dist

    from tests.support.assertions import show_values_of_asserts

    torch.set_num_threads(1)
    show_values_of_asserts()
    module, name, args = pickle.loads(call.read_bytes())
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    result = function(*args)
    call.with_name(f"result{os.environ['RANK']}").write_bytes(pickle.dumps(result))
    # No rank destroys its process group or the store while another rank still needs them.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
