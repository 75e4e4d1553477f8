"""``ds-topo plan``: degrees, their order, ZeRO stage and micro-batch, with memory and seconds, before a GPU is used."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import inf, prod
from pathlib import Path
from typing import Any

from ds_topo.cli.host_options import add_host_options, host_map_of
from ds_topo.errors import TopologyError
from ds_topo.planner.accelerators import ACCELERATORS, GIGA, TERA, Accelerator, Efficiency, accelerator_of
from ds_topo.planner.candidates import Wanted
from ds_topo.planner.cluster import CONTEXT_BYTES, USABLE_SHARE, Cluster, Link, cluster_of
from ds_topo.planner.families import read_model
from ds_topo.planner.layout import AXES, Job
from ds_topo.planner.machine import Machine, read_machine
from ds_topo.planner.model import Model, transformer
from ds_topo.planner.precision import PRECISIONS, precision_of
from ds_topo.planner.runs import judge_rows, read_rows
from ds_topo.planner.search import Found, Plan, favourite, search
from ds_topo.planner.software import SOFTWARE, Recompute, software_of
from ds_topo.topology.expert_tables import divisors
from ds_topo.topology.process_topology import ProcessTopology
from ds_topo.topology.spec import leaves_out_a_degree, parse_spec

EXAMPLES = """examples:
  ds-topo plan --config llama-3-70b/config.json --hosts 8 --slots 8 --accelerator H100 --batch 128
  ds-topo plan --layers 32 --hidden 4096 --heads 32 --vocab 50257 --sequence 2048 --hosts 4 --accelerator A100 \\
               --batch 512 --explain --compare "pipe=4,data=4,model=2" --picture plan.png
  ds-topo plan --layers 4 --hidden 128 --heads 4 --vocab 256 --sequence 128 --hosts 1 --slots 4 --batch 32 \\
               --calibrate --write ds_config.json
  ds-topo plan --runs published_runs.json --within 15%
"""
NUMBERS = ("layers", "hidden", "heads", "vocab", "sequence")
"""What a model by hand needs at least."""
OTHER_NUMBERS = ("kv_heads", "ffn", "experts", "top_k", "gated")
"""What it can have beside."""
WHOLE = (
    *("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "sequence"),
    *("batch", "micro_batch", "virtual_stages", "expert_parallel", "top"),
)
"""Options that are whole numbers from 1 on."""
POSITIVE = ("peak_tflops", "memory_gb", "memory_gbps", "link_inside_gbps", "link_across_gbps")
"""Options that are positive numbers."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The options of ``plan``."""
    parser = subparsers.add_parser(
        "plan",
        help="choose degrees, order, ZeRO stage and micro-batch; predict memory and seconds",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model_options(parser.add_argument_group("model: a config file, or numbers by hand"))
    add_host_options(parser)
    _add_cluster_options(parser.add_argument_group("cluster"))
    _add_job_options(parser.add_argument_group("job, and what is decided already"))
    _add_output_options(parser.add_argument_group("output"))
    _add_measurement_options(parser.add_argument_group("against measurements"))
    parser.set_defaults(run=run)


def _add_model_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--config", metavar="FILE", help="config.json of Hugging Face: GPT-2, Llama, Qwen, DeepSeek, ..."
    )
    group.add_argument("--layers", type=int)
    group.add_argument("--hidden", type=int, help="width of the activations between layers")
    group.add_argument("--heads", type=int, help="attention heads")
    group.add_argument("--kv-heads", type=int, help="heads of keys and values; as many as --heads by default")
    group.add_argument("--ffn", type=int, help="width of the feed-forward layer; 4 x hidden by default")
    group.add_argument("--vocab", type=int)
    group.add_argument("--sequence", type=int, help="positions of a sequence; the config's longest by default")
    group.add_argument("--experts", type=int, help="in every layer")
    group.add_argument("--top-k", type=int, help="experts that a token goes through")
    group.add_argument(
        "--gated", action=argparse.BooleanOptionalAction, default=None, help="Llama's layers (SwiGLU), or GPT-2's"
    )


def _add_cluster_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--accelerator", metavar="NAME", help=", ".join(ACCELERATORS))
    group.add_argument("--peak-tflops", type=float, help="of its matrix products, for one that is not in the table")
    group.add_argument("--memory-gb", type=float, help="of a device; limits the table's too")
    group.add_argument("--memory-gbps", type=float, help="GB/s of its memory")
    group.add_argument("--link-inside-gbps", type=float, help="GB/s and direction between ranks of a host")
    group.add_argument("--link-across-gbps", type=float, help="GB/s and direction of a rank's share of the network")
    group.add_argument("--machine", metavar="FILE", help="what --calibrate or `ds-topo check --json FILE` measured")


def _add_job_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--batch", type=int, help="sequences per step, over all ranks")
    group.add_argument("--precision", choices=list(PRECISIONS), help="bf16 by default, fp32 on a CPU")
    group.add_argument("--software", choices=list(SOFTWARE), help="what the program can do; DeepSpeed's by default")
    group.add_argument("--expert-load", type=float, default=1.0, help="rows of the fullest expert over the mean")
    group.add_argument("--topology", metavar="SPEC", help='degrees in their order, such as "pipe=2,data=4,model=2"')
    group.add_argument("--fix", metavar="SPEC", help='degrees of some axes, in any order, such as "model=4"')
    group.add_argument("--micro-batch", type=int)
    group.add_argument("--zero", type=int, choices=range(4))
    group.add_argument("--recompute", choices=[kind.value for kind in Recompute])
    group.add_argument("--virtual-stages", type=int)
    group.add_argument("--sequence-parallel", action=argparse.BooleanOptionalAction, default=None)
    group.add_argument("--expert-parallel", type=int, help="ranks that share out the experts of a layer")


def _add_output_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--top", type=int, default=10, metavar="N", help="sets of degrees to show")
    group.add_argument("--explain", action="store_true", help="every term of the best plan's seconds and bytes")
    group.add_argument("--compare", metavar="SPEC", help="what your favourite loses against the best, and where")
    group.add_argument("--json", action="store_true", help="everything, for programs")
    group.add_argument("--picture", metavar="FILE", help="stacked bars of seconds and of memory; PNG, SVG or PDF")
    group.add_argument("--write", metavar="FILE", help="the best plan as a DeepSpeed config")


def _add_measurement_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--calibrate",
        nargs="?",
        const="",
        metavar="FILE",
        help="measure products and links of this machine first (under a launcher: of all ranks); keep them in FILE",
    )
    group.add_argument("--runs", metavar="FILE", help="judge published runs: predicted beside reported, row by row")
    group.add_argument("--within", default="15%", metavar="SHARE", help="the bound of --runs, for every row")


def run(arguments: argparse.Namespace) -> int:
    """Plan, judge or calibrate; 1 if rows are beyond the bound."""
    _check_numbers(arguments)
    if arguments.runs:
        return _judge(arguments)
    machine = read_machine(arguments.machine) if arguments.machine else None
    if arguments.calibrate is not None:
        machine, is_first = _calibrated(arguments.calibrate)
        if not is_first:
            return 0
        if not (arguments.config or arguments.layers):
            if not arguments.calibrate:
                print(json.dumps(machine.as_json(), indent=1))
            return 0
    job = job_of(arguments, machine)
    wanted = wanted_of(arguments, job)
    favoured = _topology("compare", arguments.compare, job) if arguments.compare else None
    found = search(job, wanted, arguments.top)
    compared = _compared(favoured, job, wanted)
    if arguments.picture:
        from ds_topo.cli.plan_picture import save_picture

        save_picture(found, arguments.picture)
    advice = _written(arguments, found)
    if arguments.json:
        from ds_topo.cli.plan_json import found_as_json

        json.dump(found_as_json(found, compared, arguments.compare), sys.stdout)
        print()
    else:
        from ds_topo.cli.plan_text import print_found

        print_found(found, compared, arguments.compare, explained=arguments.explain, advice=advice)
    return 0


def _check_numbers(arguments: argparse.Namespace) -> None:
    for names, rule, least in ((WHOLE, "give a number from 1 on", 1.0), (POSITIVE, "give a positive number", 0.0)):
        for name in names:
            value = getattr(arguments, name)
            if value is not None and not (least <= value < inf and value):
                raise TopologyError(f"{_option(name)} {value}: {rule}")


def _option(name: str) -> str:
    """How an option is typed.

    >>> _option("micro_batch")
    '--micro-batch'
    """
    return "--" + name.replace("_", "-")


def job_of(arguments: argparse.Namespace, machine: Machine | None = None) -> Job:
    """The job that the options describe.

    Raises:
        TopologyError: options that are missing or contradict each other.
    """
    model = model_of(arguments)
    cluster = cluster_of_arguments(arguments, machine)
    if arguments.batch is None:
        raise TopologyError("--batch is missing: the number of sequences per step, over all ranks")
    on_cpu = cluster.accelerator.transport == "gloo"
    precision = precision_of(arguments.precision or ("fp32" if on_cpu else "bf16"))
    cluster.accelerator.peak(precision.products)
    name = arguments.software or ("deepspeed-pipeline" if arguments.write else "deepspeed")
    sequence = arguments.sequence or model.sequence
    if not 1 <= arguments.expert_load < inf:
        raise TopologyError(f"--expert-load {arguments.expert_load}: the fullest expert has at least the mean, 1")
    return Job(model, cluster, arguments.batch, sequence, precision, software_of(name), arguments.expert_load)


def model_of(arguments: argparse.Namespace) -> Model:
    """From ``--config`` or from numbers by hand."""
    if arguments.config:
        by_hand = [name for name in (*NUMBERS, *OTHER_NUMBERS) if name != "sequence"]
        given = [name for name in by_hand if getattr(arguments, name) is not None]
        if given:
            raise TopologyError(f"--config and {_option(given[0])} both describe the model: give one of them")
        return read_model(arguments.config)
    missing = [f"--{name}" for name in NUMBERS if getattr(arguments, name) is None]
    if missing:
        raise TopologyError(f"a model is needed: --config FILE, or its numbers; {' '.join(missing)} missing")
    return transformer(
        layers=arguments.layers,
        hidden=arguments.hidden,
        heads=arguments.heads,
        kv_heads=arguments.kv_heads,
        ffn=arguments.ffn,
        vocabulary=arguments.vocab,
        sequence=arguments.sequence,
        experts=arguments.experts or 0,
        top_k=arguments.top_k or 0,
        gated=arguments.gated,
    )


def cluster_of_arguments(arguments: argparse.Namespace, machine: Machine | None) -> Cluster:
    """Hosts, slots, accelerator and links, measured ones in place of a table's."""
    accelerator = _accelerator(arguments, machine)
    hosts, slots = _hosts_and_slots(arguments, accelerator, machine)
    limit = None
    if arguments.memory_gb is not None:
        limit = USABLE_SHARE * (arguments.memory_gb * GIGA - CONTEXT_BYTES)
        if limit <= 0:
            raise TopologyError(f"--memory-gb {arguments.memory_gb}: {CONTEXT_BYTES / GIGA:g} GB of it are no tensors'")
    cluster = cluster_of(accelerator, hosts, slots, memory_limit=limit)
    if machine is not None:
        cluster = machine.applied_to(cluster)
    inside, across = arguments.link_inside_gbps, arguments.link_across_gbps
    if inside:
        cluster = replace(cluster, inside=Link(inside * GIGA, cluster.inside.latency))
    if across:
        cluster = replace(cluster, across=Link(across * GIGA * cluster.slots, cluster.across.latency))
    return cluster


def _hosts_and_slots(
    arguments: argparse.Namespace, accelerator: Accelerator, machine: Machine | None
) -> tuple[int, int]:
    """How many hosts, and how many slots each has."""
    if machine is not None and not (arguments.hosts or arguments.hostfile or arguments.slurm):
        return machine.hosts, machine.slots if arguments.slots is None else arguments.slots
    if arguments.hosts and arguments.slots is None:
        arguments = argparse.Namespace(**{**vars(arguments), "slots": machine.slots if machine else accelerator.slots})
    host_map = host_map_of(arguments)
    if host_map is None:
        raise TopologyError("hosts are needed: --hosts N [--slots M], --hostfile FILE, --slurm or --machine FILE")
    counts = set(host_map.hosts.counts)
    if len(counts) > 1:
        raise TopologyError(
            f"hosts have between {min(counts)} and {max(counts)} slots; a plan needs as many on each: use the first "
            f"{min(counts)} of each with --num-gpus {min(counts)}, or leave hosts out with --exclude"
        )
    if host_map.host_indices != tuple(sorted(host_map.host_indices)):
        raise TopologyError("ranks are not numbered host by host; a plan needs that: use Slurm's block distribution")
    return len(host_map.hosts), host_map.hosts.counts[0]


def wanted_of(arguments: argparse.Namespace, job: Job) -> Wanted:
    """What the options have decided already."""
    if arguments.topology and arguments.fix:
        raise TopologyError("--topology and --fix both decide degrees: give one of them")
    topology = _topology("topology", arguments.topology, job) if arguments.topology else None
    degrees = _fixed_degrees(arguments.fix, job) if arguments.fix else ()
    return Wanted(
        topology=topology,
        degrees=degrees,
        micro_batch=arguments.micro_batch,
        zero=arguments.zero,
        recompute=(Recompute(arguments.recompute),) if arguments.recompute else (),
        virtual_stages=arguments.virtual_stages,
        sequence_parallel=arguments.sequence_parallel,
        expert_parallel=arguments.expert_parallel,
    )


def _fixed_degrees(spec: str, job: Job) -> tuple[tuple[str, int], ...]:
    if leaves_out_a_degree(spec):
        raise TopologyError(f"--fix {spec!r}: give degrees from 1 on; those of axes that are not named are searched")
    axes, sizes, _ = parse_spec(spec)
    degrees = tuple(zip(axes, sizes, strict=True))
    _check_axes("fix", spec, axes)
    ranks = job.cluster.ranks
    if ranks % prod(sizes):
        raise TopologyError(
            f"--fix {spec!r}: {prod(sizes)} does not divide the {ranks} ranks ({job.cluster.hosts} hosts x "
            f"{job.cluster.slots} slots); choose degrees whose product is one of {divisors(ranks)}"
        )
    return degrees


def share_of(text: str) -> float:
    """A share as ``15%`` or ``0.15``.

    >>> share_of("15%"), share_of("0.07")
    (0.15, 0.07)

    Raises:
        TopologyError: neither, or not positive.
    """
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not share > 0:
        raise TopologyError(f"--within {text!r}: give a positive share such as 15% or 0.15")
    return share


def _topology(option: str, spec: str, job: Job) -> ProcessTopology:
    topology = ProcessTopology.from_spec(spec, world_size=job.cluster.ranks)
    _check_axes(option, spec, topology.axes)
    return topology


def _check_axes(option: str, spec: str, axes: Sequence[str]) -> None:
    unknown = [axis for axis in axes if axis not in AXES]
    if unknown:
        raise TopologyError(f"--{option} {spec!r}: axes {unknown} cannot be planned; choose among {list(AXES)}")


def _accelerator(arguments: argparse.Namespace, machine: Machine | None) -> Accelerator:
    if machine is not None and machine.speeds is not None:
        told = ("accelerator", "peak_tflops", "memory_gb", "memory_gbps")
        given = [name for name in told if getattr(arguments, name) is not None]
        if given:
            raise TopologyError(f"{_option(given[0])} and measured speeds both say what a rank has: give one of them")
        return machine.speeds.accelerator()
    if arguments.accelerator:
        given = [name for name in ("peak_tflops", "memory_gbps") if getattr(arguments, name) is not None]
        if given:
            raise TopologyError(f"--accelerator and {_option(given[0])} both say how fast it is: give one of them")
        return accelerator_of(arguments.accelerator)
    if None in (arguments.peak_tflops, arguments.memory_gb, arguments.memory_gbps):
        raise TopologyError(
            f"--accelerator NAME is missing (one of {', '.join(ACCELERATORS)}); for another one give --peak-tflops, "
            "--memory-gb and --memory-gbps, for the machine at hand --calibrate"
        )
    peaks = dict.fromkeys(("bf16", "fp16", "fp32"), arguments.peak_tflops * TERA)
    return Accelerator(
        f"accelerator of {arguments.peak_tflops:g} TFLOP/s",
        peaks,
        arguments.memory_gb * GIGA,
        arguments.memory_gbps * GIGA,
        (arguments.link_inside_gbps or 25.0) * GIGA,
        (arguments.link_across_gbps or 12.5) * GIGA,
        Efficiency(dict.fromkeys(peaks, 0.6), processors=100),
    )


def _compared(topology: ProcessTopology | None, job: Job, wanted: Wanted) -> Plan | str | None:
    """The best that can be made of the user's favourite, or why nothing can."""
    return None if topology is None else favourite(job, replace(wanted, topology=topology, degrees=()))


def _written(arguments: argparse.Namespace, found: Found) -> str | None:
    """Write the config; return what to do with it."""
    if not arguments.write:
        return None
    from ds_topo.planner.config_writer import deepspeed_config, how_to_train

    config = deepspeed_config(found.job, found.best)
    try:
        Path(arguments.write).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise TopologyError(f"--write {arguments.write!r} cannot be written: {error}") from error
    return how_to_train(found.job, found.best, arguments.write)


def _calibrated(path: str) -> tuple[Machine, bool]:
    """Measure this machine, with all ranks of a launcher; whether this is the rank that goes on."""
    import os

    from ds_topo.measurement.calibrate import calibrate

    is_first = True
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        import torch
        import torch.distributed as dist

        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        is_first = dist.get_rank() == 0
        machine = calibrate()
        dist.destroy_process_group()
    else:
        machine = calibrate()
    if path and is_first:
        try:
            Path(path).write_text(json.dumps(machine.as_json(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise TopologyError(f"--calibrate {path!r} cannot be written: {error}") from error
    return machine, is_first


def _judge(arguments: argparse.Namespace) -> int:
    """Published runs: a table or JSON; 1 if a row is beyond the bound or does not fit."""
    judgement = judge_rows(read_rows(arguments.runs), share_of(arguments.within))
    if arguments.json:
        content: dict[str, Any] = {
            "within": judgement.within,
            "median_error": judgement.median_error,
            "beyond": [verdict.row.number for verdict in judgement.beyond],
            "rows": [verdict.as_json() for verdict in judgement.verdicts],
        }
        json.dump(content, sys.stdout)
        print()
    else:
        from ds_topo.cli.plan_text import print_judgement

        print_judgement(judgement)
    return 1 if judgement.beyond else 0
