"""Make jobs and layouts for tests."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from ds_topo.plan.hardware import Speeds, accelerator_of, cluster_of
from ds_topo.plan.job import BF16, DEEPSPEED, Job, JobLayout, Precision, Software, layout_problem
from ds_topo.plan.model import transformer
from ds_topo.plan.search import Wanted, orders, possible_degrees, schedules, zero_stages
from ds_topo.topology.axes import DATA, SHARD
from ds_topo.topology.process_topology import ProcessTopology

SPEEDS = Speeds(
    "RTX",
    product_flops={"fp32": 4e13, "bf16": 1.5e14, "fp16": 1.5e14},
    depth=64,
    attention_flops=(8e13, 6e13),
    memory_bandwidth=9e11,
    launch_seconds=1e-5,
    update_bytes=30.0,
    memory_bytes=24e9,
)
"""Speeds such as ``plan --calibrate`` measures."""


def job(
    *,
    hosts: int = 2,
    slots: int = 4,
    batch: int = 16,
    precision: Precision = BF16,
    software: Software = DEEPSPEED,
    accelerator: str = "A100",
    **model: Any,
) -> Job:
    """Return a job of a small GPT on a small cluster, with changes."""
    shape = {"layers": 8, "hidden": 512, "heads": 8, "vocabulary": 1024, "sequence": 256} | model
    cluster = cluster_of(accelerator_of(accelerator), hosts, slots)
    return Job(transformer(**shape), cluster, batch, shape["sequence"], precision, software)


def every_layout(job: Job, wanted: Wanted | None = None) -> list[JobLayout]:
    """Return all layouts that a search may visit, in every order of their axes."""
    wanted = wanted or Wanted()
    return [
        candidate
        for degrees in possible_degrees(job, wanted, Counter())
        for layout in schedules(job, degrees, wanted)
        for zero in zero_stages(job, layout, wanted)
        for whole in (layout.topology, *sharded(job, layout, zero))
        for topology in orders(whole)
        if layout_problem(job, candidate := replace(layout, topology=topology, zero=zero)) is None
    ]


def sharded(job: Job, layout: JobLayout, zero: int) -> list[ProcessTopology]:
    """Return the topologies that partition over a part of the replicas, which fits into a host."""
    degrees = dict(zip(layout.topology.axes, layout.topology.dims, strict=True))
    data, others = degrees.pop(DATA, 1), list(degrees)
    sizes = [
        size for size in range(2, data) if data % size == 0 and size * layout.seq * layout.model <= job.cluster.slots
    ]
    if not zero or not job.software.shards or job.model.expert_count or job.cluster.hosts == 1:
        return []
    return [ProcessTopology([*others, DATA, SHARD], [*degrees.values(), data // size, size]) for size in sizes]


@st.composite
def jobs_and_layouts(draw: st.DrawFn, software: Software = DEEPSPEED) -> tuple[Job, JobLayout]:
    """Draw any layout of a job on 1 to 4 hosts."""
    hosts, slots = draw(st.sampled_from([(1, 4), (2, 2), (2, 4), (4, 2), (3, 2)]))
    experts = draw(st.sampled_from([0, 0, 4]))
    made = job(
        hosts=hosts,
        slots=slots,
        batch=draw(st.sampled_from([12, 24])),
        layers=draw(st.sampled_from([4, 7])),
        experts=experts,
        top_k=min(2, experts),
        software=software,
    )
    degrees = draw(st.sampled_from(list(possible_degrees(made, Wanted(), Counter()))))
    layout = draw(st.sampled_from(list(schedules(made, degrees, Wanted()))))
    zero = draw(st.sampled_from(zero_stages(made, layout, Wanted())))
    whole = draw(st.sampled_from([layout.topology, *sharded(made, layout, zero)]))
    layout = replace(layout, topology=draw(st.sampled_from(list(orders(whole)))), zero=zero)
    assume(layout_problem(made, layout) is None)
    return made, layout
