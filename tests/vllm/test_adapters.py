"""LoRA through vLLM: requests that name adapters have the tokens of our own driver and of
transformers with the adapter in its weights, beside others of the plain model."""

import contextlib
import shutil
from dataclasses import replace

import numpy as np
import pytest

from rpc_schema.config import LoraConfig
from tests.support.checkpoints import NearTie, prompts
from tests.support.flat_requests import changed
from tests.support.serving import generate, greedy_request
from tests.vllm.models import ATTENTION, merged, write_adapter
from tests.vllm.test_parity import as_vllm, tokens_of

NUM_TOKENS = 12
NAMES = ("", "all", "attention", "wide")
"""The plain model, and three adapters; two may share a step."""
OPTIONS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 3}


@pytest.fixture(scope="module")
def references(checkpoint, model_root):
    """Return the model of each name."""
    plain = checkpoint("Qwen3ForCausalLM", seed=61)
    added = {
        "all": write_adapter(model_root / "all", plain.model, 1),
        "attention": write_adapter(model_root / "attention", plain.model, 2, ATTENTION),
        "wide": write_adapter(model_root / "wide", plain.model, 3, rank=8),
    }
    return {"": plain} | {name: merged(plain, values) for name, values in added.items()}


@pytest.fixture(scope="module")
def asked(references):
    """Return requests of each model in turn, greedy and sampled, and the tokens of the greedy."""
    shared = prompts(1, [40])[0].tolist()
    requests, wanted = [], {}
    for index in range(16):
        name = NAMES[index % len(NAMES)]
        for seed in range(100 * index, 100 * index + 20):
            tail = prompts(seed, [(5, 70, 23)[index % 3]])[0].tolist()
            prompt = [*shared, *tail] if index % 2 else tail
            try:
                tokens = references[name].greedy(prompt, NUM_TOKENS)
            except NearTie:
                continue
            break
        request = greedy_request(f"{name}-{index}", prompt, NUM_TOKENS, ignore_eos=True)
        requests += [
            request,
            changed(request, id=f"{request.id}-sampled", temperature=0.9, seed=index),
        ]
        wanted[request.id] = tokens
    return requests, wanted


def name_of(request):
    return request.id.partition("-")[0]


def run(llm, requests, model_root, ids=None):
    """Return vLLM's outputs. ids: vLLM's of each adapter."""
    from vllm.lora.request import LoRARequest

    ids = ids or {name: index for index, name in enumerate(NAMES)}
    given = [as_vllm(each) for each in requests]
    adapters = [
        LoRARequest(name, ids[name], str(model_root / name)) if name else None
        for name in map(name_of, requests)
    ]
    outputs = llm.generate(
        [g[0] for g in given], [g[1] for g in given], use_tqdm=False, lora_request=adapters
    )
    return {request.id: output for request, output in zip(requests, outputs, strict=True)}


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 1)])
def test_requests_have_the_tokens_of_their_adapters(
    ours, engine, references, asked, model_root, pp, tp
):
    """Three adapters, of which two fit into a step; prefixes are shared within an adapter alone;
    few blocks, so that requests are preempted; adapters are loaded by name and unloaded."""
    requests, wanted = asked
    path = references[""].path
    lora = LoraConfig(max_loras=2, max_lora_rank=8, max_cpu_loras=3)
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    with ours(path, pp, tp, lora=lora, **sizes) as (group, loaded):
        features = {"": ()}
        for index, name in enumerate(NAMES[1:], 1):
            features[name] = (group.loras.add(name, index).extension,)
        adapted = [replace(each, features=features[name_of(each)]) for each in requests]
        expected = generate(group, loaded, adapted).tokens
    assert {name: expected[name] for name in wanted} == wanted
    with engine(path, pp, tp, num_gpu_blocks_override=24, **OPTIONS) as llm:
        assert tokens_of(run(llm, requests, model_root)) == expected
        again = run(llm, requests, model_root)
        assert tokens_of(again) == expected
        (loaded_ids,) = llm.collective_rpc("list_loras")
        assert loaded_ids == {1, 2, 3}
        assert llm.collective_rpc("remove_lora", args=(2,)) == [True]
        assert llm.collective_rpc("list_loras") == [{1, 3}]
        assert llm.reset_prefix_cache()
        assert tokens_of(run(llm, requests, model_root)) == expected


def test_ids_of_an_earlier_server_may_name_others(engine, references, asked, model_root):
    """The daemons still have the adapters of the last test under other ids."""
    requests, wanted = asked
    ids = {"": 0, "all": 3, "attention": 1, "wide": 2}
    options = {**OPTIONS, "settings": {"reload": False}, "num_gpu_blocks_override": 24}
    with engine(references[""].path, 2, **options) as llm:
        for _ in range(2):
            tokens = tokens_of(run(llm, requests, model_root, ids))
            assert {name: tokens[name] for name in wanted} == wanted


def test_a_later_server_reads_an_adapter_that_changed(engine, references, asked, model_root):
    """The daemons still have the former contents of the name, under the same id."""
    for file in (model_root / "attention").iterdir():
        shutil.copyfile(file, model_root / "wide" / file.name)
    requests = [
        each for each in asked[0] if name_of(each) == "wide" and not each.sampling.temperature
    ]
    wanted = {}
    for request in requests:
        with contextlib.suppress(NearTie):
            tokens = references["attention"].greedy(request.prompt, NUM_TOKENS)
            wanted[request.id] = tokens
    ids = {"": 0, "all": 3, "attention": 1, "wide": 2}
    options = {**OPTIONS, "settings": {"reload": False}, "num_gpu_blocks_override": 24}
    with engine(references[""].path, 2, **options) as llm:
        tokens = tokens_of(run(llm, requests, model_root, ids))
    assert wanted and {name: tokens[name] for name in wanted} == wanted


def test_embeddings_of_an_adapter(engine, references, asked, model_root):

    from vllm import PoolingParams
    from vllm.lora.request import LoRARequest

    from tests.support.pooling_reference import embedding, last_states
    from tests.vllm.models import write_tokenizer

    path = references[""].path
    write_tokenizer(path)
    texts = prompts(8, [5, 90, 30])
    own = LoRARequest("all", 1, str(model_root / "all"))
    with engine(path, runner="pooling", skip_tokenizer_init=False, **OPTIONS) as llm:
        for name, adapter in (("all", own), ("", None), ("all", own)):
            outputs = llm.encode(
                [{"prompt_token_ids": text.tolist()} for text in texts],
                PoolingParams(),
                pooling_task="embed",
                use_tqdm=False,
                lora_request=adapter,
            )
            for text, output in zip(texts, outputs, strict=True):
                wanted = embedding(last_states(references[name], text)[-1])
                np.testing.assert_allclose(
                    output.outputs.data.numpy(), wanted, rtol=1e-4, atol=1e-5
                )
