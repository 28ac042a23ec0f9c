"""Makes a small checkpoint in Hugging Face format: deterministic, in seconds, without network,
training or torch. `python -m worker_client.cli.demo_model DIR` makes it alone.

The weights are constructed, not trained, and contain only the sentences below. In the first layer,
attention copies the token before the newest one, only by the rotary embedding. Each MLP unit stands
for a pair of consecutive tokens in the sentences, and votes for the token that follows there. For
other pairs the LM head votes by the newest token alone. So a prompt that begins like a sentence is
continued like it, which needs every layer and a correct KV cache. The other layers' weights are
random and too small to change the result.
"""

import argparse
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SENTENCES = """\
A worker daemon keeps the weights of a model on its GPU while drivers come and go.
The driver decides which requests run in a step and sends one small message to every daemon.
The daemon runs the step, samples a token for each request and answers with all of them.
When the driver dies, nothing warm is lost: the daemon waits for another one.
A new driver finds the model loaded and goes on at once.
Each stage receives hidden states from the stage before it and passes its own on.
The last stage returns the sampled tokens to the first without asking anybody.
A request gets a slot at its admission and has it until it is finished.
The cache is cut into blocks, and a table says which blocks belong to a request.
No message can carry code.
"""

HIDDEN_SIZE = 512
NUM_LAYERS = 4
NUM_HEADS = 8
NUM_KV_HEADS = 4
INTERMEDIATE_SIZE = 512
VOCAB_SIZE = 448
MAX_POSITIONS = 1024
EOS_TOKEN_ID = 0
ROPE_THETA = 10_000.0
SHARPNESS = 96.0
"""Distance of the attention score of the previous token above its neighbors'."""
ACTIVATION = 16.0
"""Activation of an MLP unit that is on."""
VOTE_LENGTH = 3.0
"""Factor by which a vote outweighs the tokens' own codes in the residual stream."""
VOTE = 20.0
"""Factor by which a vote outweighs the newest token's own, in the logits."""

Pair: TypeAlias = tuple[int, int]
"""Two tokens: the previous one and the newest."""
Matrix: TypeAlias = NDArray[np.float32]


def make_demo_model(directory: Path) -> None:
    """Write config.json, model.safetensors and tokenizer.json to directory; the same bytes every
    time."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps(_config(), indent=2) + "\n")
    _write_safetensors(directory / "model.safetensors", _weights(tokenizer))


def _write_safetensors(path: Path, tensors: Mapping[str, Matrix]) -> None:
    """Write float32 tensors in the format of safetensors: the length of a JSON header, the header,
    padded to 8 bytes, and the contents one after the other."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.astype("<f4").tobytes())


def _train_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    printable = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]  # the alphabet of ByteLevel
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
        "rope_theta": ROPE_THETA,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": EOS_TOKEN_ID,
    }


class Followers(NamedTuple):
    """The successors of each word in the sentences, with their counts."""

    singles: Matrix
    """float32 [VOCAB_SIZE, VOCAB_SIZE]: after a token; a little more than 0 everywhere."""
    pairs: Mapping[Pair, Counter[int]]
    """After a token, and the one before it."""


class Codes(NamedTuple):
    """The components of the residual stream: unit vectors, nearly orthogonal to each other."""

    tokens: Matrix
    """float32 [VOCAB_SIZE, HIDDEN_SIZE]: the newest token."""
    constant: Matrix
    """float32 [HIDDEN_SIZE]: the same for every token."""
    before: Matrix
    """float32 [VOCAB_SIZE, HIDDEN_SIZE]: the token before it."""
    after: Matrix
    """float32 [VOCAB_SIZE, HIDDEN_SIZE]: a vote for the next one."""


def _weights(tokenizer: Tokenizer) -> dict[str, Matrix]:
    generator = np.random.default_rng(0)

    def random(*shape: int, scale: float) -> Matrix:
        return generator.standard_normal(shape, np.float32) * np.float32(scale)

    basis = np.linalg.qr(random(HIDDEN_SIZE, HIDDEN_SIZE, scale=1.0)).Q
    codes = Codes(
        tokens=basis[:VOCAB_SIZE],
        constant=basis[VOCAB_SIZE],
        before=np.linalg.qr(random(HIDDEN_SIZE, HIDDEN_SIZE, scale=1.0)).Q[:VOCAB_SIZE],
        after=np.linalg.qr(random(HIDDEN_SIZE, HIDDEN_SIZE, scale=1.0)).Q[:VOCAB_SIZE],
    )
    follow = _followers(tokenizer)
    head = _log_shares(follow.singles).T @ codes.tokens + codes.after * VOTE
    weights = {
        "model.embed_tokens.weight": codes.tokens + codes.constant,
        "model.norm.weight": _ones(HIDDEN_SIZE),
        "lm_head.weight": head / HIDDEN_SIZE**0.5,
    }
    kv_size = HIDDEN_SIZE // NUM_HEADS * NUM_KV_HEADS
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": _ones(HIDDEN_SIZE),
            f"{prefix}.post_attention_layernorm.weight": _ones(HIDDEN_SIZE),
            f"{prefix}.self_attn.q_proj.weight": random(HIDDEN_SIZE, HIDDEN_SIZE, scale=0.02),
            f"{prefix}.self_attn.k_proj.weight": random(kv_size, HIDDEN_SIZE, scale=0.02),
            f"{prefix}.self_attn.v_proj.weight": random(kv_size, HIDDEN_SIZE, scale=0.02),
            f"{prefix}.self_attn.o_proj.weight": random(HIDDEN_SIZE, HIDDEN_SIZE, scale=1e-4),
            f"{prefix}.mlp.gate_proj.weight": random(INTERMEDIATE_SIZE, HIDDEN_SIZE, scale=0.02),
            f"{prefix}.mlp.up_proj.weight": random(INTERMEDIATE_SIZE, HIDDEN_SIZE, scale=0.02),
            f"{prefix}.mlp.down_proj.weight": random(HIDDEN_SIZE, INTERMEDIATE_SIZE, scale=1e-4),
        }
    names = random(VOCAB_SIZE, kv_size, scale=kv_size**-0.5)
    weights |= _copying_attention(codes, names) | _voting_mlp(codes, follow.pairs)
    return {name: np.ascontiguousarray(weight, np.float32) for name, weight in weights.items()}


def _ones(size: int) -> Matrix:
    return np.ones(size, np.float32)


def _copying_attention(codes: Codes, names: Matrix) -> dict[str, Matrix]:
    """Return layer 0's attention: one query head of each group looks one position back. names:
    float32 [VOCAB_SIZE, kv_size], the code of each token in a value."""
    head_size = HIDDEN_SIZE // NUM_HEADS
    group = NUM_HEADS // NUM_KV_HEADS
    # Length of a normed embedding's parts, which are two of equal length.
    constant = codes.constant / (HIDDEN_SIZE / 2) ** 0.5
    angles = ROPE_THETA ** (-np.arange(0, head_size, 2) / head_size)
    # A query rotated back by one position has angle 0 to the previous key in every pair.
    query = SHARPNESS * np.concatenate([np.cos(angles), -np.sin(angles)])
    key = np.concatenate([np.ones(head_size // 2), np.zeros(head_size // 2)])
    first_of_group = np.arange(NUM_HEADS) % group == 0
    values = names.T @ codes.tokens / (HIDDEN_SIZE / 2) ** 0.5
    told = np.linalg.pinv(names) @ codes.before  # [kv_size, HIDDEN_SIZE]
    output = np.zeros((HIDDEN_SIZE, NUM_KV_HEADS, group, head_size))
    output[:, :, 0] = told.T.reshape(HIDDEN_SIZE, NUM_KV_HEADS, head_size)
    prefix = "model.layers.0.self_attn"
    return {
        f"{prefix}.q_proj.weight": np.outer(np.outer(first_of_group, query), constant),
        f"{prefix}.k_proj.weight": np.outer(np.tile(key, NUM_KV_HEADS), constant),
        f"{prefix}.v_proj.weight": values,
        f"{prefix}.o_proj.weight": output.reshape(HIDDEN_SIZE, HIDDEN_SIZE),
    }


def _voting_mlp(codes: Codes, pairs: Mapping[Pair, Counter[int]]) -> dict[str, Matrix]:
    """Return layer 0's MLP: unit i is on if the newest tokens are pair i, and votes for the next
    token."""
    gate = np.zeros((INTERMEDIATE_SIZE, HIDDEN_SIZE))
    down = np.zeros((HIDDEN_SIZE, INTERMEDIATE_SIZE))
    assert len(pairs) <= INTERMEDIATE_SIZE, "the sentences are too long for the model"
    told = (HIDDEN_SIZE // NUM_HEADS * NUM_KV_HEADS) / VOCAB_SIZE  # of a token's code, by attention
    length = (
        2 + told
    ) ** 0.5  # of newest token, constant and token before, by which the norm divides
    for unit, ((before, newest), followers) in enumerate(pairs.items()):
        both = codes.tokens[newest] + codes.before[before] / told
        gate[unit] = both - 1.5 * codes.constant
        shares = [count / followers.total() for count in followers.values()]
        votes = 1 + np.log(shares) / VOTE
        down[:, unit] = votes @ codes.after[list(followers)]
    scale = length / HIDDEN_SIZE**0.5
    prefix = "model.layers.0.mlp"
    return {
        f"{prefix}.gate_proj.weight": gate * scale * 2 * ACTIVATION,
        f"{prefix}.up_proj.weight": np.tile(codes.constant, (INTERMEDIATE_SIZE, 1)) * scale,
        f"{prefix}.down_proj.weight": down * VOTE_LENGTH / ACTIVATION,
    }


def _followers(tokenizer: Tokenizer) -> Followers:
    """Count the tokens that follow each token and each pair of tokens in the sentences. A first
    token counts as its own predecessor, since attention finds nothing else."""
    singles = np.full((VOCAB_SIZE, VOCAB_SIZE), 1e-5, np.float32)
    pairs: dict[Pair, Counter[int]] = defaultdict(Counter)
    sentences = [tokenizer.encode(sentence).ids for sentence in SENTENCES.splitlines()]
    for ids in sentences:
        pairs[ids[0], ids[0]][ids[1]] += 1
    text = [token for ids in sentences for token in (*ids, EOS_TOKEN_ID)]
    for newest, after in itertools.pairwise(text):
        singles[newest, after] += 1
    for before, newest, after in zip(text, text[1:], text[2:], strict=False):
        pairs[before, newest][after] += 1
    return Followers(singles, pairs)


def _log_shares(counts: Matrix) -> Matrix:
    shares: Matrix = np.log(counts / counts.sum(axis=1, keepdims=True))
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    make_demo_model(parser.parse_args().directory)


if __name__ == "__main__":
    main()
