"""Create live process groups: the ranks agree on tables of ranks, then each creates the groups that it belongs to."""
