"""A daemon's place in its group: a value, computed once."""

from dataclasses import dataclass

from worker_daemon.errors import config_error


@dataclass(frozen=True, slots=True)
class ParallelState:
    """This daemon's coordinates. The global rank is dp_rank * world_size + pp_rank * tp_size +
    tp_rank. A link connects the ranks of one replica, or of all replicas if they are in
    lockstep. Only the communicators of stages that share experts have ranks of two replicas."""

    pp_size: int
    tp_size: int
    rank: int
    dp_size: int = 1
    lockstep: bool = False
    """The replicas take each step together."""

    def __post_init__(self) -> None:
        num_ranks = self.dp_size * self.world_size
        if not 0 <= self.rank < num_ranks:
            sizes = [self.dp_size] * (self.dp_size > 1) + [self.pp_size, self.tp_size]
            problem = f"a group of {' x '.join(map(str, sizes))} has no such rank"
            fix = f"a rank from 0 to {num_ranks - 1}"
            raise config_error("rendezvous.rank", self.rank, problem, fix)
        if self.lockstep and self.dp_size == 1:
            problem, fix = "there is one replica", "several replicas, or no lockstep"
            raise config_error("parallel.data_parallel_lockstep", True, problem, fix)

    def check_link(self, link: int) -> None:
        """Raise ConfigError for a link of another replica. Steps name their link: a rank that has
        joined only its own replica's links runs no other one's steps."""
        if not self.lockstep and link % self.dp_size != self.dp_rank:
            problem = f"this is not a link of replica {self.dp_rank} of {self.dp_size}"
            fix = f"a number that is {self.dp_rank} modulo {self.dp_size}"
            raise config_error("rendezvous.link", link, problem, fix)

    @property
    def world_size(self) -> int:
        """Number of ranks of one replica."""
        return self.pp_size * self.tp_size

    @property
    def dp_rank(self) -> int:
        """Number of this rank's replica."""
        return self.rank // self.world_size

    @property
    def rank_in_replica(self) -> int:
        return self.rank % self.world_size

    @property
    def replicas_in_step(self) -> int:
        """Number of replicas that take each step together, and share a link."""
        return self.dp_size if self.lockstep else 1

    @property
    def group_size(self) -> int:
        """Number of ranks of the link."""
        return self.replicas_in_step * self.world_size

    @property
    def rank_in_group(self) -> int:
        """This rank's number within the link."""
        return self.rank % self.group_size

    @property
    def pp_rank(self) -> int:
        return self.rank_in_replica // self.tp_size

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
        """True for the only rank of its replica that answers steps: tensor-parallel rank 0 of the
        last stage."""
        return self.is_last_stage and self.tp_rank == 0

    def rank_of(self, pp_rank: int, tp_rank: int) -> int:
        """Return the rank within the replica at these coordinates."""
        return pp_rank * self.tp_size + tp_rank

    def stage_ranks(self, pp_rank: int) -> list[int]:
        """Return the ranks within the replica of one stage: a tensor-parallel group."""
        return [self.rank_of(pp_rank, tp_rank) for tp_rank in range(self.tp_size)]

    def expert_ranks(self, pp_rank: int) -> list[int]:
        """Return the ranks within the link of one stage of all its replicas, replica after
        replica."""
        firsts = range(0, self.group_size, self.world_size)
        return [first + rank for first in firsts for rank in self.stage_ranks(pp_rank)]

    def pipeline_ranks(self, tp_rank: int) -> list[int]:
        """Return the ranks within the replica with this tensor-parallel rank, first stage to
        last."""
        return [self.rank_of(pp_rank, tp_rank) for pp_rank in range(self.pp_size)]
