"""Options that say which hosts a job has, for every command that needs to know."""

from __future__ import annotations

import argparse
import os
import re

from ds_topo.errors import HostError
from ds_topo.placement.hostfile import read_hostfile
from ds_topo.placement.hosts import HostMap, Hosts
from ds_topo.placement.node_list import expand_node_list
from ds_topo.placement.resolve import resolve_all
from ds_topo.placement.slurm import slurm_map

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)")
"""What is a number to a person, and no name of a host."""


def add_host_options(parser: argparse.ArgumentParser) -> None:
    """Hostfile, numbers, node list or Slurm, and what to leave out."""
    group = parser.add_argument_group("hosts (ranks are numbered host by host, one in each slot)")
    group.add_argument("--hostfile", "-H", metavar="FILE", help='the deepspeed launcher\'s: lines "NAME slots=N"')
    group.add_argument("--hosts", metavar="N|NAMES", help='a number, or names such as "n[01-16],gpu-a"')
    group.add_argument("--slots", metavar="M", type=int, help="ranks on each host, with --hosts")
    group.add_argument("--slurm", action="store_true", help="those of the Slurm job or step that this runs in")
    group.add_argument("--include", "-i", metavar="FILTER", help='only these, "NAME[:SLOT,SLOT]@NAME..."')
    group.add_argument("--exclude", "-e", metavar="FILTER", help="all but these")
    group.add_argument("--num-nodes", "--num_nodes", metavar="N", type=int, help="only the first N hosts")
    group.add_argument("--num-gpus", "--num_gpus", metavar="N", type=int, help="only the first N slots of each host")
    group.add_argument("--resolve", action="store_true", help="look every name up and fail where one has no address")


def host_map_of(arguments: argparse.Namespace) -> HostMap | None:
    """Which host every rank has, by the options; None without any.

    Raises:
        HostError: options that contradict each other, or hosts that cannot be used.
    """
    given = [name for name in ("hostfile", "hosts", "slurm") if getattr(arguments, name)]
    filters = [name for name in ("include", "exclude", "num_nodes", "num_gpus") if getattr(arguments, name) is not None]
    if len(given) > 1:
        raise HostError(f"--{given[0]} and --{given[1]} both say which hosts there are: give one of them")
    if not given:
        extra = [
            *filters,
            *(["slots"] if arguments.slots is not None else []),
            *(["resolve"] if arguments.resolve else []),
        ]
        if extra:
            option = extra[0].replace("_", "-")
            raise HostError(f"--{option} needs hosts: give --hostfile FILE, --hosts N --slots M, or --slurm")
        return None
    if arguments.slots is not None and not arguments.hosts:
        raise HostError(f"--slots goes with --hosts; --{given[0]} says itself how many slots there are")
    if arguments.slurm:
        if filters:
            raise HostError(
                f"--{filters[0].replace('_', '-')} does not go with --slurm: srun's own options choose nodes"
            )
        host_map = slurm_map(os.environ)
    else:
        host_map = HostMap.block(_filtered(_named_hosts(arguments), arguments))
    if arguments.resolve:
        resolve_all(host_map.hosts.names)
    return host_map


def _named_hosts(arguments: argparse.Namespace) -> Hosts:
    if arguments.hostfile:
        return read_hostfile(arguments.hostfile)
    if arguments.slots is None:
        raise HostError(f"--hosts {arguments.hosts} needs --slots M: how many ranks each host has")
    if arguments.hosts.isdecimal():
        return Hosts.uniform(int(arguments.hosts), arguments.slots)
    if _NUMBER.fullmatch(arguments.hosts.strip()):
        raise HostError(f"--hosts {arguments.hosts}: give a whole number from 1 on, or names of hosts")
    return Hosts.named(expand_node_list(arguments.hosts), arguments.slots)


def _filtered(hosts: Hosts, arguments: argparse.Namespace) -> Hosts:
    by_name = arguments.include is not None or arguments.exclude is not None
    by_number = arguments.num_nodes is not None or arguments.num_gpus is not None
    if arguments.include is not None and arguments.exclude is not None:
        raise HostError("--include and --exclude both choose hosts: give one of them")
    if by_name and by_number:
        raise HostError("--num-nodes and --num-gpus do not go with --include or --exclude")
    if arguments.include is not None:
        return hosts.including(arguments.include)
    if arguments.exclude is not None:
        return hosts.excluding(arguments.exclude)
    return hosts.first(arguments.num_nodes, arguments.num_gpus) if by_number else hosts
