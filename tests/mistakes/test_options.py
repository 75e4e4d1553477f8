"""Mistakes in options of the reducer and in sections of the config raise clear errors."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from ds_topo import initialize
from ds_topo.engine.config import check_top_level
from ds_topo.errors import EngineOptionError
from ds_topo.reduction.options import ReductionOptions, arguments_from_config

OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"bucket_bytes": 0}, ValueError, "at least 1"),
    ({"bucket_bytes": -4}, ValueError, "bucket_bytes=-4"),
    ({"bucket_bytes": 1.5}, TypeError, "bucket_bytes=1.5: give a whole number of bytes"),
    ({"bucket_bytes": "25MB"}, TypeError, "bucket_bytes='25MB'"),
    ({"bucket_bytes": True}, TypeError, "bucket_bytes=True"),
    ({"first_bucket_bytes": None}, TypeError, "first_bucket_bytes=None: give a whole number"),
    ({"last_bucket_bytes": 0}, ValueError, "at least 1"),
    ({"op": "mean"}, ValueError, "choose 'average' or 'sum'"),
    ({"op": None}, ValueError, "choose 'average' or 'sum'"),
    ({"op": "sum", "divisor": 2.0}, ValueError, "a sum is not divided"),
    ({"divisor": 0}, ValueError, "must be positive"),
    ({"divisor": -1.0}, ValueError, "must be positive"),
    ({"divisor": "4"}, TypeError, "divisor='4': give a number, or None"),
    ({"predivide_factor": 0.0}, ValueError, "must be positive"),
    ({"predivide_factor": float("nan")}, ValueError, "must be positive"),
    ({"communication_dtype": "bf16"}, ValueError, "choose a floating-point type such as"),
    ({"communication_dtype": torch.int32}, ValueError, "choose a floating-point type such as"),
    ({"accumulation_dtype": torch.bool}, ValueError, "choose a floating-point type such as"),
    ({"overlap": "false"}, TypeError, "overlap='false': give True, False or None"),
    ({"overlap": 0}, TypeError, "overlap=0"),
    ({"two_level": "auto"}, TypeError, "two_level='auto'"),
    ({"find_unused_parameters": "yes"}, TypeError, "give True or False"),
    ({"find_unused_parameters": True, "zero_unused_parameters": True}, ValueError, "choose one of them"),
    ({"allow_late_gradients": True}, ValueError, "set static_graph=True"),
    ({"static_graph": 1}, TypeError, "static_graph=1"),
    ({"broadcast_at_start": None}, TypeError, "broadcast_at_start=None"),
    ({"first_bucket_bytes": 2.5}, TypeError, "first_bucket_bytes=2.5"),
    ({"ignored_parameters": "weight"}, TypeError, "give a collection of names or parameters"),
    ({"expert_groups": []}, TypeError, "give a mapping"),
    ({"bucket_byte": 4}, TypeError, "bucket_byte"),
]


@pytest.mark.parametrize(("options", "kind", "message"), OPTIONS)
def test_invalid_reducer_options_raise(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        ReductionOptions(**options)
    assert message in str(caught.value)


def test_divisors_below_one_and_narrow_types_are_valid_reducer_options() -> None:
    ReductionOptions(divisor=0.5, predivide_factor=0.5, communication_dtype=torch.bfloat16)


SECTIONS: list[tuple[Any, str]] = [
    ("false", "is neither true, false nor a mapping of options"),
    (4194304, "is neither true, false nor a mapping"),
    ([1], "is neither true, false nor a mapping"),
    (None, "is neither true, false nor a mapping"),
    ({"enabled": "false"}, "\"enabled\" is 'false': give true or false"),
    ({"enabled": 0}, "give true or false"),
    ({"bucket_byte": 4}, "did you mean 'bucket_bytes'? Options are bucket_bytes"),
    ({"nonsense": 4}, "is not an option. Options are bucket_bytes"),
    ({"partitions": []}, "'partitions' is not an option"),
    ({"bucket_bytes": "4 MB"}, "bucket_bytes='4 MB'"),
    ({"communication_dtype": "int8"}, "choose one of fp32"),
    ({"communication_dtype": 16}, "choose one of fp32"),
    ({"overlap": "false"}, "give True, False or None"),
    ({"op": "max"}, "choose 'average' or 'sum'"),
]


@pytest.mark.parametrize(("section", "message"), SECTIONS)
def test_invalid_reducer_section_of_a_config_raises(section: Any, message: str) -> None:
    with pytest.raises(ValueError, match='config section "gradient_reducer"') as caught:
        initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1, "gradient_reducer": section})
    assert message in str(caught.value)


def test_config_section_accepts_names_of_types() -> None:
    assert arguments_from_config({"communication_dtype": "bf16", "accumulation_dtype": None}) == {
        "communication_dtype": torch.bfloat16,
        "accumulation_dtype": None,
    }


@pytest.mark.parametrize("name", ["gradient_reducers", "Gradient_Reducer", "gradientreducer", "topolgy", "Topology"])
def test_misspelt_section_raises_with_a_suggestion(name: str) -> None:
    with pytest.raises(ValueError, match=f"config section '{name}': did you mean"):
        initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1, name: "pipe=2"})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("zero_optimisation", "zero_optimization"),
        ("gradient_cliping", "gradient_clipping"),
        ("gradient_accumulation", "gradient_accumulation_steps"),
        ("topologies", "topology"),
        ("Optimizer", "optimizer"),
        ("fp-16", "fp16"),
        ("my_own_settings", None),
    ],
)
def test_misspelt_keys_of_deepspeed_raise_with_a_suggestion(name: str, meant: str | None) -> None:
    config = {"train_batch_size": 1, "optimizer": {}, "zero_optimization": {"stage": 1}, name: {}}
    if meant is None:
        assert check_top_level(config) == [name]
        return
    with pytest.raises(EngineOptionError, match=f"config section '{name}': did you mean '{meant}'"):
        check_top_level(config)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"topology": "pipe=2"}, "move it to the top level"),
        ({"schedule": "dualpipev"}, "\"schedule\" 'dualpipev' has no effect, .* build DualPipeVModule for DualPipeV"),
    ],
)
def test_what_nothing_reads_in_the_section_of_pipelines_raises(section: dict[str, str], message: str) -> None:
    with pytest.raises(EngineOptionError, match=message):
        check_top_level({"pipeline": section})


@pytest.mark.parametrize("name", ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
@pytest.mark.parametrize(("count", "is_valid"), [(2, True), (2.0, True), ("auto", True), (2.5, False), (True, False)])
def test_numbers_of_samples_and_steps_must_be_whole(name: str, count: object, is_valid: bool) -> None:
    with nullcontext() if is_valid else pytest.raises(EngineOptionError, match=f"{name} is {count}: give a whole num"):
        check_top_level({name: count})


def test_a_misspelt_switch_of_the_reducer_raises() -> None:
    with pytest.raises(ValueError, match="'enable' is not an option: did you mean 'enabled'"):
        initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1, "gradient_reducer": {"enable": True}})


def test_missing_config_file_raises() -> None:
    with pytest.raises(ValueError, match=r"config 'absent\.json' cannot be read"):
        initialize(model=nn.Linear(2, 2), config="absent.json")
