"""Add and read the options that describe the hosts of a job, shared by several commands."""

from __future__ import annotations

import argparse
import os
import re

from ds_topo.errors import HostError
from ds_topo.hosts.hosts import HostMap, Hosts, check_addresses, read_hostfile
from ds_topo.hosts.slurm import expand_node_list, slurm_map

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)")
"""Matches numbers, which are not names of hosts."""
_FILTERS = ("include", "exclude", "num_nodes", "num_gpus")


def add_host_options(parser: argparse.ArgumentParser) -> None:
    """Add options for a hostfile, a number of hosts, a node list or Slurm, and filters of hosts."""
    group = parser.add_argument_group("hosts (ranks are numbered host by host, one in each slot)")
    group.add_argument("--hostfile", "-H", metavar="FILE", help='deepspeed hostfile with lines "NAME slots=N"')
    group.add_argument("--hosts", metavar="N|NAMES", help='number of hosts, or names such as "n[01-16],gpu-a"')
    group.add_argument("--slots", metavar="M", type=int, help="ranks on each host, with --hosts")
    group.add_argument("--slurm", action="store_true", help="use the hosts of the current Slurm job or step")
    group.add_argument("--include", "-i", metavar="FILTER", help='use only these, "NAME[:SLOT,SLOT]@NAME..."')
    group.add_argument("--exclude", "-e", metavar="FILTER", help="use all but these")
    group.add_argument("--num-nodes", "--num_nodes", metavar="N", type=int, help="use only the first N hosts")
    group.add_argument(
        "--num-gpus", "--num_gpus", metavar="N", type=int, help="use only the first N slots of each host"
    )
    group.add_argument("--resolve", action="store_true", help="resolve every name; fail if one has no address")


def option_of(name: str) -> str:
    """Return the spelling of an option on the command line.

    >>> option_of("micro_batch")
    '--micro-batch'
    """
    return "--" + name.replace("_", "-")


def given_options(arguments: argparse.Namespace, *names: str) -> list[str]:
    """Return the spelling of those of the named options that the user gave."""
    return [option_of(name) for name in names if getattr(arguments, name) is not None]


def host_map_of(arguments: argparse.Namespace) -> HostMap | None:
    """Return the host of every rank according to the options, or None if no hosts are given.

    Raises:
        HostError: options contradict each other, or the hosts cannot be used.
    """
    given = [f"--{name}" for name in ("hostfile", "hosts", "slurm") if getattr(arguments, name)]
    filters = given_options(arguments, *_FILTERS)
    if len(given) > 1:
        raise HostError(f"{given[0]} and {given[1]} both say which hosts there are: give one of them")
    if not given:
        extra = filters + given_options(arguments, "slots") + (["--resolve"] if arguments.resolve else [])
        if extra:
            raise HostError(f"{extra[0]} needs hosts: give --hostfile FILE, --hosts N --slots M, or --slurm")
        return None
    if arguments.slots is not None and not arguments.hosts:
        raise HostError(f"--slots goes with --hosts only: {given[0]} gives the number of slots itself")
    if arguments.slurm:
        if filters:
            raise HostError(f"{filters[0]} does not go with --slurm: choose nodes with srun's own options")
        host_map = slurm_map(os.environ)
    else:
        host_map = HostMap.block(_filtered(_named_hosts(arguments), arguments))
    if arguments.resolve:
        check_addresses(host_map.hosts.names)
    return host_map


def _named_hosts(arguments: argparse.Namespace) -> Hosts:
    if arguments.hostfile:
        return read_hostfile(arguments.hostfile)
    if arguments.slots is None:
        raise HostError(f"--hosts {arguments.hosts} needs --slots M, the number of ranks on each host")
    if arguments.hosts.isdecimal():
        return Hosts.uniform(int(arguments.hosts), arguments.slots)
    if _NUMBER.fullmatch(arguments.hosts.strip()):
        raise HostError(f"--hosts {arguments.hosts}: give a whole number from 1 on, or names of hosts")
    return Hosts.named(expand_node_list(arguments.hosts), arguments.slots)


def _filtered(hosts: Hosts, arguments: argparse.Namespace) -> Hosts:
    by_name = given_options(arguments, "include", "exclude")
    by_number = given_options(arguments, "num_nodes", "num_gpus")
    if len(by_name) == 2:
        raise HostError("--include and --exclude both filter hosts: give one of them")
    if by_name and by_number:
        raise HostError("--num-nodes and --num-gpus do not go with --include or --exclude: give one kind of filter")
    if arguments.include is not None:
        return hosts.including(arguments.include)
    if arguments.exclude is not None:
        return hosts.excluding(arguments.exclude)
    return hosts.first(arguments.num_nodes, arguments.num_gpus) if by_number else hosts
