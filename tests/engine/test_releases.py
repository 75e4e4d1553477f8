"""Known defects of older DeepSpeed releases are named once."""

from __future__ import annotations

import warnings

import pytest

from ds_topo.engine.releases import warn_of_defects


def test_an_old_release_is_named_once_with_its_defect() -> None:
    with pytest.warns(RuntimeWarning, match=r"DeepSpeed 0\.17\.6 scales pipeline gradients wrongly.*use DeepSpeed >="):
        warn_of_defects("0.17.6")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_defects("0.17.6")
        warn_of_defects("0.19.8")


def test_a_release_that_was_not_run_is_named_once() -> None:
    with pytest.warns(RuntimeWarning, match=r"DeepSpeed 0\.20\.1 is newer than 0\.19\.8.*python -m ds_topo\.engine"):
        warn_of_defects("0.20.1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_defects("0.20.1")
