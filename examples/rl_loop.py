"""A toy reinforcement-learning loop: `python -m examples.rl_loop [ITERATIONS]`, on CPUs or GPUs.

A random little model is served by two pipeline stages; this process trains the same model. Each
round samples completions from the workers, rewards those with many even tokens, lets the workers
sleep while one REINFORCE step (Williams, 1992) uses the memory, and sends them the new weights when
they wake. The reward rises.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rpc_schema.config import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from worker_client.driver import Driver
from worker_client.launcher import LocalDaemons
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.trainer.sender import WeightSender
from worker_client.worker_group import WorkerGroup

PROMPT = (1, 2, 3, 4)
NUM_SAMPLES = 32
NUM_TOKENS = 12
LEARNING_RATE = 3e-3


@dataclass
class Serving:
    """Return the configuration of the workers that serve the policy."""

    group: WorkerGroup
    driver: Driver


def main() -> None:
    iterations = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    devices = ["cuda:0", "cuda:1"] if torch.cuda.device_count() > 1 else ["cpu", "cpu"]
    parallel = ParallelConfig(pipeline_parallel_size=len(devices))
    with tempfile.TemporaryDirectory() as root:
        policy = make_policy(Path(root) / "policy")
        config = WorkerConfig(
            parallel=parallel,
            model=ModelConfig(
                model=str(Path(root) / "policy"), dtype="float32", enable_sleep_mode=True
            ),
            scheduler=SchedulerConfig(max_num_seqs=NUM_SAMPLES, max_num_batched_tokens=512),
            cache=CacheConfig(kv_cache_memory_bytes=32 << 20),
        )
        with (
            LocalDaemons(devices, Path(root)) as daemons,
            WorkerGroup(daemons.endpoints, parallel) as group,
        ):
            group.attach()
            scheduler = Scheduler(scheduler_limits(group.prepare(config), config))
            serving = Serving(group, Driver(group, scheduler))
            for number, reward in enumerate(train(serving, policy, iterations)):
                sys.stdout.write(f"round {number}: mean reward {reward:.3f}\n")


def make_policy(directory: Path) -> PreTrainedModel:
    """Return a random model, and write its checkpoint for the workers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=None,
    )
    policy = LlamaForCausalLM(config).float()
    policy.save_pretrained(directory)
    return policy


def train(serving: Serving, policy: PreTrainedModel, iterations: int) -> list[float]:
    """Train the policy, and keep the workers' weights equal to it; return the mean reward of each
    round. gloo sends host memory and works on any machine; nccl and ipc are for GPUs."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
    rewards = []
    with WeightSender(serving.group, "gloo") as sender:
        for number in range(iterations):
            samples = sample(serving.driver, seed=number)
            serving.group.memory.sleep(2)  # new weights follow, so the old ones need not be kept
            rewards.append(step(policy, optimizer, samples))
            serving.group.memory.wake_up(["weights"])
            sender.send(policy.state_dict())
            serving.group.memory.wake_up(["kv_cache"])
    return rewards


def sample(driver: Driver, seed: int) -> Tensor:
    """Return completions of the prompt: int64 [NUM_SAMPLES, NUM_TOKENS]."""
    for number in range(NUM_SAMPLES):
        driver.add_request(
            GenerationRequest(
                id=f"{seed}/{number}",
                prompt=np.array(PROMPT, np.int32),
                max_tokens=NUM_TOKENS,
                sampling=SamplingParams(
                    temperature=1.0, seed=seed * NUM_SAMPLES + number, ignore_eos=True
                ),
            )
        )
    return torch.tensor([output.token_ids for output in driver.run()])


def reward_of(samples: Tensor) -> Tensor:
    """Return the share of even tokens: float32 [NUM_SAMPLES]."""
    return (samples % 2 == 0).float().mean(dim=1)


def step(policy: PreTrainedModel, optimizer: torch.optim.Optimizer, samples: Tensor) -> float:
    """Take one REINFORCE step with the mean reward as baseline; return the samples' mean reward."""
    rewards = reward_of(samples)
    sequences = torch.cat([torch.tensor([PROMPT] * len(samples)), samples], dim=1)
    logits = policy(sequences[:, :-1]).logits[:, len(PROMPT) - 1 :]
    chosen = logits.log_softmax(-1).gather(-1, samples.unsqueeze(-1)).squeeze(-1)
    loss = -((rewards - rewards.mean()).unsqueeze(1) * chosen).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return rewards.mean().item()


def greedy(driver: Driver, prompt: Sequence[int], count: int) -> list[int]:
    """Return the workers' greedy continuation."""
    request = GenerationRequest(
        id="greedy",
        prompt=np.array(prompt, np.int32),
        max_tokens=count,
        sampling=SamplingParams(ignore_eos=True),
    )
    driver.add_request(request)
    (output,) = driver.run()
    return list(output.token_ids)


if __name__ == "__main__":
    main()
