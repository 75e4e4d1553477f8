"""Answer the queries of DeepSpeed's engines, and list what ds_topo patches in DeepSpeed and relies on."""
