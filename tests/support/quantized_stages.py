"""Stages of a checkpoint on the CPU, of a rank that does not communicate, to load quantized weights
into."""

import torch

from worker_daemon.distributed.tp import SingleRank
from worker_daemon.layers.attention import NullAttention
from worker_daemon.layers.torch_ops import TorchOps
from worker_daemon.models.config import read_model_config
from worker_daemon.models.decoder import build_stage


class Elsewhere:
    """A rank that builds its shard but does not communicate."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def build(path, tp=None, layers=None, dtype=torch.float32):
    config = read_model_config(path)
    layers = layers or range(config.num_hidden_layers)
    return build_stage(
        config,
        layers,
        layers.start == 0,
        layers.stop == config.num_hidden_layers,
        tp or SingleRank(),
        dtype,
        torch.device("cpu"),
        16,
        NullAttention(),
        TorchOps(),
    )
