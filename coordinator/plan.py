"""What a group is launched with."""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.roster import Policy, Rule


@dataclass(frozen=True, slots=True)
class Plan:
    """What to launch.

    Attributes:
        command: of every worker; without one of the user's, that of resident workers, one for each
            of `devices`.
        resident: these are resident workers.
        socket: of the coordinator; None makes a private one, so that groups do not meet.
        ram_budget_bytes: limit of the pool `ram`; None takes what `serve` would.
        huge_pages: whether the coordinator has weights in pages of 2 MiB.
        limits: path of a file of limits, which then count before `ram_budget_bytes`.
        devices: one for each worker, from the beginning again when there are more workers.
        grace_s: between asking processes to end and SIGKILL; also how long the drain at the end
            waits for processes that are not of this group.
    """

    command: tuple[str, ...]
    workers: int = 1
    socket: str | None = None
    ram_budget_bytes: int | None = None
    huge_pages: bool = True
    limits: str | None = None
    devices: tuple[str, ...] = ()
    resident: bool = False
    grace_s: float = 10.0
    worker_rule: Rule = field(default_factory=lambda: Rule(Policy.NEVER))
    coordinator_rule: Rule = field(default_factory=lambda: Rule(Policy.ON_FAILURE))

    def command_of(self, rank: int) -> tuple[str, ...]:
        """Return the command of one worker."""
        if not self.resident:
            return self.command
        return (*self.command, "--device", self.devices[rank])

    def name_of(self, rank: int) -> str:
        """Return what one worker is called in the log and by `status`."""
        return f"resident {self.devices[rank]}" if self.resident else f"worker {rank}"
