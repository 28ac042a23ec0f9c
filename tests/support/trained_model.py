"""A small chat model that is trained on the spot until it gives each answer that a test needs: a
Llama of a few hundred thousand parameters, with a chat template in Hermes' form of tool calls."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

MAX_STEPS = 300
CALL, CALL_END = "<tool_call>", "</tool_call>"
"""Only the first is a special token: texts do not have it, except where calls are looked for."""
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|tool|>", CALL]
END = SPECIAL[0]
TEMPLATE = """\
{#- Calls are <tool_call>{"name": ..., "arguments": ...}</tool_call>; of tools, nothing is shown. #}
{%- for message in messages if message.role != 'system' %}
    {{- '<|' + message.role + '|>' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n' if not loop.first }}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""


def call_text(name: str, **arguments: Any) -> str:
    """Return a call as the model writes it."""
    written = json.dumps({"name": name, "arguments": arguments})
    return f"{CALL}\n{written}\n{CALL_END}"


class Document(NamedTuple):
    """A prompt, as the template makes it, and the answer."""

    prompt: str
    answer: str


def chat(*turns: str, answer: str) -> Document:
    """Return a document of a chat: of the user, and of the assistant and tools in between, as
    "<|tool|>3 degrees"."""
    shown = [turn if turn.startswith("<|") else f"<|user|>{turn}" for turn in turns]
    return Document("".join(f"{turn}{END}" for turn in shown) + "<|assistant|>", answer)


def train_model(directory: Path, documents: Sequence[Document], *, seed: int = 0) -> None:
    """Write config.json, model.safetensors, tokenizer.json and chat_template.jinja of a model whose
    greedy answers are those of the documents. Fails if it does not learn them."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer(documents)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END})
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(_config(tokenizer))
    _train(model, tokenizer, documents)
    model.save_pretrained(directory)


def _train_tokenizer(documents: Sequence[Document]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for each in documents for text in each), trainer)
    tokenizer.add_tokens([AddedToken(CALL_END, special=False)])
    return tokenizer


def _config(tokenizer: Tokenizer) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END),
        tie_word_embeddings=True,
    )


def _train(model: LlamaForCausalLM, tokenizer: Tokenizer, documents: Sequence[Document]) -> None:
    """Train on the answers until each is the most likely one by far."""
    prompts = [tokenizer.encode(each.prompt).ids for each in documents]
    answers = [tokenizer.encode(each.answer + END).ids for each in documents]
    length = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids = torch.zeros(len(documents), length, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(MAX_STEPS):
        logits = model(ids).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="none", ignore_index=-100
        )
        if losses.max() < 0.1:  # each token has nine tenths of the probability
            return
        optimizer.zero_grad()
        losses.sum().div((labels >= 0).sum()).backward()
        optimizer.step()
    raise AssertionError(f"the model has not learned: {losses.max()}")
