"""Join a job through ds_topo, and print the rank and the network interface, or communicate until killed."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ds_topo.launch.joining import join


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--until-killed", type=Path, help="a folder in which each rank touches a file")
    parser.add_argument("--local_rank")
    arguments = parser.parse_args()
    launch = join(arguments.timeout, "gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    while arguments.until_killed:
        dist.all_reduce(torch.ones(1))
        (arguments.until_killed / f"rank{launch.rank}").touch()
        time.sleep(0.2)
    print(f"joined {int(total)} as {launch.rank}, interface {os.environ.get('GLOO_SOCKET_IFNAME')}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
