"""Replicas that torchft keeps together: processes of several jobs, which are killed, stopped and started again."""
