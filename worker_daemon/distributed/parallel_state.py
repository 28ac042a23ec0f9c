"""A daemon's place in its group: a value, computed once."""

from dataclasses import dataclass

from worker_daemon.errors import config_error


@dataclass(frozen=True, slots=True)
class ParallelState:
    """This daemon's coordinates. The global rank is pp_rank * tp_size + tp_rank."""

    pp_size: int
    tp_size: int
    rank: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            problem = f"a group of {self.pp_size} x {self.tp_size} has no such rank"
            fix = f"a rank from 0 to {self.world_size - 1}"
            raise config_error("rendezvous.rank", self.rank, problem, fix)

    @property
    def world_size(self) -> int:
        return self.pp_size * self.tp_size

    @property
    def pp_rank(self) -> int:
        return self.rank // self.tp_size

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def is_output_rank(self) -> bool:
        """True for the only rank that answers steps: tensor-parallel rank 0 of the last stage."""
        return self.is_last_stage and self.tp_rank == 0

    def rank_of(self, pp_rank: int, tp_rank: int) -> int:
        """Return the global rank at these coordinates."""
        return pp_rank * self.tp_size + tp_rank

    def stage_ranks(self, pp_rank: int) -> list[int]:
        """Return the global ranks of one stage: a tensor-parallel group."""
        return [self.rank_of(pp_rank, tp_rank) for tp_rank in range(self.tp_size)]

    def pipeline_ranks(self, tp_rank: int) -> list[int]:
        """Return the global ranks with this tensor-parallel rank, first stage to last."""
        return [self.rank_of(pp_rank, tp_rank) for pp_rank in range(self.pp_size)]
