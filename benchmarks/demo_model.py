"""Makes a small checkpoint in Hugging Face format: deterministic, in seconds, without downloading
or training anything.

The weights are written down, not learnt. Token embeddings are orthonormal, and the LM head holds
the logarithms of how often one token follows another in the sentences below, so that the model
continues a prompt with words that follow each other there. Attention and MLP weights are random and
small: every layer computes, none disturbs that.
"""

import argparse
import itertools
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SENTENCES = """\
A worker daemon keeps the weights of a model on the GPU and waits for a driver.
The driver decides which requests run in a step and sends one small message to every daemon.
The daemon runs the step, samples a token for each request and answers with the tokens.
When the driver dies, the daemon keeps the weights and the cache until a new driver attaches.
A new driver finds the model loaded and goes on at once.
Each stage of the pipeline receives hidden states from the stage before and sends them to the next
stage. The last stage samples the tokens and returns them to the first stage without the driver.
A request gets a slot when it is admitted and keeps the slot until it is finished.
The cache is cut into blocks, and a table says which blocks belong to a request.
Nothing warm is lost, and no message can carry code.
"""

HIDDEN_SIZE = 512
NUM_LAYERS = 4
NUM_HEADS = 8
NUM_KV_HEADS = 4
INTERMEDIATE_SIZE = 512
VOCAB_SIZE = 448
MAX_POSITIONS = 1024


def make_demo_model(directory: Path) -> None:
    """Write config.json, model.safetensors and tokenizer.json to directory; the same bytes every
    time."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps(_config(), indent=2) + "\n")
    save_file(_weights(tokenizer), directory / "model.safetensors", metadata={"format": "pt"})


def _train_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    printable = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]  # ByteLevel's own letters
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<eos>"],
        initial_alphabet=printable,
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES.splitlines(), trainer)
    return tokenizer


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": 0,
    }


def _weights(tokenizer: Tokenizer) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    basis = torch.linalg.qr(random(HIDDEN_SIZE, HIDDEN_SIZE, scale=1.0)).Q
    embedding = basis[:VOCAB_SIZE].contiguous()
    # The final norm scales a unit vector by sqrt(HIDDEN_SIZE).
    head = _log_follow(tokenizer).T @ embedding / HIDDEN_SIZE**0.5
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(HIDDEN_SIZE),
        "lm_head.weight": head.contiguous(),
    }
    kv_size = HIDDEN_SIZE // NUM_HEADS * NUM_KV_HEADS
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": torch.ones(HIDDEN_SIZE),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN_SIZE),
            f"{prefix}.self_attn.q_proj.weight": random(HIDDEN_SIZE, HIDDEN_SIZE, scale=0.02),
            f"{prefix}.self_attn.k_proj.weight": random(kv_size, HIDDEN_SIZE, scale=0.02),
            f"{prefix}.self_attn.v_proj.weight": random(kv_size, HIDDEN_SIZE, scale=0.02),
            f"{prefix}.self_attn.o_proj.weight": random(HIDDEN_SIZE, HIDDEN_SIZE, scale=1e-4),
            f"{prefix}.mlp.gate_proj.weight": random(INTERMEDIATE_SIZE, HIDDEN_SIZE, scale=0.02),
            f"{prefix}.mlp.up_proj.weight": random(INTERMEDIATE_SIZE, HIDDEN_SIZE, scale=0.02),
            f"{prefix}.mlp.down_proj.weight": random(HIDDEN_SIZE, INTERMEDIATE_SIZE, scale=1e-4),
        }
    return weights


def _log_follow(tokenizer: Tokenizer) -> torch.Tensor:
    """Return float32 [VOCAB_SIZE, VOCAB_SIZE]: the logarithm of how likely column follows row,
    smoothed a little."""
    counts = torch.full((VOCAB_SIZE, VOCAB_SIZE), 1e-5)
    end = tokenizer.token_to_id("<eos>")
    for sentence in SENTENCES.splitlines():
        ids = [*tokenizer.encode(sentence).ids, end]
        for first, second in itertools.pairwise(ids):
            counts[first, second] += 1
    return torch.log(counts / counts.sum(dim=1, keepdim=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    make_demo_model(parser.parse_args().directory)


if __name__ == "__main__":
    main()
