"""Small random checkpoints under the names of models that vLLM's own tests use, in a cache of
huggingface_hub."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 2048
HIDDEN_SIZE = 64
NUM_LAYERS = 2
NUM_HEADS = 4
NUM_KV_HEADS = 2
INTERMEDIATE_SIZE = 128
MAX_POSITIONS = 32_768
REVISION = "0" * 40
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_cache(directory: Path, names: Iterable[str], texts: Iterable[str]) -> None:
    """Make a cache, HF_HOME, with each name. texts: of which the tokenizer learns words."""
    made = directory / "random-model"
    _make_model(made, texts)
    for name in names:
        place = directory / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = place / "snapshots" / REVISION
        snapshot.mkdir(parents=True, exist_ok=True)
        (place / "refs").mkdir(exist_ok=True)
        (place / "refs" / "main").write_text(REVISION)
        for file in made.iterdir():
            link = snapshot / file.name
            link.unlink(missing_ok=True)
            link.hardlink_to(file)


def _make_model(directory: Path, texts: Iterable[str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    _train_tokenizer(texts).save(str(directory / "tokenizer.json"))
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int, scale: float = 0.3) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    kv_size = HIDDEN_SIZE // NUM_HEADS * NUM_KV_HEADS
    weights = {
        "model.embed_tokens.weight": random(VOCAB_SIZE, HIDDEN_SIZE, scale=1.0),
        "model.norm.weight": torch.ones(HIDDEN_SIZE),
        "lm_head.weight": random(VOCAB_SIZE, HIDDEN_SIZE, scale=0.35),
    }
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": torch.ones(HIDDEN_SIZE),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN_SIZE),
            f"{prefix}.self_attn.q_proj.weight": random(HIDDEN_SIZE, HIDDEN_SIZE),
            f"{prefix}.self_attn.k_proj.weight": random(kv_size, HIDDEN_SIZE),
            f"{prefix}.self_attn.v_proj.weight": random(kv_size, HIDDEN_SIZE),
            f"{prefix}.self_attn.o_proj.weight": random(HIDDEN_SIZE, HIDDEN_SIZE),
            f"{prefix}.mlp.gate_proj.weight": random(INTERMEDIATE_SIZE, HIDDEN_SIZE),
            f"{prefix}.mlp.up_proj.weight": random(INTERMEDIATE_SIZE, HIDDEN_SIZE),
            f"{prefix}.mlp.down_proj.weight": random(HIDDEN_SIZE, INTERMEDIATE_SIZE),
        }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "intermediate_size": INTERMEDIATE_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<eos>",
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))


def _train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
