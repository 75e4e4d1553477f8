"""Simulate several hosts on one machine, for tests and benchmarks that need a real link between ranks.

with Cluster(hosts=2, rate="1gbit") as cluster:
    times = cluster.run_ranks(measure, ranks_per_host=1)
    cluster.hosts[0].run(["ssh", "host1", "hostname"])
    print(cluster.bytes_sent())
"""

from tests.cluster.requirements import missing_requirement
from tests.cluster.virtual_hosts import Cluster, Host

__all__ = ["Cluster", "Host", "missing_requirement"]
