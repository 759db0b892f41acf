"""`weight-cache doctor`: what a host allows, found out by trying.

`coordinator.probes` tries; here is what is said of it, and on which systems there is anything to
try. Nothing here needs a coordinator, or imports torch.

`Diagnosis` is what `--json` prints, and that is stable: fields and probes may be added, none is
removed or renamed. `found` and `remedy` are texts for people, and may change.
"""

from __future__ import annotations

import sys

import msgspec

from coordinator.probes.finding import Finding, Verdict, fail
from shm_store.errors import PlatformUnsupported

PLATFORM: str = sys.platform
VERDICTS: tuple[Verdict, ...] = ("fail", "warn", "ok")
"""The worst first."""


class Diagnosis(msgspec.Struct, frozen=True):
    """What all probes together found."""

    verdict: Verdict
    """The worst of the findings': ok, warn or fail."""
    findings: tuple[Finding, ...]


def report(socket: str | None, json: bool) -> bool:
    """Print what this host allows; return whether weight-cache can work here."""
    diagnosis = diagnose(socket)
    if json:
        print(msgspec.json.format(msgspec.json.encode(diagnosis), indent=2).decode())
    else:
        from coordinator.display import show_diagnosis

        show_diagnosis(diagnosis)
    return diagnosis.verdict != "fail"


def diagnose(socket: str | None = None, root: str = "/") -> Diagnosis:
    """Return what every probe found, in the order in which they are shown.

    Args:
        socket: the coordinator's, as `shm_store.paths.socket_path` takes it.
        root: where /proc, /sys, /dev and the cgroups are looked for; for tests.
    """
    if PLATFORM != "linux":
        error = PlatformUnsupported(f"this system is {PLATFORM}")
        findings = [fail("kernel", error.message, error.remedy)]
    else:
        # Not on another system: some of what they import is not there.
        from coordinator.probes.every import found_by, probes

        findings = [found_by(name, probe) for name, probe in probes(root, socket).items()]
    said = {finding.verdict for finding in findings}
    verdict = next(verdict for verdict in VERDICTS if verdict in said)
    return Diagnosis(verdict, tuple(findings))
