"""The text model of a multimodal checkpoint, served by daemons: its tokens, an update from another
checkpoint's files, and one from a trainer, by the names of the whole model."""

import pytest
import torch

from rpc_schema.errors import ConfigError
from rpc_schema.weight_transfer import DiskEngine, DiskSource
from tests.support.checkpoints import MAX_LEN, VOCAB_SIZE, Checkpoint, decisive_prompts
from tests.support.published import PUBLISHED, random_model, save_published, shrunk
from tests.support.serving import assert_greedy, generate, greedy_request
from worker_client.trainer.sender import WeightSender
from worker_client.wire.worker_client import TensorList

TOKENS = 8
LENGTHS = (9, 25)


@pytest.fixture(scope="module")
def gemma(model_root):
    """seed -> a small copy of google/gemma-3-4b-it."""

    def make(seed):
        config = shrunk(PUBLISHED["google/gemma-3-4b-it"])
        fields = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_LEN}
        config["text_config"] = config["text_config"] | fields
        model = random_model(config, seed)
        with torch.no_grad():  # otherwise tied embeddings repeat the last token
            model.get_input_embeddings().weight.mul_(0.1)
        path = model_root / f"gemma-3-{seed}"
        save_published(model, path, config, max_shard_size="200KB")
        return Checkpoint(path, model)

    return make


def requests_for(model):
    prompts = decisive_prompts(model, 5, LENGTHS, TOKENS)
    return [greedy_request(f"r{index}", each, TOKENS) for index, each in enumerate(prompts)]


def test_tokens_and_updates(serve, gemma):
    old, new, last = gemma(1), gemma(2), gemma(3)
    trained = dict(last.model.state_dict())
    with serve(old.path, 2, 2) as (group, loaded):
        assert_greedy(generate(group, loaded, asked := requests_for(old)), old, asked)
        group.weights.init_transfer_engine(DiskEngine())
        group.weights.start_update()
        group.weights.update(TensorList(), DiskSource(model=str(new.path)))
        group.weights.finish_update()
        assert_greedy(generate(group, loaded, asked := requests_for(new)), new, asked)
        with WeightSender(group, "gloo", timeout_s=20.0) as sender:
            with pytest.raises(ConfigError, match="vision_tower"):
                sender.send(trained)
            text = {name: each for name, each in trained.items() if ".language_model." in name}
            sender.send(text)
        assert_greedy(generate(group, loaded, asked := requests_for(last)), last, asked)
        group.weights.reload()
        assert_greedy(generate(group, loaded, asked := requests_for(old)), old, asked)
