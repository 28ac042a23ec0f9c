"""The weights that sample for each request, of the model and of its adapter, which updates change;
and the roots of its block hashes."""

from collections import deque
from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple

from rpc_schema.extensions import extension_of
from rpc_schema.lora_request import LoraRequest
from worker_client.group.loras import GroupAdapter
from worker_client.parts.registry import prefix_root
from worker_client.scheduler.request import Request


class _AdapterChange(NamedTuple):
    """An update of an adapter's weights."""

    first_step: int
    """The first step that samples with the new ones."""
    version: int
    """LoraRequest.version of its requests."""
    weights_version: int


class SamplingWeights:
    """The version of the model's weights, and the adapters that were updated. Owned by a
    scheduler."""

    def __init__(self) -> None:
        self.version = 0
        """Number of the version that has sampled the newest tokens."""
        self._present: dict[int, GroupAdapter] = {}
        """Adapters as they are now, by LoraRequest.version. Of those that have had one id, the
        newest, and those whose requests are unfinished."""
        self.changes: deque[_AdapterChange] = deque()
        """Updates whose first step has no result yet."""

    def set_version(self, version: int, unfinished: Iterable[Request]) -> None:
        """Note that other weights of the model sample the tokens of requests from here on."""
        for request in unfinished:
            request.stamp(self.version)
        self.version = version

    def begin(self, request: Request) -> None:
        """Note the present weights of a new request's adapter, if it has one."""
        request.weights.adapter_version = self.present_of(request)
        if request.weights.adapter_version is not None:
            self._set_root(request)

    def adopt(self, request: Request) -> None:
        """Note that another driver has left a request, before its tokens are stamped. If the
        weights were updated since its admission, those that have sampled its newest tokens are not
        known, and its blocks have KV of several. If they are not known here yet, the driver tells
        of them before the first step."""
        version = _version_of(request)
        if not version:
            return
        self._set_root(request)
        present = self._present.get(version)
        if present is not None and present.weights_version != request.weights.adapter_version:
            request.weights.adapter_version = None
            request.prefix.is_mixed = True

    def present_of(self, request: Request) -> int | None:
        """Return the number of the weights with which a request is admitted now."""
        version = _version_of(request)
        present = self._present.get(version)
        if present is not None:
            return present.weights_version
        return 0 if version else None

    def change(
        self, adapter: GroupAdapter, first_step: int, unfinished: Iterable[Request]
    ) -> list[Request]:
        """Note the new weights of an adapter, and return its requests: their blocks are hashed as
        those of the new weights, and no other request may begin with those of the running ones."""
        requests = list(unfinished)
        in_use = {_version_of(each) for each in requests}
        self._present = {
            version: known
            for version, known in self._present.items()
            if known.lora_id != adapter.lora_id or version in in_use
        }
        self._present[adapter.version] = adapter
        users = [each for each in requests if _version_of(each) == adapter.version]
        for request in users:
            request.prefix.hashes.clear()
            self._set_root(request)
            if request.weights.adapter_version != adapter.weights_version:
                request.prefix.is_mixed |= request.is_running
                if not first_step:  # it was adopted, and nobody knows when its weights changed
                    request.weights.forget_adapter_versions()
        self.changes.append(_AdapterChange(first_step, adapter.version, adapter.weights_version))
        return users

    def follow_adapters(self, step: int, unfinished: Iterable[Request]) -> None:
        """Note that the results from this step on are of the present weights of adapters, as far as
        no later step changes them."""
        requests = list(unfinished)
        while self.changes and self.changes[0].first_step <= step:
            change = self.changes.popleft()
            for request in requests:
                if _version_of(request) == change.version:
                    request.stamp(self.version)
                    request.weights.adapter_version = change.weights_version

    def _set_root(self, request: Request) -> None:
        present = self._present.get(_version_of(request))
        root = prefix_root(request.extensions)
        if present is not None:
            root = blake2b(root + present.weights_key, digest_size=len(root)).digest()
        request.prefix.root = root


def _version_of(request: Request) -> int:
    """Return the version of a request's adapter, as it was read; 0 if it has none."""
    adapter = extension_of(request.extensions, LoraRequest) if request.extensions else None
    return 0 if adapter is None else adapter.version
