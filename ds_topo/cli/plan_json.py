"""Plans as JSON; seconds and bytes."""

from __future__ import annotations

from typing import Any

from ds_topo.planner.costs import Costs
from ds_topo.planner.explain import differences, explain_axes, explain_memory, explain_time, reason
from ds_topo.planner.layout import Job
from ds_topo.planner.search import Found, Plan, orders_of


def found_as_json(found: Found, compared: Plan | str | None, favourite: str | None = None) -> dict[str, Any]:
    """Everything that a search found; ``compared`` is the plan of a ``favourite``, or why there is none."""
    job, tally = found.job, found.tally
    costs = Costs(job)
    content: dict[str, Any] = {
        "job": _job_as_json(job),
        "plans": [plan_as_json(job, plan) for plan in found.plans],
        "reason": reason(found),
        "explained": {
            "seconds": [vars(term) for term in explain_time(costs, found.best)],
            "bytes": [vars(term) for term in explain_memory(costs, found.best)],
            "axes": [{**vars(use), "link": use.link} for use in explain_axes(costs, found.best.layout)],
        },
        "orders": [
            {"topology": plan.layout.topology.spec, "seconds": plan.seconds} for plan in orders_of(job, found.best)
        ],
        "search": {
            "timed": tally.evaluated,
            "cut": tally.bounded,
            "too_large": tally.too_large,
            "problems": dict(tally.problems),
        },
    }
    if isinstance(compared, str):
        content["compared"] = {"topology": favourite, "problem": compared}
    elif compared is not None:
        content["compared"] = {
            **plan_as_json(job, compared),
            "loses": [vars(term) for term in differences(found.best, compared)],
        }
    return content


def plan_as_json(job: Job, plan: Plan) -> dict[str, Any]:
    """One plan."""
    layout = plan.layout
    tokens = job.batch * job.sequence
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
        "seconds_by_term": dict(plan.time.parts()),
        "tokens_per_second": tokens / plan.seconds,
        "memory_bytes": plan.memory.total,
        "memory_by_term": dict(plan.memory.parts()),
    }


def _job_as_json(job: Job) -> dict[str, Any]:
    cluster = job.cluster
    return {
        "model": job.model.name,
        "parameters": job.model.parameters,
        "active_parameters": job.model.active_parameters,
        "flops_per_token": job.model.flops_per_token(job.sequence),
        "accelerator": cluster.accelerator.name,
        "hosts": cluster.hosts,
        "slots": cluster.slots,
        "memory_limit": cluster.memory_limit,
        "batch": job.batch,
        "sequence": job.sequence,
        "precision": job.precision.name,
        "software": job.software.name,
    }
