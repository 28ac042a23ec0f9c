"""Prompts with embeddings on a GPU: the tokens are transformers', other steps replay their graphs
as without the feature, and a step of embeddings takes no more memory than one of tokens."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.stage_driver import MAX_NUM_BATCHED_TOKENS, StageDriver, wait
from rpc_schema.codec import decode_step
from rpc_schema.prompt_embeds import EmbeddedRange, PromptEmbeds
from tests.support.embedded_prompts import EmbeddedPrompt
from tests.support.gpu_generation import SHARED_CACHE, generate, gpu_group, make_requests
from worker_daemon.runner.cuda_graph import GraphedProgram

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HIDDEN = 1024
MAX_TOKENS = 32
MIB = 1 << 20


def embedded_prompts(seed, dtype):
    """One for each kind, some of them longer than a step."""
    rng = np.random.default_rng(seed)
    for index, (num_tokens, num_rows, at) in enumerate(
        [
            (0, 40, ()),
            (30, 25, ()),
            (60, 700, ((20, 700),)),
            (300, 300, ((10, 150), (400, 150))),
            (9, 1, ((4, 1),)),
            (20, 20, ((20, 20),)),
        ]
    ):
        rows = torch.from_numpy(rng.standard_normal((num_rows, HIDDEN), np.float32) * 0.04)
        tokens = rng.integers(3, 8192, num_tokens).tolist()
        yield f"e{index}", EmbeddedPrompt(tokens, rows.to(dtype), at)


@torch.inference_mode()
def expected_tokens(checkpoint, prompt, generated):
    """Return transformers' most likely token after each token, in float32."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    whole = prompt.whole(SimpleNamespace(model=model))
    model.to("cuda:0")
    tail = model.get_input_embeddings()(torch.tensor(generated, device="cuda:0"))
    embeds = torch.cat([whole.to("cuda:0"), tail])[None]
    logits = model(inputs_embeds=embeds).logits[0].float()
    return logits[whole.shape[0] - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("of_upload", [torch.float32, torch.bfloat16])
def test_embedded_prompts_among_others_in_float32(llama, of_upload):
    prompts = dict(embedded_prompts(3, of_upload))
    plain = make_requests(24, seed=4, max_tokens=MAX_TOKENS)
    embedded = [
        prompt.request(name, MAX_TOKENS, ignore_eos=True) for name, prompt in prompts.items()
    ]
    with gpu_group(llama, 1, 1, "float32") as (_, group, model):
        alone = generate(group, model, plain)
        both = generate(group, model, [*plain, *embedded])
        (status,) = group.get_status()
    assert int(status.providers["graphs"]) > 0
    assert status.upload_bytes == 0
    for request in plain:
        assert both[request.id].token_ids == alone[request.id].token_ids
    for name, prompt in prompts.items():
        tokens = both[name].token_ids
        assert len(tokens) == MAX_TOKENS
        assert tokens == expected_tokens(llama, prompt, tokens), name


def test_a_step_of_embeddings_peaks_no_higher_and_captures_nothing(qwen3):
    length = MAX_NUM_BATCHED_TOKENS + 64
    driver = StageDriver(qwen3, "cuda:0", max_model_len=length, num_blocks=1024, cache=SHARED_CACHE)
    driver.load()
    driver.profile()
    uploads = {}
    driver.worker._find_upload = uploads.get
    driver.serve(driver.num_blocks)
    runner = driver.worker._serving.runner
    program = runner._program
    assert isinstance(program, GraphedProgram)
    num_graphs = len(program._graphs)
    assert {plan.parts for plan in program._graphs} == {0}
    length, width = MAX_NUM_BATCHED_TOKENS, runner.state.limits.hidden_size
    rows = np.random.default_rng(1).standard_normal((length, width), np.float32)
    embeds = PromptEmbeds(
        content_hash=bytes(32),
        dtype="float32",
        width=width,
        ranges=(EmbeddedRange(start=0, length=length),),
    )
    uploads[embeds.content_hash] = SimpleNamespace(dtype="float32", array=rows)
    peaks = []
    for extensions in ((), (embeds,), (), (embeds,)):
        driver.worker.on_attach()
        message, tokens = driver.prefill(np.arange(1), length, 8)
        (new,) = message.scheduled_new_reqs
        new = msgspec.structs.replace(new, extensions=extensions)
        message = msgspec.structs.replace(message, scheduled_new_reqs=(new,))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        wait(driver.worker.execute_model(message, [tokens]))
        peaks.append(torch.cuda.max_memory_allocated() - before)
        wait(driver.worker.execute_model(*one_decode(driver)))
    print(f"peaks of {length} tokens, plain and embedded in turn: {[p / MIB for p in peaks]} MiB")
    assert max(peaks[1], peaks[3]) <= max(peaks[0], peaks[2]) + MIB
    assert len(program._graphs) == num_graphs
    driver.leave()


def one_decode(driver):
    """A message that decodes the first row."""
    frames = driver.decode_frames(1)
    return decode_step(frames), frames[1:]
