"""Identities as messages carry them. Imports no torch: the main thread reports them before torch is
there."""

from dataclasses import asdict

from rpc_schema.identity import ContentIdentity
from worker_daemon.contracts.source_identity import SourceIdentity


def on_wire(identity: SourceIdentity) -> ContentIdentity:
    """Return an identity as messages carry it."""
    return ContentIdentity(**asdict(identity))
