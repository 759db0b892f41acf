"""What `weight-cache launch` does, for a group that is killed a thousand times.

    python -m tests.chaos.group SOCKET WORKERS RAM_BUDGET_BYTES

Restarts come at once, and without end: everything else is as ever.
"""

from __future__ import annotations

import os
import sys

from coordinator import supervisor
from coordinator.plan import Plan
from coordinator.roster import Policy, Rule

GRACE_S = 10.0
RULE = Rule(
    Policy.ON_FAILURE, first_delay_s=0.02, longest_delay_s=0.02, healthy_s=0.0, restarts=10**9
)
CGROUP_VARIABLE = "WEIGHT_CACHE_CHAOS_CGROUP"
"""A folder of the memory cgroup that the group is to be in."""


def main(socket: str, workers: str, ram_budget_bytes: str) -> int:
    cgroup = os.environ.get(CGROUP_VARIABLE)
    if cgroup:
        with open(os.path.join(cgroup, "cgroup.procs"), "w") as processes:
            processes.write(str(os.getpid()))
    return supervisor.launch(
        Plan(
            command=(sys.executable, "-m", "tests.chaos.worker"),
            workers=int(workers),
            socket=socket,
            ram_budget_bytes=int(ram_budget_bytes),
            grace_s=GRACE_S,
            worker_rule=RULE,
            coordinator_rule=RULE,
        )
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
