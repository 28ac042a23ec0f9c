"""The policy, its task, and an update by GRPO: "DeepSeekMath", Shao et al., 2024, section 4.1, with
the clipped ratio of PPO (Schulman et al., 2017)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from examples.grpo.run_files import GROUP_SIZE, MAX_TOKENS, Sample
from examples.grpo.task import EOS, VOCAB_SIZE

LEARNING_RATE: Final = 5e-3
CLIP: Final = 0.2
KL_WEIGHT: Final = 0.002
"""Weight of the distance from the first policy; 0 leaves it out."""
EPSILON: Final = 1e-4


class Learner:
    """A policy in training, and its optimizer's state."""

    def __init__(self, policy: PreTrainedModel, reference: PreTrainedModel) -> None:
        """reference: the first policy."""
        self.policy = policy
        self._reference = reference.requires_grad_(requires_grad=False)
        self._optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)

    @classmethod
    def load(cls, newest: Path, first: Path) -> "Learner":
        """Return that of a policy's directory, exactly as save() has left it."""
        learner = cls(*(LlamaForCausalLM.from_pretrained(path) for path in (newest, first)))
        learner.policy.train()
        state = _optimizer_file(newest)
        if state.exists():
            tensors = load_file(state)
            for name, parameter in learner.policy.named_parameters():
                learner._optimizer.state[parameter] = {
                    key: tensors[f"{name}/{key}"] for key in ("step", "exp_avg", "exp_avg_sq")
                }
        return learner

    def save(self, directory: Path) -> None:
        """Write the policy as a checkpoint, with the optimizer's state in a directory below."""
        disable_progress_bar()
        self.policy.save_pretrained(directory)
        tensors = {
            f"{name}/{key}": tensor
            for name, parameter in self.policy.named_parameters()
            for key, tensor in self._optimizer.state[parameter].items()
        }
        _optimizer_file(directory).parent.mkdir()
        save_file(tensors, _optimizer_file(directory))

    def update(self, samples: Sequence[Sample]) -> None:
        """Take one step. samples: those of each group one after the other."""
        batch = Batch.of(samples)
        chosen = batch.logprobs_under(self.policy)
        with torch.no_grad():
            first = batch.logprobs_under(self._reference)
        ratio = (chosen - batch.sampled).exp()
        gain = torch.minimum(
            ratio * batch.advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * batch.advantages
        )
        apart = first - chosen
        distance = apart.exp() - apart - 1  # unbiased, and never negative: Schulman's "k3"
        loss = -((gain - KL_WEIGHT * distance) * batch.mask).sum() / batch.mask.sum()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()


class Batch(NamedTuple):
    """Samples as tensors, one row each; behind the end of a completion is padding."""

    sequences: Tensor
    """int64 [samples, prompt + MAX_TOKENS]."""
    sampled: Tensor
    """float32 [samples, MAX_TOKENS]: log probabilities under the policies that have sampled."""
    mask: Tensor
    """float32 [samples, MAX_TOKENS]: 1 for each token."""
    advantages: Tensor
    """float32 [samples, 1]: rewards, normalized in each group."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "Batch":
        """Return the batch of these samples, whose prompts have one length."""
        rewards = torch.tensor([sample.reward for sample in samples]).view(-1, GROUP_SIZE)
        spread = rewards.std(dim=1, keepdim=True) + EPSILON
        advantages = (rewards - rewards.mean(dim=1, keepdim=True)) / spread
        return cls(
            torch.tensor([[*s.prompt, *_padded(s.token_ids, EOS)] for s in samples]),
            torch.tensor([_padded(s.logprobs, 0.0) for s in samples]),
            torch.tensor([_padded([1.0] * len(s.token_ids), 0.0) for s in samples]),
            advantages.view(-1, 1),
        )

    def logprobs_under(self, policy: PreTrainedModel) -> Tensor:
        """Return the tokens' log probabilities, float32 [samples, MAX_TOKENS]."""
        logits = policy(self.sequences[:, :-1]).logits[:, -MAX_TOKENS:]
        chosen = self.sequences[:, -MAX_TOKENS:, None]
        return logits.log_softmax(-1).gather(-1, chosen).squeeze(-1)


def make_policy(directory: Path) -> None:
    """Write a random policy, and no state of an optimizer."""
    disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    LlamaForCausalLM(config).float().save_pretrained(directory)


def _padded(values: Sequence[float], padding: float) -> list[float]:
    return [*values, *[padding] * (MAX_TOKENS - len(values))]


def _optimizer_file(directory: Path) -> Path:
    return directory / "optimizer" / "state.safetensors"
