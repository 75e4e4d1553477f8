"""Break a rank in every engine and phase on virtual hosts, and check what the other ranks report.

python -m tests.faults [--engines plain1 pipe0] [--faults kill cut] [--phases forward save]
"""
