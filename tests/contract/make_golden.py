"""`python -m tests.contract.make_golden`: write the golden bytes of every message anew. For a
change of bytes that is meant, together with a higher PROTOCOL_VERSION."""

import json
from pathlib import Path

import msgspec

from rpc_schema.version import PROTOCOL_VERSION
from tests.contract.random_messages import DIRECTIONS, fixed_example, messages

GOLDEN = Path(__file__).parent / "golden"


def golden(direction: str) -> dict[str, object]:
    """The content of a direction's golden file."""
    encoded = {
        kind.__name__: msgspec.msgpack.encode(fixed_example(kind)).hex()
        for kind in messages(direction)
    }
    return {"protocol_version": PROTOCOL_VERSION, "messages": encoded}


def main() -> None:
    """Write all files."""
    GOLDEN.mkdir(exist_ok=True)
    for direction in DIRECTIONS:
        text = json.dumps(golden(direction), indent=1)
        (GOLDEN / f"{direction}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
