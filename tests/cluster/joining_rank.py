"""Join a job through ds_topo, and print the rank and the network interface."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist

from ds_topo.launch.joining import join


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--timeout", type=float, default=60.0)
    launch = join(parser.parse_args().timeout, "gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"joined {int(total)} as {launch.rank}, interface {os.environ.get('GLOO_SOCKET_IFNAME')}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
