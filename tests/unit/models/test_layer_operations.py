"""The operations that a stage calls: on a GPU each is one or two kernels."""

from itertools import chain

import pytest
import torch

from worker_daemon.distributed.tp import SingleRank
from worker_daemon.layers.torch_attention import TorchPagedAttention
from worker_daemon.layers.torch_ops import TorchOps
from worker_daemon.models.config import parse_model_config
from worker_daemon.models.decoder import build_stage
from worker_daemon.models.weights import load_dummy_weights

NUM_LAYERS = 3
PRODUCT, NORMED = "product of Tensor", "product of NormedSum"
HEAD = ["rms_norm", PRODUCT]


class RecordedOps:
    """Plain torch, and the operations that were asked for: names, and the sources of products."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        operation = getattr(TorchOps(), name)

        def ask(*args, **named):
            self.asked.append(product_of(*args) if name == "product" else name)
            return operation(*args, **named)

        return ask


def product_of(source, matrix, epilogue):
    gate = "" if epilogue.activation is None else ", then a gate"
    return f"product of {type(source).__name__}{gate}"


@pytest.fixture
def asked_by(paged_run, random_sequences):
    """(tp) -> the operations of one prefill, and those of the argmax."""

    def run(tp):
        config = parse_model_config(
            {
                "architectures": ["Qwen3ForCausalLM"],
                "vocab_size": 131,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": NUM_LAYERS,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "max_position_embeddings": 96,
            }
        )
        ops = RecordedOps()
        stage = build_stage(
            config,
            range(NUM_LAYERS),
            is_first=True,
            is_last=True,
            tp=tp,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_model_len=96,
            attention=TorchPagedAttention(),
            ops=ops,
        )
        load_dummy_weights(stage.parameters(), 1, lambda progress: None)
        paged_run([stage], random_sequences((5, 2))).prefill()
        prefill, ops.asked = ops.asked, []
        stage.argmax_tokens(stage.rank_logits(torch.ones(2, 32), stage.new_logits(2)))
        return prefill, ops.asked

    return run


def test_norms_and_gates_are_asked_for_with_the_products_beside_them(asked_by):
    prefill, likeliest = asked_by(SingleRank())
    layer = [NORMED, "rotate_and_store", PRODUCT, f"{NORMED}, then a gate", PRODUCT]
    assert prefill == layer * NUM_LAYERS + HEAD
    assert likeliest == [*HEAD, "greedy_tokens"]


def test_of_several_ranks_norms_go_with_the_sum_over_them(asked_by, on_tensor_parallel_ranks):
    summed = ["sum_and_norm"]
    attention = [PRODUCT, "rotate_and_store", PRODUCT]
    mlp = [*summed, f"{PRODUCT}, then a gate", PRODUCT]
    first = [NORMED, *attention[1:], *mlp]  # nothing is to be summed yet
    later = [*summed, *attention, *mlp]
    expected = [*first, *chain.from_iterable([later] * (NUM_LAYERS - 1)), *HEAD]
    for prefill, likeliest in on_tensor_parallel_ranks(2, asked_by):
        assert prefill == expected
        assert likeliest == [*HEAD, "greedy_tokens"]
