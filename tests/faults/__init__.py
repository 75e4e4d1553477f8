"""What ranks say when one of them breaks: every fault in every engine and phase, on virtual hosts.

python -m tests.faults [--engines plain1 pipe0] [--faults kill cut] [--phases forward save]
"""
