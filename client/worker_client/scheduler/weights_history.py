"""The weights that a request's tokens were sampled by, over updates and drivers."""

from dataclasses import dataclass

from worker_client.requests import VersionRun


@dataclass(slots=True)
class WeightsHistory:
    """Owned by a request. SamplingWeights sets adapter_version, and an admission num_recomputed."""

    runs: tuple[VersionRun, ...] = ()
    """Versions of the weights that have sampled its output tokens, as far as stamp() was told."""
    adapter_version: int | None = None
    """Number of the weights of its adapter that sample for it, in the step whose result comes next;
    None if it has none, or they are not known."""
    num_recomputed: int = 0
    """Leading positions whose KV was computed again behind tokens that were sampled before, and so
    were the experts that the workers keep with it: what its row would tell another driver."""

    def stamp(self, version: int | None, num_tokens: int) -> None:
        """Note that weights of this version have sampled those of the first num_tokens output
        tokens that are not stamped yet. It has no tokens behind these."""
        runs, left = [], num_tokens
        for run in self.runs:
            if left:
                runs.append(run._replace(num_tokens=min(run.num_tokens, left)))
                left -= runs[-1].num_tokens
        made = VersionRun(version, left, self.adapter_version)
        if left and runs and runs[-1]._replace(num_tokens=left) == made:
            runs[-1] = made._replace(num_tokens=runs[-1].num_tokens + left)
        elif left:
            runs.append(made)
        self.runs = tuple(runs)

    def stamp_pooled(self, version: int) -> None:
        """Note that weights of this version have made the output of a request that pools."""
        self.runs = (VersionRun(version, 0, self.adapter_version),)

    def stamp_brought(self, num_tokens: int) -> None:
        """Note that it has brought its first num_tokens output tokens, all that it has: what has
        sampled them is not known."""
        self.runs = (VersionRun(None, num_tokens),)

    def forget_adapter_versions(self) -> None:
        """Note that it is not known which weights of its adapter have sampled its tokens."""
        self.adapter_version = None
        self.runs = tuple(run._replace(adapter_version=None) for run in self.runs)
