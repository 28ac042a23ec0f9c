"""The digest by which a lease names its driver."""

import hashlib
from typing import Final

DIGEST_BYTES: Final = 8


def driver_digest(driver_id: bytes) -> bytes:
    """Return the digest of a driver's id, which others may see."""
    return hashlib.sha256(driver_id).digest()[:DIGEST_BYTES]
