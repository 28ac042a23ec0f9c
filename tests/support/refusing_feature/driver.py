"""Tokens refused at random, as a driver sees them: what is computed does not depend on it."""

from rpc_schema.random_refusals import RandomRefusals

from worker_client.parts.interface import RequestPart


class RandomRefusalsPart(RequestPart):
    """A share of tries a request."""

    extension = RandomRefusals
    may_refuse = True
