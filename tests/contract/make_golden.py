"""`python -m tests.contract.make_golden`: regenerate the golden bytes of every message after an
intended change. Requires a PROTOCOL_VERSION that no other bytes have had: golden/versions.json
keeps a digest for each."""

import hashlib
import json
import sys
from pathlib import Path

import msgspec

from rpc_schema.version import PROTOCOL_VERSION
from tests.contract.random_messages import DIRECTIONS, fixed_example, messages

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = GOLDEN / "versions.json"


def golden(direction: str) -> dict[str, object]:
    """Return the content of a direction's golden file."""
    encoded = {
        kind.__name__: msgspec.msgpack.encode(fixed_example(kind)).hex()
        for kind in messages(direction)
    }
    return {"protocol_version": PROTOCOL_VERSION, "messages": encoded}


def digest_of_bytes() -> str:
    """Return a digest of the fixed example of every message in its current encoding."""
    encoded = {direction: golden(direction)["messages"] for direction in DIRECTIONS}
    return hashlib.sha256(json.dumps(encoded, sort_keys=True).encode()).hexdigest()


def main() -> None:
    """Write all files."""
    versions = json.loads(VERSIONS.read_text())
    if versions.setdefault(str(PROTOCOL_VERSION), digest_of_bytes()) != digest_of_bytes():
        sys.exit(f"protocol {PROTOCOL_VERSION} had other bytes: raise PROTOCOL_VERSION")
    VERSIONS.write_text(json.dumps(versions, indent=1) + "\n")
    for direction in DIRECTIONS:
        text = json.dumps(golden(direction), indent=1)
        (GOLDEN / f"{direction}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
