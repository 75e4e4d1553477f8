"""The only importers of DeepSpeed."""
