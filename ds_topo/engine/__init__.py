"""The only importers of DeepSpeed."""

from ds_topo.base.supported import refuse_older_releases

refuse_older_releases()
