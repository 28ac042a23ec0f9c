"""Published checkpoints: config.json is accepted, and a small copy of each gives the logits of the
model that transformers builds from the same file."""

import pytest
import torch

from tests.support.published import (
    PUBLISHED,
    VOCAB_SIZE,
    random_model,
    save_published,
    shrunk,
    with_factors,
)
from worker_daemon.models.config import parse_model_config

PROMPT_LEN, NUM_DECODES = 40, 3
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
"""What the model cards of Qwen2.5 and Qwen3 tell users to add for long prompts."""
VARIANTS = {
    **PUBLISHED,
    "Qwen/Qwen2.5-7B-Instruct with YaRN": PUBLISHED["Qwen/Qwen2.5-7B-Instruct"]
    | {"rope_scaling": YARN},
    "Qwen/Qwen3-8B with YaRN": PUBLISHED["Qwen/Qwen3-8B"]
    | {"rope_scaling": {"rope_type": YARN["type"]} | YARN},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_file_is_accepted(name):
    published = PUBLISHED[name]
    text = published.get("text_config", published)
    config = parse_model_config(with_factors(published, 48))
    assert config.num_hidden_layers == text["num_hidden_layers"]
    assert config.hidden_size == text["hidden_size"]
    assert config.dtype == (published.get("dtype") or published.get("torch_dtype"))
    assert config.generates
    eos = published.get("eos_token_id", list(config.eos_token_ids))
    assert list(config.eos_token_ids) == (eos if isinstance(eos, list) else [eos])


@pytest.mark.parametrize("name", VARIANTS)
def test_a_small_copy_gives_the_logits_of_transformers(tmp_path, stages_of, paged_run, name):
    config = shrunk(VARIANTS[name])
    model = random_model(config)
    save_published(model, tmp_path, config)
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(1, VOCAB_SIZE, (1, PROMPT_LEN + NUM_DECODES), generator=generator)
    run = paged_run(stages_of(tmp_path), [ids[0].numpy()])
    parts = [run.step([PROMPT_LEN]), *(run.step([1]) for _ in range(NUM_DECODES))]
    with torch.no_grad():
        expected = model(ids).logits[0].log_softmax(-1)
    ours = torch.cat(parts).float().log_softmax(-1)
    assert (ours - expected).abs().max().item() <= 2e-4
