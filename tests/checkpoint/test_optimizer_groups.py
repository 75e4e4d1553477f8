"""The groups of the optimizer on other stages follow from the saved ones, or are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ds_topo.checkpoint.manifest import Manifest, SavedLayer, SavedLayout, SavedParameter, SavedStructure
from ds_topo.checkpoint.saved_model import WholeModel, model_of
from ds_topo.checkpoint.target import planned_groups
from ds_topo.errors import CheckpointLayoutError

DECAY, PLAIN = {"lr": 0.1, "weight_decay": 0.1}, {"lr": 0.1, "weight_decay": 0.0}
Groups = tuple[tuple[tuple[str, ...], ...], ...]


def _model(groups: Groups) -> WholeModel:
    """Return a pipeline of two stages with two layers each, which have one parameter."""
    layout = SavedLayout("pipe=2", 2, 2, 1, 1, "DeepSpeedZeroOptimizer", "fp32", is_pipeline=True)
    structure = SavedStructure("AdamW", groups, layers=(SavedLayer("Linear"),) * 4, bounds=(0, 2, 4))
    rows = tuple(SavedParameter(f"{number}.w", (2, 2), "float32", (number // 2,)) for number in range(4))
    return model_of(Manifest("saved", 1, "2026-01-01T00:00:00+00:00", layout, (), rows, structure=structure))


def _planned(groups: Groups, bounds: tuple[int, ...], of_stages: list[list[dict[str, Any]]]) -> Any:
    model = _model(groups)
    structure, stages = replace(model.structure, bounds=bounds), len(bounds) - 1
    layout = replace(model.layout, topology=f"pipe={stages}", world_size=stages, model_ranks=stages)
    return planned_groups(model, replace(model, structure=structure, layout=layout), of_stages.__getitem__)


def test_groups_of_unequal_stages_are_matched_by_their_hyperparameters() -> None:
    groups: Groups = ((("0.w",), ("1.w",)), (("2.w", "3.w"),))
    found = _planned(groups, (0, 1, 3, 4), [[DECAY, PLAIN], [PLAIN]])
    assert found == ((("0.w",),), (("1.w", "2.w"),), (("3.w",),))
    found = _planned(groups, (0, 4), [[DECAY, PLAIN], [DECAY]])
    assert found == ((("0.w", "2.w", "3.w"), ("1.w",)),)


def test_equal_numbers_of_groups_do_not_make_them_alike() -> None:
    groups: Groups = ((("0.w", "1.w"),), (("2.w", "3.w"),))
    assert _planned(groups, (0, 2, 4), [[DECAY], [PLAIN]]) == groups
    with pytest.raises(CheckpointLayoutError, match=r"which of them comes first\. Keep the stages as they are"):
        _planned(groups, (0, 3, 4), [[DECAY], [PLAIN]])


def test_groups_that_cannot_be_told_apart_are_refused() -> None:
    said = "stages 0 and 1 have 2 and 1 groups of the optimizer with the same hyperparameters.*convert while loading"
    with pytest.raises(CheckpointLayoutError, match=said):
        _planned(((("0.w",), ("1.w",)), (("2.w", "3.w"),)), (0, 3, 4), [[PLAIN, PLAIN], [PLAIN]])
