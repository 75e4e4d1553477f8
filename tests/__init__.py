"""Tests of ds_topo, in the rooms of the package; ``README.md`` says how to run and to extend them."""
