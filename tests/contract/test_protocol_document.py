"""docs/protocol.md matches the schema."""

from pathlib import Path

from rpc_schema.__main__ import render

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"


def test_document_is_made_from_the_schema():
    assert DOCUMENT.read_text() == render(), "run: python -m rpc_schema > docs/protocol.md"
