"""Tests of ds_topo; their folders are those of the package. ``README.md`` explains how to run and to extend them."""
