"""Hold what all other packages need: backends, patches, classes for objects of others, and the supported releases."""
