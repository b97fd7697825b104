"""A program: a Ray cluster of a head without CPUs and so many machines with one each, and a run on it.

`python probe_run_on_cluster.py MACHINES CONFIG`. It is a process of its own, so that no other Ray of the tests is in
its way.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # where probe_losses lies
    from ray.cluster_utils import Cluster

    from rlframework import load_config, run

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(int(sys.argv[1])):
            cluster.add_node(num_cpus=1)
        os.environ["RAY_ADDRESS"] = cluster.address
        run(load_config(sys.argv[2]))
    finally:
        cluster.shutdown()
