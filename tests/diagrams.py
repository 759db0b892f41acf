"""Draws the state diagram of docs/architecture.md from the ledger's table of moves."""

from __future__ import annotations

import sys
from pathlib import Path

from coordinator.ledger.state import LEAVING, TRANSITIONS

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
BEGIN = "<!-- states: written by scripts/diagrams -->\n"
END = "<!-- end -->\n"


def drawn() -> str:
    """Return the diagram, for whoever renders Mermaid, and the same as a table."""
    moves = [(a.name, b.name, why) for a, then in TRANSITIONS.items() for b, why in then.items()]
    moves += [(state.name, "[*]", why) for state, why in LEAVING.items()]
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> OPEN: a ticket, or a CHARGE"]
    lines += [f"    {a} --> {b}: {why.replace(':', ',').replace(';', ',')}" for a, b, why in moves]
    lines += ["```", "", "| state | event | next |", "| --- | --- | --- |"]
    lines += [f"| {a} | {why} | {'gone' if b == '[*]' else b} |" for a, b, why in moves]
    return "\n".join(lines) + "\n"


def redrawn(page: str) -> str:
    """Return the page with the diagram as the code has it."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{drawn()}{END}{after}"


def main() -> int:
    page = PAGE.read_text()
    if "--check" not in sys.argv:
        PAGE.write_text(redrawn(page))
        return 0
    return int(page != redrawn(page))


if __name__ == "__main__":
    sys.exit(main())
