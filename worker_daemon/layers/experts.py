"""The block of a decoder layer that sends each token through a few of many MLPs (mixture of
experts).

Shapes: N tokens, H hidden size, E experts, I inner size of an expert on this rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from worker_daemon.contracts.experts import (
    ClampedSwiGLU,
    ExpertMatrices,
    RoutedTokens,
    Routing,
)
from worker_daemon.contracts.layer_ops import NormedSum
from worker_daemon.errors import config_error
from worker_daemon.layers.expert_loads import LayerLoad
from worker_daemon.layers.expert_pieces import ExpertPieces, ExpertsForm
from worker_daemon.layers.expert_slots import LayerSlots, Placement
from worker_daemon.layers.fp8 import make_fp8_parameters
from worker_daemon.layers.linear import GatedColumnParallelLinear, RowParallelLinear, even_shard
from worker_daemon.layers.linear_method import LinearMethod, PlainMatrix
from worker_daemon.layers.norm import NormSpec, Part, RMSNorm
from worker_daemon.layers.parameter import Parameter, Piece, whole_vector
from worker_daemon.layers.quantization import Int4Quantization, Quantization
from worker_daemon.layers.setup import LayerSetup


@dataclass(frozen=True, slots=True)
class SharedExpertSpec:
    """An MLP that every token passes; the sigmoid of a learned score scales its result."""

    intermediate_size: int


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """Sizes and switches of a block with experts, before tensor parallelism splits it.

    Checkpoints have the experts' matrices one by one, or stacked; models/expert_tensors.py gives
    all the names of single ones.
    """

    norm: NormSpec
    """The norm of the residual stream, before the router and the experts."""
    num_experts: int
    intermediate_size: int
    """Inner size of an expert."""
    routing: Routing
    shared: SharedExpertSpec | None = None
    """The expert of all tokens; None if there is none."""
    router: str = "gate"
    """Name of the router's matrix."""
    has_biases: bool = False
    """Router, gate, up and down of the experts have biases."""
    clamped: ClampedSwiGLU | None = None
    """The experts' activation; None: silu(gate) * up."""
    checkpoint_form: ExpertsForm = "separate"
    """The form of the experts' matrices in the checkpoint."""


class ExpertsBlock:
    """The sum of a token's experts, by their weights, and of the shared expert.

    Tensor parallelism splits the inner size of each expert, expert parallelism the list of experts:
    the sum over the ranks is the same. All ranks compute the same routing. The shared expert is
    always split. If replicas share the experts, each routes its own tokens, and the ranks of all
    exchange them (distributed/ep.py).
    """

    def __init__(
        self,
        prefix: str,
        spec: ExpertsSpec,
        setup: LayerSetup,
        load: LayerLoad | None = None,
        slots: LayerSlots | None = None,
    ) -> None:
        """prefix: the checkpoint's name of the layer. load: counts its tokens; None counts nothing.
        slots: where its experts are; None: they stay where a load puts them.

        Raises:
            ConfigError: the quantization is in 4 bits, covers some of the experts only, or its
                blocks do not fit this rank's part.
        """
        name = f"{prefix}.mlp"
        self._norm = RMSNorm(prefix, spec.norm, setup)
        self._experts = _Experts(name, spec, setup, load, slots)

    def forward(
        self, part: Part, residual: Tensor, query_start_loc: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Take and return the residual stream as (part, residual), like DecoderLayer.forward.
        query_start_loc: int32 [B + 1], as AttentionMetadata has it; rows of padding go to no
        expert."""
        routed = _RoutedStep(self._experts, query_start_loc)
        return self._norm.project(routed, part, residual)

    def join(self) -> None:
        """Compute this rank's experts for the tokens of other replicas, with none of its own.

        Raises:
            CommError: see ReplicaExperts.run.
        """
        self._experts.join()

    @property
    def top_k(self) -> int:
        """Experts of a token."""
        return self._experts.top_k

    @property
    def slots(self) -> LayerSlots | None:
        """The slots of its experts; None: they stay where a load puts them."""
        return self._experts.slots

    @property
    def slot_parameters(self) -> Sequence[Parameter]:
        """The parameters that have the experts of this rank's slots, one after another."""
        return tuple(self._experts.held.parameters())

    def use_placement(self, placement: Placement) -> None:
        """Take the contents of its slots for those of another placement from the next step on."""
        self._experts.use_placement(placement)

    def parameters(self) -> Iterator[Parameter]:
        yield from self._norm.parameters()
        yield from self._experts.parameters()


class _Experts:
    """Router, experts and shared expert of one layer."""

    def __init__(
        self,
        name: str,
        spec: ExpertsSpec,
        setup: LayerSetup,
        load: LayerLoad | None,
        slots: LayerSlots | None,
    ) -> None:
        self._spec = spec
        self._load = load
        self.slots = slots
        self._ops = setup.ops
        self._exchange = setup.replica_experts
        self._chosen = setup.chosen_experts
        self._index = 0 if self._chosen is None else self._chosen.add()
        router, count = f"{name}.{spec.router}", spec.num_experts
        self._router = _whole(f"{router}.weight", (count, setup.hidden_size), setup)
        self._router_bias: Parameter | None = None
        if spec.has_biases:
            vector = whole_vector(f"{router}.bias", count, "bias")
            self._router_bias = setup.parameter(vector.name, (count,), (vector,))
        pieces = _rank_pieces(name, spec, setup, slots)
        self._first = pieces.experts[0] if slots is None else slots.first
        self.held = _HeldExperts(name, spec, setup, pieces)
        on_meta = replace(setup, device=torch.device("meta"))
        self._remade = partial(_HeldExperts, name, spec, on_meta)
        self._pieces = pieces
        self._shared = None if spec.shared is None else _SharedExpert(name, spec.shared, setup)

    def project(self, source: Tensor | NormedSum, query_start_loc: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's part of the block's output of source, and its s, like LayerOps.route;
        all [N, H]."""
        x, total, routed = self._ops.route(
            source,
            self._router.data,
            _data(self._router_bias),
            self._spec.routing,
            query_start_loc,
            None if self._load is None else self._load.counts,
            self._replayed,
        )
        if self._chosen is not None:
            self._chosen.note(self._index, routed.experts)
        if self.slots is not None:
            routed = self.slots.slots_of(routed)
        if self._exchange is None:
            y = self._multiply(x, routed)
        else:
            y = self._exchange.run(x, routed, self._multiply)
        return (y if self._shared is None else y + self._shared.forward(x)), total

    def join(self) -> None:
        """See ExpertsBlock.join."""
        assert self._exchange is not None, "other replicas share the experts"
        x = self._router.data[:0]
        experts = x.new_empty((0, self.top_k), dtype=torch.int32)
        if self._chosen is not None:
            self._chosen.note(self._index, experts)
        self._exchange.run(x, RoutedTokens(experts, experts.float()), self._multiply)

    def use_placement(self, placement: Placement) -> None:
        """See ExpertsBlock.use_placement."""
        assert self.slots is not None, "the model was loaded with slots"
        self.slots.use(placement)
        self._pieces = replace(self._pieces, experts=self.slots.own)
        self.held.take_pieces(self._remade(self._pieces))

    def _multiply(self, x: Tensor, routed: RoutedTokens) -> Tensor:
        return self._ops.experts.multiply(x, routed, self._matrices)

    @property
    def top_k(self) -> int:
        """Experts of a token."""
        return self._spec.routing.top_k

    @property
    def _replayed(self) -> Tensor | None:
        """Experts that the step's tokens must take, int16 [N, K]; None: the best ones."""
        if self._chosen is None or self._chosen.replayed is None:
            return None
        return self._chosen.replayed[:, self._index]

    @property
    def _matrices(self) -> ExpertMatrices:
        count = self._spec.num_experts if self.slots is None else self.slots.num_slots
        return self.held.matrices(self._first, count, self._spec.clamped)

    def parameters(self) -> Iterator[Parameter]:
        yield self._router
        yield from self.held.stacks()
        if self._router_bias is not None:
            yield self._router_bias
        yield from self.held.biases()
        if self._shared is not None:
            yield from self._shared.parameters()


class _HeldExperts:
    """The matrices and biases of this rank's experts, one expert after another."""

    def __init__(
        self, name: str, spec: ExpertsSpec, setup: LayerSetup, pieces: ExpertPieces
    ) -> None:
        hidden, inner, self._count = setup.hidden_size, len(pieces.inner), len(pieces.experts)
        self._gate_up = _Stack(
            f"{name}.experts.gate_up_proj",
            (self._count * 2 * inner, hidden),
            tuple(pieces.gate_up()),
            setup,
        )
        self._down = _Stack(
            f"{name}.experts.down_proj", (self._count * hidden, inner), tuple(pieces.down()), setup
        )
        self._gate_up_bias: Parameter | None = None
        self._down_bias: Parameter | None = None
        if spec.has_biases:
            self._gate_up_bias = _stacked_bias(tuple(pieces.gate_up_bias()), 2 * inner, setup)
        if spec.has_biases and (setup.expert_parallel or setup.tp.rank == 0):
            # Those of split experts are on rank 0 alone, so that the sum contains each once.
            self._down_bias = _stacked_bias(tuple(pieces.down_bias()), hidden, setup)

    def matrices(
        self, first: int, num_experts: int, clamped: ClampedSwiGLU | None
    ) -> ExpertMatrices:
        """Return views of the parameters, whose data may move to other memory between steps. See
        ExpertMatrices for the arguments."""
        gate_up, gate_up_scale = self._gate_up.divided(self._count)
        down, down_scale = self._down.divided(self._count)
        return ExpertMatrices(
            gate_up,
            down,
            first,
            gate_up_scale,
            down_scale,
            num_experts,
            _data(self._gate_up_bias),
            _data(self._down_bias),
            clamped,
        )

    def take_pieces(self, other: "_HeldExperts") -> None:
        """Fill these parameters from the checkpoint tensors of others, of the same shapes."""
        for own, new in zip(self.parameters(), other.parameters(), strict=True):
            own.pieces = new.pieces

    def stacks(self) -> Iterator[Parameter]:
        yield from self._gate_up.parameters()
        yield from self._down.parameters()

    def biases(self) -> Iterator[Parameter]:
        yield from filter(None, (self._gate_up_bias, self._down_bias))

    def parameters(self) -> Iterator[Parameter]:
        yield from self.stacks()
        yield from self.biases()


class _Stack:
    """Matrices of this rank's experts, one below the other in one parameter, with their scales if
    they are in FP8."""

    def __init__(
        self, name: str, shape: tuple[int, int], pieces: tuple[Piece, ...], setup: LayerSetup
    ) -> None:
        """name: of the parameter, without .weight."""
        quantization = setup.quantization
        self._scale: Parameter | None = None
        self._input_scale: Parameter | None = None
        if quantization is None or not _covers(quantization, pieces):
            self._weight = setup.parameter(f"{name}.weight", shape, pieces)
            return
        if isinstance(quantization, Int4Quantization):
            raise config_error(
                "quantization_config",
                pieces[0].name,
                "experts in 4 bits are not supported",
                "use a checkpoint with experts in FP8, or the unquantized one",
            )
        made = make_fp8_parameters(name, shape, pieces, quantization, setup.device)
        self._weight, self._scale, self._input_scale, _ = made

    def divided(self, count: int) -> tuple[Tensor, Tensor | None]:
        """Return the matrices [count, rows, columns] and their scales, as ExpertMatrices has
        them."""
        weight, scale = self._weight.data, self._scale
        matrices = weight.view(count, -1, weight.shape[1])
        if scale is None:
            return matrices, None
        return matrices, scale.data.view(count, -1, *scale.data.shape[1:])

    def parameters(self) -> Iterator[Parameter]:
        yield self._weight
        for scale in (self._scale, self._input_scale):
            if scale is not None:
                yield scale


class _SharedExpert:
    """sigmoid(score(x)) * down(silu(gate(x)) * up(x)) (Qwen2-MoE)."""

    def __init__(self, name: str, spec: SharedExpertSpec, setup: LayerSetup) -> None:
        inner, prefix = spec.intermediate_size, f"{name}.shared_expert"
        score = _whole(f"{name}.shared_expert_gate.weight", (1, setup.hidden_size), setup)
        self._score = LinearMethod(PlainMatrix(score), None, setup.ops)
        self._gate_up = GatedColumnParallelLinear(
            f"{prefix}.gate_up_proj",
            even_shard(f"{prefix}.gate_proj", inner, setup.tp),
            even_shard(f"{prefix}.up_proj", inner, setup.tp),
            setup.hidden_size,
            setup,
            bias=False,
            activation="silu",
        )
        self._down = RowParallelLinear(
            f"{prefix}.down_proj", inner, setup.hidden_size, setup, bias=False
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's part of the shared expert's output, [N, H], of x [N, H]."""
        score = self._score.forward(x)
        return torch.sigmoid(score) * self._down.forward(self._gate_up.project(x)[0])

    def parameters(self) -> Iterator[Parameter]:
        yield from self._score.parameters()
        yield from self._gate_up.parameters()
        yield from self._down.parameters()


@dataclass(frozen=True, slots=True)
class _RoutedStep:
    """The experts as a Projection of one step."""

    experts: _Experts
    query_start_loc: Tensor

    def project(self, source: Tensor | NormedSum) -> tuple[Tensor, Tensor]:
        """See Projection."""
        return self.experts.project(source, self.query_start_loc)


def _stacked_bias(pieces: tuple[Piece, ...], width: int, setup: LayerSetup) -> Parameter:
    """Return the biases [L, width] of a rank's experts."""
    shape = (pieces[-1].target[0].stop, width)
    return setup.parameter(pieces[0].name, shape, pieces)


def _whole(name: str, shape: tuple[int, int], setup: LayerSetup) -> Parameter:
    """Return a matrix that every rank holds completely, never quantized."""
    everything = (slice(0, shape[0]), slice(0, shape[1]))
    return setup.parameter(name, shape, (Piece(name, shape, everything, everything),))


def _data(parameter: Parameter | None) -> Tensor | None:
    return None if parameter is None else parameter.data


def _rank_pieces(
    name: str, spec: ExpertsSpec, setup: LayerSetup, slots: LayerSlots | None
) -> ExpertPieces:
    """Return what this rank holds: with expert parallelism some experts as a whole, those of its
    slots if it has any, otherwise a part of the inner size of every expert."""
    experts: Sequence[int] = range(spec.num_experts)
    inner = range(spec.intermediate_size)
    place = setup.tp if setup.replica_experts is None else setup.replica_experts
    rank, size = place.rank, place.size
    if slots is not None:
        experts = slots.own
    elif setup.expert_parallel:
        base, rest = divmod(spec.num_experts, size)
        first = rank * base + min(rank, rest)
        experts = range(first, first + base + (rank < rest))
    else:
        each = spec.intermediate_size // size
        inner = range(rank * each, (rank + 1) * each)
    return ExpertPieces(
        f"{name}.experts",
        spec.checkpoint_form,
        spec.num_experts,
        spec.intermediate_size,
        setup.hidden_size,
        experts,
        inner,
    )


def _covers(quantization: Quantization, pieces: Sequence[Piece]) -> bool:
    """Return True if all of the tensors are quantized, False if none is.

    Raises:
        ConfigError: some of them are.
    """
    modules = [piece.name.removesuffix(".weight") for piece in pieces]
    ignored = next((each for each in modules if not quantization.covers(each)), None)
    if ignored is not None and any(map(quantization.covers, modules)):
        raise config_error(
            "quantization_config",
            ignored,
            "some experts of a layer are quantized, and others are not",
            "use a checkpoint that quantizes or ignores all of them",
        )
    return ignored is None
