"""A checkpoint is there as a whole or not at all, and goes on bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_topo import checkpoint
from tests.checkpoint.jobs import KINDS, Kind, job
from tests.support.world import Worlds

CASES = [
    *KINDS.values(),
    Kind("data=2", zero=0),
    Kind("data=2", zero=2, reduced=True),
    Kind("data=2", zero=1, bf16=True),
    Kind("pipe=2", zero=1, is_pipeline=True, reduced=True),
]


def _save(kind: Kind, folder: Path) -> tuple[dict[str, str], list[float], dict[str, str]]:
    with job(kind) as here:
        here.train(range(2))
        checkpoint.save(here.engine, folder, client_state={"step": 2})
        saved = here.state()
        return saved, here.train(range(2, 4)), here.state()


def _load(kind: Kind, folder: Path) -> tuple[dict[str, str], list[float], dict[str, str]]:
    with job(kind) as here:
        if kind.zero != 3:  # DeepSpeed wants a pristine model there
            here.train(range(7, 8))
        path, state = checkpoint.load(here.engine, folder, verify="digests")
        assert (path, state["step"]) == (str(folder / "global_step2"), 2)
        loaded = here.state()
        return loaded, here.train(range(2, 4)), here.state()


@pytest.mark.parametrize("kind", CASES, ids=str)
def test_goes_on_bit_for_bit(world: Worlds, other_world: Worlds, kind: Kind, tmp_path: Path) -> None:
    without_stop = world(2).run(_save, kind, tmp_path)
    continued = other_world(2).run(_load, kind, tmp_path)
    for wanted, found in zip(without_stop, continued, strict=True):
        assert found[0] == wanted[0], "as it was saved"
        assert found[1:] == wanted[1:], "as if it had gone on"
