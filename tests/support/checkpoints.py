"""Random tiny checkpoints in Hugging Face format, and transformers' results for them: the
independent reference.

    checkpoint = make_checkpoint(directory, "Qwen3ForCausalLM", rope=YARN, form=4, seed=3)
    checkpoint.path                       # pass it to serve()
    checkpoint.greedy([1, 2, 3], 16)      # the tokens of transformers' generate
    checkpoint.logprobs(token_ids)        # float32 [len(token_ids), vocab_size]
    prompts(seed, lengths)                # random token ids
    decisive_prompts(checkpoint, seed, lengths, 16)  # whose outputs are varied and clear
"""

import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import transformers

VOCAB_SIZE = 331
"""Odd, so that no shard has a round size."""

MAX_LEN = 192
INITIALIZER_RANGE = 0.16
"""Eight times the usual value, for decisive logits and varied outputs."""

MAX_TRIES = 40
LEAST_DISTINCT = 4
"""Minimum of different tokens in an output: random models tend to repeat themselves."""

LEAST_MARGIN = 1e-3
"""In nats, between a greedy token and the next best: far above the rounding of float32."""

DEFAULT: Mapping[str, object] = {"rope_type": "default"}
LINEAR: Mapping[str, object] = {"rope_type": "linear", "factor": 3.0}
DYNAMIC: Mapping[str, object] = {"rope_type": "dynamic", "factor": 2.0}
LLAMA3: Mapping[str, object] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
YARN: Mapping[str, object] = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 24,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
ROPES = {"default": DEFAULT, "linear": LINEAR, "dynamic": DYNAMIC, "llama3": LLAMA3, "yarn": YARN}

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

EXPERT_FIELDS: Mapping[str, Mapping[str, object]] = {
    "GptOssForCausalLM": {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 13},
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Qwen2MoeForCausalLM": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 56,
    },
    "Qwen3MoeForCausalLM": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
}
"""Sizes of small models, by architecture with experts."""

ENCODERS = ("Bert", "Roberta")
"""Suffixes of encoder family names."""

SIZES: Mapping[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": INITIALIZER_RANGE,
    "eos_token_id": None,
    "pad_token_id": 0,
}


_ROTATE_BY_LENGTH = frozenset(("dynamic", "longrope"))
"""Types of rotation that change with the tokens so far: a pass over all of them differs."""


def _rope_types(parameters: Mapping[str, object] | None) -> Iterator[object]:
    """Yield the types of rotation of a configuration, whose layers may have several."""
    for name, value in (parameters or {}).items():
        if name == "rope_type":
            yield value
        elif isinstance(value, Mapping):
            yield from _rope_types(value)


class NearTie(Exception):
    """A greedy token of the reference is not clearly the best: choose another seed."""


@dataclass
class Checkpoint:
    """A checkpoint directory and its model."""

    path: Path
    model: transformers.PreTrainedModel
    least_margin: float = LEAST_MARGIN
    _greedy: dict[tuple[object, ...], list[int]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.name

    def greedy(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        eos: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> list[int]:
        """Return the tokens of transformers' generate, which ends at one of `eos`; cached.

        Raises:
            NearTie: rounding could change them.
        """
        ids = tuple(int(token) for token in prompt)
        key = (ids, max_tokens, tuple(eos), min_tokens)
        if key not in self._greedy:
            ending = {"eos_token_id": list(eos), "min_new_tokens": min_tokens} if eos else {}
            self._greedy[key] = self._generate(ids, max_tokens, ending)
        return self._greedy[key]

    def expected(self, prompt: Sequence[int], max_tokens: int, found: Sequence[int]) -> list[int]:
        """Return the tokens that `found` must equal: those of greedy, whatever was found. One
        forward pass shows it, in a tenth of greedy's time, if each token that was found is clearly
        the best one after those before it."""
        key = (tuple(map(int, prompt)), max_tokens, (), 0)
        if key not in self._greedy and len(found) == max_tokens and self._are_best(prompt, found):
            self._greedy[key] = list(found)
        return self.greedy(prompt, max_tokens)

    def _are_best(self, prompt: Sequence[int], found: Sequence[int]) -> bool:
        """Say that tokens are those of greedy; False if one pass cannot show it."""
        rope = getattr(self.model.config.get_text_config(), "rope_parameters", None)
        may_stop = self.model.generation_config.eos_token_id is not None
        if may_stop or not _ROTATE_BY_LENGTH.isdisjoint(_rope_types(rope)):
            return False
        logprobs = self.logprobs([*map(int, prompt), *found])[len(prompt) - 1 : -1]
        best = logprobs.topk(2)
        margins = best.values[:, 0] - best.values[:, 1]
        is_clear = bool((margins >= self.least_margin).all())
        return is_clear and best.indices[:, 0].tolist() == list(found)

    def processed(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        processor: transformers.LogitsProcessor,
        eos: Sequence[int] = (),
    ) -> list[int]:
        """Return the tokens of generate with a logits processor. Raises NearTie as greedy does."""
        ids = tuple(int(token) for token in prompt)
        ending = {"eos_token_id": list(eos)} if eos else {}
        processors = transformers.LogitsProcessorList([processor])
        return self._generate(ids, max_tokens, {"logits_processor": processors, **ending})

    def embedded(self, embeds: torch.Tensor, max_tokens: int) -> list[int]:
        """Return the tokens of generate for a prompt of embeddings [tokens, hidden size]. Raises
        NearTie as greedy does."""
        return self._continue({"inputs_embeds": embeds[None]}, 0, max_tokens, {})

    def _generate(
        self, prompt: tuple[int, ...], max_tokens: int, ending: Mapping[str, object]
    ) -> list[int]:
        ids = torch.tensor([prompt])
        return self._continue({"input_ids": ids}, len(prompt), max_tokens, ending)

    def _continue(
        self,
        given: Mapping[str, torch.Tensor],
        num_given_ids: int,
        max_tokens: int,
        ending: Mapping[str, object],
    ) -> list[int]:
        (prompt,) = given.values()
        with torch.no_grad():
            output = self.model.generate(
                **given,
                attention_mask=torch.ones(prompt.shape[:2], dtype=torch.int64),
                do_sample=False,
                max_new_tokens=max_tokens,
                pad_token_id=0,
                output_scores=True,
                return_dict_in_generate=True,
                **ending,
            )
        best = torch.cat(output.scores).float().log_softmax(-1).topk(2).values
        margin = (best[:, 0] - best[:, 1]).min().item()
        if margin < self.least_margin:
            raise NearTie(f"{self.name}: margin {margin:.2g} after {prompt.shape[1]} tokens")
        return output.sequences[0, num_given_ids:].tolist()

    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return in row i the log probabilities, float32 [vocab_size], of the token after
        token_ids[i]."""
        return self.logits(token_ids).log_softmax(-1)

    def exact_logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return logprobs(token_ids), computed in float64: float32 is wrong by up to 1.3e-5."""
        return self._exact_logprobs(input_ids=torch.tensor([list(token_ids)]))

    def exact_logprobs_of(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Return exact_logprobs of a prompt of these embeddings, [tokens, hidden size]."""
        return self._exact_logprobs(inputs_embeds=embeddings.double().unsqueeze(0))

    def _exact_logprobs(self, **inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self._exact(**inputs).logits[0]
        return logits.log_softmax(-1)

    @cached_property
    def _exact(self) -> transformers.PreTrainedModel:
        exact = copy.deepcopy(self.model).double()
        exact.config._experts_implementation = "eager"  # the other ones have no float64
        return exact

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return in row i the logits, float32 [vocab_size], of the token after token_ids[i]."""
        with torch.no_grad():
            return self.model(torch.tensor([list(token_ids)])).logits[0].float()


def make_checkpoint(
    directory: Path,
    architecture: str = "LlamaForCausalLM",
    *,
    rope: Mapping[str, object] = DEFAULT,
    form: int = 5,
    seed: int = 0,
    max_shard_size: str = "1GB",
    **overrides: object,
) -> Checkpoint:
    """Make a float32 checkpoint in a new directory under `directory`.

    form: 5 or 4, the transformers release whose config.json format to write. overrides: fields of
    the configuration.
    """
    family = re.split("For[A-Z]|Model$", architecture)[0]
    model_class = getattr(transformers, architecture)
    if family.endswith(ENCODERS):
        return _make_encoder(directory, architecture, family, seed, overrides)
    if "hidden_size" in overrides:
        overrides.setdefault("head_dim", None)
    rotation: Mapping[str, object] = {"rope_theta": 10_000.0, **rope}
    if architecture == "Gemma3ForCausalLM":
        everywhere = {**LINEAR, "rope_theta": 50_000.0}
        rotation = {"sliding_attention": rotation, "full_attention": everywhere}
    config = model_class.config_class(
        **{**SIZES, **EXPERT_FIELDS.get(architecture, {}), **overrides},
        rope_parameters=rotation,
    )
    config.eos_token_id = overrides.get("eos_token_id")  # GLM's default is beyond this vocabulary
    torch.manual_seed(seed)
    model = model_class(config).float().eval()
    _randomise_vectors(model, seed)
    path = _new_directory(directory, f"{family}-{rope['rope_type']}-{form}-{seed}")
    model.save_pretrained(path, max_shard_size=max_shard_size)
    if form == 4:
        _write_transformers_4_form(path / "config.json")
    return Checkpoint(path, model)


def _make_encoder(
    directory: Path, architecture: str, family: str, seed: int, overrides: Mapping[str, object]
) -> Checkpoint:
    fields = {
        name: value for name, value in SIZES.items() if not name.startswith(("num_k", "head"))
    }
    config = getattr(transformers, f"{family}Config")(**{**fields, **overrides})
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)(config).float().eval()
    _randomise_vectors(model, seed)
    path = _new_directory(directory, f"{architecture}-{seed}")
    model.save_pretrained(path)
    return Checkpoint(path, model)


def edit_config(checkpoint: Checkpoint, **fields: object) -> None:
    """Change fields of config.json; the reference model does not change."""
    path = checkpoint.path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def _randomise_vectors(model: transformers.PreTrainedModel, seed: int) -> None:
    """Randomize biases and norms: their defaults of zeros and ones would hide a missing one."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.dim() == 1 or name.endswith("_bias"):  # those of stacked experts
                tensor.normal_(
                    1.0 if "norm" in name.lower() and "bias" not in name else 0.0,
                    0.2,
                    generator=generator,
                )


def _write_transformers_4_form(path: Path) -> None:
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))


def _new_directory(parent: Path, name: str) -> Path:
    number = len(list(parent.glob(f"{name}*")))
    path = parent / (name if number == 0 else f"{name}.{number}")
    path.mkdir(parents=True)
    return path


def prompts(seed: int, lengths: Iterable[int], vocab_size: int = VOCAB_SIZE) -> list[np.ndarray]:
    """Return random token ids, int32, one array for each length."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, length).astype(np.int32) for length in lengths]


def decisive_prompts(
    checkpoint: Checkpoint,
    seed: int,
    lengths: Iterable[int],
    max_tokens: int,
    *,
    prefix: Sequence[int] = (),
) -> list[np.ndarray]:
    """Return random token ids after `prefix`, one array for each total length, such that
    greedy(prompt, max_tokens) has no near tie and no short loop, and does not end before."""
    rng = np.random.default_rng(seed)

    def draw(length: int) -> np.ndarray:
        for _ in range(MAX_TRIES):
            tail = rng.integers(0, VOCAB_SIZE, length - len(prefix))
            prompt = np.concatenate((np.asarray(prefix, np.int64), tail)).astype(np.int32)
            if _tells_something(checkpoint, prompt.tolist(), max_tokens):
                return prompt
        raise NearTie(f"{checkpoint.name}: none of {MAX_TRIES} prompts of {length} is decisive")

    return [draw(length) for length in lengths]


def _tells_something(checkpoint: Checkpoint, prompt: list[int], max_tokens: int) -> bool:
    try:
        tokens = checkpoint.greedy(prompt, max_tokens)
    except NearTie:
        return False
    return len(tokens) == max_tokens and len(set(tokens)) >= min(max_tokens, LEAST_DISTINCT)
