"""Helpers of all tests: processes to run them on, references trained in one process, and comparisons of the two."""
