"""Answer the queries of DeepSpeed's engines, and list what ds_topo patches in DeepSpeed and relies on."""

from ds_topo.mpu.supported import refuse_older_releases

refuse_older_releases()
