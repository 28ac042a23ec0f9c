"""The driver side of random refusals, which do not change the results."""

from rpc_schema.random_refusals import RandomRefusals

from worker_client.parts.interface import RequestPart


class RandomRefusalsPart(RequestPart):
    """A share of refusals per request."""

    extension = RandomRefusals
    may_refuse = True
