"""The random states of a rank: of Python, NumPy, torch, its accelerator, and DeepSpeed's model parallel layers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_topo.engine.checkpoints.facts import replica_of


def name_of_states(engine: DeepSpeedEngine) -> str:
    """The file of this rank's, named after its place as DeepSpeed names its own."""
    return f"random_states_replica_{replica_of(engine)}_mp_rank_{int(engine.checkpoint_mp_rank):02d}.pt"


def random_states(engine: DeepSpeedEngine) -> dict[str, Any]:
    """All of them, of types that torch reads safely.

    With ``seed_layers`` a pipeline seeds by the number of micro-batches it has seen, which DeepSpeed does not save.
    """
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "tracker": dict(get_cuda_rng_tracker().get_states()),
        "micro_offset": getattr(engine.module, "micro_offset", None),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore(engine: DeepSpeedEngine, states: dict[str, Any]) -> None:
    """Go on as the rank that saved them would have."""
    random.setstate(states["python"])
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(states["torch"])
    if states["tracker"]:
        get_cuda_rng_tracker().set_states(states["tracker"])
    if states["micro_offset"] is not None:
        engine.module.micro_offset = states["micro_offset"]
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
