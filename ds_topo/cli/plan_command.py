"""Run ``ds-topo plan``: choose degrees, their order, ZeRO stage and micro-batch, and predict memory and seconds."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from math import inf, prod
from pathlib import Path
from typing import Any

from ds_topo.cli.shared import (
    add_host_options,
    check_ending,
    counted,
    given_options,
    host_map_of,
    option_of,
    refuse_both,
    refuse_without_effect,
    write_file,
)
from ds_topo.errors import TopologyError, WorldSizeError, tell
from ds_topo.plan import hardware
from ds_topo.plan.explain import differences, explain_axes, explain_memory, explain_time, reason
from ds_topo.plan.hardware import GIGA, TERA, Accelerator, Cluster, HostRanks, Machine
from ds_topo.plan.job import AXES, PRECISIONS, SOFTWARE, Job, Recompute
from ds_topo.plan.model import PRESETS, Model, read_model, transformer
from ds_topo.plan.search import Found, Plan, Wanted, fewest_axes_first, orders_of, plan_or_problem, search
from ds_topo.plan.stages import Costs
from ds_topo.topology.axes import EXPERT, MAX_DEGREE, axis_meant, divisors, leaves_out_a_degree, parse_spec
from ds_topo.topology.process_topology import ProcessTopology

SUMMARY = "choose degrees, order, ZeRO stage and micro-batch; predict memory and seconds"
DESCRIPTION = (
    "Choose degrees, their order, ZeRO stage and micro-batch for a model on a cluster, and predict the memory of a "
    "rank and the seconds of a step. It plans for the GPUs that you name, on any machine."
)
EXAMPLES = """examples:
  ds-topo plan --model llama-3-70b --hosts 8 --accelerator H100 --batch 128
  ds-topo plan --layers 32 --hidden 4096 --heads 32 --vocab 50257 \\
               --sequence 2048 --hosts 4 --accelerator A100 --batch 512 \\
               --explain --compare "pipe=4,data=4,model=2" --picture plan.png
  ds-topo plan --layers 4 --hidden 128 --heads 4 --vocab 256 --sequence 128 \\
               --hosts 1 --slots 4 --batch 32 --calibrate \\
               --software deepspeed-pipeline --write ds_config.json
"""
NUMBERS = ("layers", "hidden", "heads", "vocab", "sequence")
"""The numbers that a model by hand needs."""
OTHER_NUMBERS = ("kv_heads", "ffn", "experts", "top_k", "gated")
"""The numbers that it can have beside."""
WHOLE = (*NUMBERS, "kv_heads", "ffn", "batch", "micro_batch", "virtual_stages", "expert_parallel", "top")
"""The options that are whole numbers from 1 on."""
LONG_SEQUENCE = 32_768
"""A maximum of a model that jobs rarely train with, so that --sequence may have been forgotten."""
SHOWN_PLANS = 10
"""The default of --top."""
POSITIVE = ("peak_tflops", "memory_gb", "memory_gbps", "link_inside_gbps", "link_across_gbps")
"""The options that are positive numbers."""
NOT_OF_A_PLAN = ("command", "run", "local_rank", "calibrate", "machine", "json")
"""The arguments that are no options of a plan."""


def add_options(parser: argparse.ArgumentParser) -> None:
    switch = argparse.BooleanOptionalAction
    add = parser.add_argument_group("model: a name, a config file, or numbers by hand").add_argument
    config = "config.json of Hugging Face, or its folder (GPT-2, Llama, Mixtral, Qwen, DeepSeek)"
    add("--model", metavar="NAME|FILE", help=f"{', '.join(PRESETS)}; or a {config}")
    add("--layers", metavar="N", type=int, help="transformer layers")
    add("--hidden", metavar="N", type=int, help="width of the activations between layers")
    add("--heads", metavar="N", type=int, help="attention heads")
    add("--kv-heads", metavar="N", type=int, help="heads of keys and values; default: as many as --heads")
    add("--ffn", metavar="N", type=int, help="width of the feed-forward layer; default: 4 x hidden")
    add("--vocab", metavar="N", type=int, help="size of the vocabulary")
    add("--sequence", metavar="N", type=int, help="positions of a sequence; default: the longest of --model")
    add("--experts", metavar="N", type=int, help="experts in every layer; default: none")
    add("--top-k", metavar="N", type=int, help="experts that a token goes through; needed with --experts")
    gated = "Llama's layers (SwiGLU), or GPT-2's; default: Llama's with fewer --kv-heads, a narrow --ffn or --experts"
    add("--gated", action=switch, default=None, help=gated)
    add_host_options(parser)
    add = parser.add_argument_group("cluster").add_argument
    add("--accelerator", metavar="NAME", help=f"the GPU of every slot: {', '.join(hardware.ACCELERATORS)}")
    peak = "TFLOP/s of matrix products, for an accelerator that is not in the table"
    add("--peak-tflops", metavar="X", type=float, help=peak)
    add("--memory-gb", metavar="X", type=float, help="memory of a device; default: the accelerator's")
    add("--memory-gbps", metavar="X", type=float, help="GB/s of its memory; default: the accelerator's")
    inside = "GB/s and direction between ranks of a host; default: the accelerator's"
    add("--link-inside-gbps", metavar="X", type=float, help=inside)
    across = "GB/s and direction of a rank's share of the network; default: the accelerator's"
    add("--link-across-gbps", metavar="X", type=float, help=across)
    add("--machine", metavar="FILE", help="measurements of --calibrate FILE or of ds-topo check --json FILE")
    add = parser.add_argument_group("job, and decisions that are made already (default: all are tried)").add_argument
    add("--batch", metavar="N", type=int, help="sequences per step, over all ranks; always needed")
    add("--precision", choices=list(PRECISIONS), help="number format; default: bf16")
    programs = ", ".join(SOFTWARE)
    add("--software", metavar="NAME", choices=list(SOFTWARE), help=f"training program: {programs}; default: deepspeed")
    add("--expert-load", metavar="X", type=float, help="rows of the fullest expert over the mean; default: 1")
    add("--topology", metavar="SPEC", help='degrees in their order, such as "pipe=2,data=4,model=2"')
    add("--fix", metavar="SPEC", help='degrees of some axes, in any order, such as "model=4"')
    add("--micro-batch", metavar="N", type=int, help="sequences of a replica that are computed at a time")
    add("--zero", type=int, choices=range(4), help="ZeRO stage")
    add("--recompute", choices=[kind.value for kind in Recompute], help="activations that backward computes again")
    add("--virtual-stages", metavar="N", type=int, help="pipeline stages per rank, with --software megatron")
    add("--sequence-parallel", action=switch, default=None, help="split activations along the sequence")
    add("--expert-parallel", metavar="N", type=int, help="ranks over which the experts of a layer are distributed")
    add = parser.add_argument_group("output").add_argument
    add("--top", metavar="N", type=int, help=f"number of sets of degrees to show; default: {SHOWN_PLANS}")
    add("--explain", action="store_true", default=None, help="explain every term of the best plan's seconds and bytes")
    add("--compare", metavar="SPEC", help="show what another topology loses against the best, and where")
    add("--json", action="store_true", help="print everything as JSON")
    add("--picture", metavar="FILE", help="draw seconds and memory as stacked bars, into FILE.png, .svg or .pdf")
    add("--write", metavar="FILE", help="write the best plan as a DeepSpeed config")
    add = parser.add_argument_group("measurements").add_argument
    calibrate = "measure a GPU of this machine first; save its speeds in FILE, with the links of --machine"
    add("--calibrate", nargs="?", const="", metavar="FILE", help=calibrate)


def run(arguments: argparse.Namespace) -> int:
    """Plan or calibrate."""
    from ds_topo.cli import plan_report

    whole = f"give a number from 1 on, at most {MAX_DEGREE}"
    for names, rule, beyond in ((WHOLE, whole, MAX_DEGREE + 1), (POSITIVE, "give a positive number", inf)):
        for name in names:
            value = getattr(arguments, name)
            if value is not None and not 0 < value < beyond:
                raise TopologyError(f"{option_of(name)} {value}: {rule}")
    planning = given_options(arguments, *(name for name in vars(arguments) if name not in NOT_OF_A_PLAN))
    check_ending("--picture", arguments.picture, (".png", ".svg", ".pdf"))
    machine = hardware.read_machine(arguments.machine) if arguments.machine else None
    if arguments.calibrate is not None:
        machine = _calibrated(arguments.calibrate, machine)
        if not planning:
            if not arguments.calibrate:
                print(json.dumps(asdict(machine), indent=1))
            return 0
    job = job_of(arguments, machine)
    wanted = wanted_of(arguments, job)
    topology = _topology("compare", arguments.compare, job) if arguments.compare else None
    if arguments.sequence is None and job.sequence > LONG_SEQUENCE:
        longest = f"planned for {job.sequence:,} positions, the most of {job.model.name}"
        tell(f"ds-topo plan: {longest}. If yours are shorter, give --sequence, such as --sequence 8192")
    found = fewest_axes_first(search(job, wanted, arguments.top or SHOWN_PLANS))
    compared = plan_or_problem(job, replace(wanted, topology=topology, degrees=())) if topology is not None else None
    if arguments.picture:
        plan_report.save_picture(found, arguments.picture)
    if arguments.write:
        config = json.dumps(plan_report.deepspeed_config(job, found.best), indent=2)
        write_file("--write", arguments.write, config)
    if arguments.json:
        print(json.dumps(found_as_json(found, compared, arguments.compare)))
    else:
        plan_report.print_found(found, compared, arguments.compare, explained=bool(arguments.explain))
        if arguments.write:
            plan_report.print_config(job, found.best, arguments.write, config)
    return 0


def job_of(arguments: argparse.Namespace, machine: Machine | None) -> Job:
    """Return the job that the options describe."""
    model = _model(arguments)
    cluster = _cluster(arguments, machine)
    if arguments.batch is None:
        raise TopologyError("--batch is missing: give the number of sequences per step, over all ranks")
    precision = PRECISIONS[arguments.precision or "bf16"]
    cluster.accelerator.peak(precision.products)  # raises if it has no such format
    load = 1.0 if arguments.expert_load is None else arguments.expert_load
    if not 1 <= load < inf:
        raise TopologyError(f"--expert-load {load}: the fullest expert has at least the mean: give 1 or more")
    if not model.expert_count:
        refuse_without_effect(given_options(arguments, "expert_load"), "the model has no experts")
    software = SOFTWARE[arguments.software or "deepspeed"]
    return Job(model, cluster, arguments.batch, arguments.sequence or model.sequence, precision, software, load)


def _model(arguments: argparse.Namespace) -> Model:
    if arguments.model:
        by_hand = [name for name in (*NUMBERS, *OTHER_NUMBERS) if name != "sequence"]
        refuse_both(given_options(arguments, "model", *by_hand), "describe the model")
        return read_model(arguments.model)
    missing = [f"--{name}" for name in NUMBERS if getattr(arguments, name) is None]
    if missing:
        raise TopologyError(f"a model is needed: --model NAME or FILE, or its numbers; {' '.join(missing)} missing")
    same = ("layers", "hidden", "heads", "kv_heads", "ffn", "sequence", "gated")
    return transformer(
        vocabulary=arguments.vocab,
        experts=arguments.experts or 0,
        top_k=arguments.top_k or 0,
        **{name: getattr(arguments, name) for name in same},
    )


def _cluster(arguments: argparse.Namespace, machine: Machine | None) -> Cluster:
    """Return hosts, slots, accelerator and links, with measurements in place of a table's values."""
    accelerator = _accelerator(arguments, machine)
    cluster = hardware.cluster_of(accelerator, *_hosts_and_slots(arguments, accelerator, machine))
    if arguments.memory_gb is not None:
        limit = hardware.usable_bytes(arguments.memory_gb * GIGA)
        if limit <= 0:
            raise TopologyError(
                f"--memory-gb {arguments.memory_gb}: {hardware.CONTEXT_BYTES / GIGA:g} GB of it are not available for "
                "tensors; give the whole memory of a device"
            )
        cluster = replace(cluster, memory_limit=limit)
    if machine is not None:
        cluster = replace(cluster, inside=machine.inside or cluster.inside, across=machine.across or cluster.across)
    inside, across = arguments.link_inside_gbps, arguments.link_across_gbps
    if inside:
        cluster = replace(cluster, inside=hardware.Link(inside * GIGA, cluster.inside.latency))
    if across:
        cluster = replace(cluster, across=hardware.Link(across * GIGA * cluster.slots, cluster.across.latency))
    return cluster


def _accelerator(arguments: argparse.Namespace, machine: Machine | None) -> Accelerator:
    if machine is not None and machine.speeds is not None:
        stated = given_options(arguments, "accelerator", "peak_tflops", "memory_gb", "memory_gbps")
        refuse_both([*stated[:1], "measured speeds"], "say what a rank has")
        return machine.speeds.accelerator()
    if arguments.accelerator:
        refuse_both(given_options(arguments, "accelerator", "peak_tflops", "memory_gbps"), "say how fast it is")
        return hardware.accelerator_of(arguments.accelerator)
    if len(given_options(arguments, "peak_tflops", "memory_gb", "memory_gbps")) < 3:
        raise TopologyError(
            f"--accelerator NAME is missing: name the GPU to plan for, one of {', '.join(hardware.ACCELERATORS)}; for "
            "another one give --peak-tflops, --memory-gb and --memory-gbps, for the GPUs of this machine --calibrate"
        )
    peaks = dict.fromkeys(("bf16", "fp16", "fp32"), arguments.peak_tflops * TERA)
    return Accelerator(
        f"accelerator of {arguments.peak_tflops:g} TFLOP/s",
        peaks,
        arguments.memory_gb * GIGA,
        arguments.memory_gbps * GIGA,
        *hardware.UNKNOWN_LINKS,
        hardware.Efficiency(dict.fromkeys(peaks, 0.6), processors=100),
    )


def _hosts_and_slots(
    arguments: argparse.Namespace, accelerator: Accelerator, machine: Machine | None
) -> tuple[int, int]:
    if machine is not None and not (arguments.hosts or arguments.hostfile or arguments.slurm):
        return len(machine.hosts), machine.slots if arguments.slots is None else arguments.slots
    if arguments.hosts and arguments.slots is None:
        arguments.slots = machine.slots if machine else accelerator.slots
    host_map = host_map_of(arguments)
    if host_map is None:
        raise TopologyError("hosts are needed: --hosts N [--slots M], --hostfile FILE, --slurm or --machine FILE")
    counts = set(host_map.hosts.counts)
    if len(counts) > 1:
        raise TopologyError(
            f"hosts have between {min(counts)} and {max(counts)} slots; a plan needs the same number on every host: "
            f"use the first {min(counts)} of each with --num-gpus {min(counts)}, or leave hosts out with --exclude"
        )
    if host_map.host_indices != tuple(sorted(host_map.host_indices)):
        raise TopologyError("ranks are not numbered host by host; a plan needs that: use Slurm's block distribution")
    return len(host_map.hosts), host_map.hosts.counts[0]


def wanted_of(arguments: argparse.Namespace, job: Job) -> Wanted:
    """Return the decisions that the options make."""
    refuse_both(given_options(arguments, "topology", "fix"), "decide degrees")
    return Wanted(
        topology=_topology("topology", arguments.topology, job) if arguments.topology else None,
        degrees=_fixed_degrees(arguments.fix, job) if arguments.fix else (),
        micro_batch=arguments.micro_batch,
        zero=arguments.zero,
        recompute=(Recompute(arguments.recompute),) if arguments.recompute else (),
        virtual_stages=arguments.virtual_stages,
        sequence_parallel=arguments.sequence_parallel,
        expert_parallel=arguments.expert_parallel,
    )


def _fixed_degrees(spec: str, job: Job) -> tuple[tuple[str, int], ...]:
    if leaves_out_a_degree(spec) or ":" in spec:
        raise TopologyError(
            f"--fix {spec!r}: give degrees from 1 on, without strides; those of axes that are not named are searched"
        )
    axes, sizes, *_ = parse_spec(spec)
    _check_axes("fix", spec, axes)
    ranks = job.cluster.ranks
    if ranks % prod(sizes):
        raise TopologyError(
            f"--fix {spec!r}: {prod(sizes)} does not divide the {ranks} ranks ({counted(job.cluster.hosts, 'host')} x "
            f"{counted(job.cluster.slots, 'slot')}); choose degrees whose product is one of {divisors(ranks)}"
        )
    return tuple(zip(axes, sizes, strict=True))


def _topology(option: str, spec: str, job: Job) -> ProcessTopology:
    try:
        topology = ProcessTopology.from_spec(spec, world_size=job.cluster.ranks)
    except WorldSizeError as error:
        some = "; --fix decides the degrees of some axes only" if option == "topology" else ""
        raise WorldSizeError(f"--{option}: {error}{some}") from None
    _check_axes(option, spec, topology.axes)
    return topology


def _check_axes(option: str, spec: str, axes: Sequence[str]) -> None:
    unknown = [axis for axis in axes if axis not in AXES]
    if unknown:
        meant = [meant for axis in unknown if (meant := axis_meant(axis)) in AXES]
        hint = f": did you mean {meant[0]!r}? Choose" if meant else "; choose"
        experts = "; experts are distributed with --expert-parallel N" if EXPERT in map(axis_meant, unknown) else ""
        raise TopologyError(f"--{option} {spec!r}: axes {unknown} cannot be planned{hint} among {list(AXES)}{experts}")


def _calibrated(path: str, links: Machine | None) -> Machine:
    """Measure the GPU of this machine, and write it with the links, if they are known, into the file ``path``."""
    from ds_topo.base.backends import accelerator

    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise TopologyError(
            "--calibrate measures one GPU: start it without a launcher, once; ds-topo check SPEC --json FILE measures "
            "links under a launcher, and --machine FILE reads them"
        )
    if path and not Path(path).absolute().parent.is_dir():
        raise TopologyError(f"--calibrate {path!r}: there is no folder {str(Path(path).parent)!r}")
    if accelerator() is None:
        raise TopologyError(
            "--calibrate measures GPUs, and torch finds none on this machine: name the GPU to plan for with "
            f"--accelerator (one of {', '.join(hardware.ACCELERATORS)}), or calibrate on a machine that has GPUs and "
            "give its file with --machine FILE"
        )
    import torch

    from ds_topo.plan.calibrate import calibrate

    machine = links or Machine([HostRanks(torch.accelerator.device_count())])
    machine = replace(machine, speeds=calibrate())
    if path:
        write_file("--calibrate", path, json.dumps(asdict(machine), indent=1))
    return machine


def found_as_json(found: Found, compared: Plan | str | None, spec: str | None) -> dict[str, Any]:
    """Return all that a search found; ``compared`` is the plan of the topology ``spec``, or why there is none."""
    job, best, tally, costs = found.job, found.best, found.tally, Costs(found.job)
    content: dict[str, Any] = {
        "job": {
            "model": job.model.name,
            "parameters": job.model.parameters,
            "active_parameters": job.model.active_parameters,
            "flops_per_token": job.model.flops_per_token(job.sequence),
            "accelerator": job.cluster.accelerator.name,
            "hosts": job.cluster.hosts,
            "slots": job.cluster.slots,
            "memory_limit": job.cluster.memory_limit,
            "batch": job.batch,
            "sequence": job.sequence,
            "precision": job.precision.name,
            "software": job.software.name,
        },
        "plans": [_plan_as_json(job, plan) for plan in found.plans],
        "reason": reason(found),
        "explained": {
            "seconds": [vars(term) for term in explain_time(costs, best)],
            "bytes": [vars(term) for term in explain_memory(costs, best)],
            "axes": explain_axes(costs, best.layout),
        },
        "orders": [{"topology": plan.layout.topology.spec, "seconds": plan.seconds} for plan in orders_of(job, best)],
        "search": {
            "timed": tally.evaluated,
            "cut": tally.bounded,
            "too_large": tally.too_large,
            "problems": dict(tally.degree_problems + tally.layout_problems),
        },
    }
    if isinstance(compared, str):
        content["compared"] = {"topology": spec, "problem": compared}
    elif compared is not None:
        loses = [vars(term) for term in differences(best, compared)]
        content["compared"] = {**_plan_as_json(job, compared), "loses": loses}
    return content


def _plan_as_json(job: Job, plan: Plan) -> dict[str, Any]:
    layout = plan.layout
    return {
        "topology": layout.topology.spec,
        "micro_batch": layout.micro_batch,
        "micro_batches": layout.micro_batches(job.batch),
        "zero": layout.zero,
        "recompute": layout.recompute.value,
        "virtual_stages": layout.virtual_stages,
        "sequence_parallel": layout.sequence_parallel,
        "expert_parallel": layout.expert_parallel,
        "seconds": plan.seconds,
        "seconds_by_term": plan.time.parts(),
        "tokens_per_second": job.tokens / plan.seconds,
        "mfu": job.mfu(plan.seconds),
        "memory_bytes": plan.memory.total,
        "memory_by_term": plan.memory.parts(),
    }
