"""Join a job through ds_topo, touch a file, and communicate until killed."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ds_topo.launch.joining import join


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--survive", action="store_true")
    parser.add_argument("--local_rank")
    arguments = parser.parse_args()
    launch = join(timeout=60, backend="gloo", end_with_launcher=not arguments.survive)
    while True:
        dist.all_reduce(torch.ones(1))
        (arguments.folder / f"rank{launch.rank}").touch()
        time.sleep(0.2)


if __name__ == "__main__":
    main()
