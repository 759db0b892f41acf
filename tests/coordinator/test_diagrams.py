"""The docs say what the code does."""

from __future__ import annotations

from tests import diagrams


def test_the_state_diagram_in_the_docs_is_the_table_in_the_code():
    page = diagrams.PAGE.read_text()
    assert page.count(diagrams.BEGIN) == 1
    assert page == diagrams.redrawn(page), "run scripts/diagrams"
