"""The driver's side of structured output as a feature of a request; worker_client/structured/ has
the grammars and their matchers."""

from rpc_schema.structured import StructuredOutput
from worker_client.parts.interface import RequestPart


class StructuredOutputPart(RequestPart):
    """A grammar; the KV of a request does not depend on it."""

    extension = StructuredOutput
    may_jump = True
