"""Pooling on real daemons: outputs equal those of transformers and sentence-transformers for each
prompt alone, regardless of the other requests."""

import json
import random

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import edit_config, prompts
from tests.support.command_line import run_client, short_directory
from tests.support.doomed_driver import NUM_GPU_BLOCKS, Death
from tests.support.every_draft import every_draft
from tests.support.exhaustive import exhaustively
from tests.support.killed_driver import DriverNursery, Plan, begin
from tests.support.pooling_reference import (
    embedding,
    last_states,
    pair_scores,
    pooling_request,
    save_cross_encoder,
    scores,
    sentence_vectors,
    write_modules,
    write_tokenizer,
)
from tests.support.published import PUBLISHED, random_model, save_published, shrunk
from tests.support.serving import (
    LONG_LEASE,
    generate,
    greedy_request,
    scheduler_limits,
    worker_config,
)
from worker_client.driver import Driver
from worker_client.errors import RequestError
from worker_client.scheduler_output import NewRequest, SchedulerOutput
from worker_client.steps.masks import StepMasks
from worker_client.worker_group import WorkerGroup

LENGTHS = [3, 7, 40, 90, 1, 150, 33]
STEP = 48
"""Tokens of a step: fewer than of the longer prompts."""
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def make_prompts(seed, lengths=LENGTHS):
    """Without the lowest ids: RoBERTa counts no position for its padding token, 1."""
    return [np.maximum(prompt, 5) for prompt in prompts(seed, lengths)]


@pytest.mark.usefixtures("each_drafter")
@pytest.mark.parametrize("shape", [exhaustively((1, 1)), (2, 1), (1, 2)])
def test_embeddings_share_steps_with_generation(serve, checkpoint, shape):
    reference = checkpoint("Qwen3ForCausalLM", seed=3)
    texts = make_prompts(1)
    requests = []
    for index, prompt in enumerate(texts):
        requests += [
            pooling_request(f"e{index}", prompt, "embed"),
            greedy_request(f"g{index}", prompt, 6),
            pooling_request(
                f"t{index}", prompt, "token_embed", dimensions=5, use_activation=index % 2 == 0
            ),
        ]
    with serve(reference.path, *shape, max_num_batched_tokens=STEP) as (group, loaded):
        run = generate(group, loaded, requests)
    for index, prompt in enumerate(texts):
        states = last_states(reference, prompt)
        np.testing.assert_allclose(run.outputs[f"e{index}"].pooled, embedding(states[-1]), **CLOSE)
        tokens = embedding(states, 5, index % 2 == 0)
        np.testing.assert_allclose(run.outputs[f"t{index}"].pooled, tokens, **CLOSE)
        assert run.tokens[f"g{index}"] == reference.greedy(prompt.tolist(), 6)
        assert run.outputs[f"e{index}"].token_ids == []
    assert "mixed" in {record.kind for record in run.driver.records}


@pytest.mark.usefixtures("each_drafter")
def test_last_token_takes_prefix_hits_and_every_token_does_not(serve, checkpoint):
    reference = checkpoint("Qwen3ForCausalLM", seed=3)
    (shared, *tails) = make_prompts(2, [41, 5, 9, 1])
    texts = [np.concatenate((shared, tail)) for tail in tails]
    first = [greedy_request("first", shared, 2)]
    requests = [
        pooling_request(f"{task}{index}", prompt, task)
        for index, prompt in enumerate(texts)
        for task in ("embed", "token_embed")
    ]
    with serve(reference.path, block_size=4) as (group, loaded):
        scheduler = every_draft(scheduler_limits(group, loaded))
        generate(group, loaded, first, scheduler)
        run = generate(group, loaded, requests, scheduler)
    for index, prompt in enumerate(texts):
        states = last_states(reference, prompt)
        assert run.outputs[f"embed{index}"].num_cached_tokens == 40
        assert run.outputs[f"token_embed{index}"].num_cached_tokens == 0
        np.testing.assert_allclose(
            run.outputs[f"embed{index}"].pooled, embedding(states[-1]), **CLOSE
        )
        np.testing.assert_allclose(
            run.outputs[f"token_embed{index}"].pooled, embedding(states), **CLOSE
        )


def test_preempted_requests_begin_again(serve, checkpoint):
    """Requests that decode take the blocks of prompts that are computed in part."""
    reference = checkpoint("Qwen3ForCausalLM", seed=3)
    texts = make_prompts(3, [60, 70, 66, 50, 71, 44])
    decoding = [greedy_request(f"g{i}", p, 40) for i, p in enumerate(make_prompts(14, [9] * 5))]
    pooling = [
        pooling_request(f"{task}{index}", prompt, task)
        for index, prompt in enumerate(texts)
        for task in ("token_embed", "embed")
    ]
    with serve(reference.path, block_size=4, num_gpu_blocks=50) as (group, loaded):
        run = generate(group, loaded, [*decoding, *pooling], max_num_batched_tokens=16)
    assert sum(run.outputs[request.id].num_preemptions for request in pooling) > 0
    for index, prompt in enumerate(texts):
        states = last_states(reference, prompt)
        for task, expected in (("token_embed", states), ("embed", states[-1])):
            output = run.outputs[f"{task}{index}"]
            np.testing.assert_allclose(output.pooled, embedding(expected), **CLOSE)


@pytest.mark.parametrize("family", ["Llama", *map(exhaustively, ["Mistral", "Qwen2"]), "Qwen3"])
def test_classifiers_of_decoders(serve, checkpoint, family):
    texts = make_prompts(4)
    whole = checkpoint(f"{family}ForSequenceClassification", num_labels=3, pad_token_id=None)
    each = checkpoint(f"{family}ForTokenClassification", num_labels=5)
    for reference, task in ((whole, "classify"), (each, "token_classify")):
        requests = [
            pooling_request(f"{index}-{active}", prompt, task, use_activation=active)
            for index, prompt in enumerate(texts)
            for active in (None, False)
        ]
        with serve(reference.path, max_num_batched_tokens=STEP) as (group, loaded):
            run = generate(group, loaded, requests)
            assert not loaded.metadata.generates
        for index, prompt in enumerate(texts):
            logits = scores(reference, prompt)
            raw, likely = run.outputs[f"{index}-False"], run.outputs[f"{index}-None"]
            np.testing.assert_allclose(raw.pooled, logits.numpy(), **CLOSE)
            np.testing.assert_allclose(likely.pooled, logits.softmax(-1).numpy(), **CLOSE)


@pytest.mark.parametrize(
    ("problem", "labels", "activation"),
    [
        (None, 1, torch.sigmoid),
        ("multi_label_classification", 3, torch.sigmoid),
        ("regression", 1, lambda logits: logits),
    ],
)
def test_activation_is_that_of_the_problem(serve, checkpoint, problem, labels, activation):
    reference = checkpoint(
        "Qwen2ForSequenceClassification", num_labels=labels, problem_type=problem, pad_token_id=None
    )
    (prompt,) = make_prompts(5, [20])
    with serve(reference.path) as (group, loaded):
        run = generate(group, loaded, [pooling_request("a", prompt, "classify")])
    expected = activation(scores(reference, prompt)).numpy()
    np.testing.assert_allclose(run.outputs["a"].pooled, expected, **CLOSE)


IDENTITY, SOFTMAX = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Softmax"
SIGMOID = "torch.nn.modules.activation.Sigmoid"


@pytest.mark.parametrize(
    ("labels", "config", "saved_with"),
    [
        (1, {}, None),
        (1, {"sentence_transformers": {"activation_fn": IDENTITY, "version": "5.0"}}, None),
        (1, {"sbert_ce_default_activation_function": "torch.nn.Identity"}, None),
        (1, {"problem_type": "regression"}, "Sigmoid"),
        (3, {"sentence_transformers": {"activation_fn": SOFTMAX}}, "Identity"),
        (3, {"sentence_transformers": {"activation_fn": SOFTMAX}}, None),
        (3, {"sentence_transformers": {"version": "4.0"}}, None),
        (
            3,
            {
                "sentence_transformers": {"activation_fn": None},
                "sbert_ce_default_activation_function": SIGMOID,
            },
            None,
        ),
    ],
)
def test_scores_of_cross_encoders(serve, checkpoint, labels, config, saved_with):
    architecture = "XLMRobertaForSequenceClassification"
    reference = checkpoint(architecture, num_labels=labels, seed=labels)
    edit_config(reference, **config)
    write_tokenizer(reference.path, "XLMRoberta")
    if saved_with is not None:
        save_cross_encoder(reference.path, saved_with)
    expected = pair_scores(reference.path, [("w9 w10 w11", "w20 w21"), ("w7", "w30 w9 w100 w8")])
    requests = [
        pooling_request(f"{index}", prompt, "classify")
        for index, prompt in enumerate(expected.token_ids)
    ]
    with serve(reference.path, max_num_batched_tokens=160) as (group, loaded):
        run = generate(group, loaded, requests)
    for index, scores_of_pair in enumerate(expected.scores):
        np.testing.assert_allclose(run.outputs[f"{index}"].pooled, scores_of_pair, **CLOSE)


@pytest.mark.parametrize("shape", [exhaustively((1, 1)), (2, 2)])
def test_pairs_of_texts_have_token_types(serve, checkpoint, shape):
    reference = checkpoint("BertForSequenceClassification", num_labels=1, seed=4)
    write_tokenizer(reference.path, "Bert")
    pairs = [("w9 w10 w11", "w20 w21"), ("w7", "w30 w9 w100 w8"), ("w40 w41", "w9")]
    expected = pair_scores(reference.path, pairs)
    assert all(expected.second_starts)
    requests = [
        pooling_request(f"{index}", prompt, "classify", second_start=start)
        for index, (prompt, start) in enumerate(
            zip(expected.token_ids, expected.second_starts, strict=True)
        )
    ]
    prompt = expected.token_ids[1]
    starts = [None, 0, 1, len(prompt) - 1, len(prompt)]
    requests += [
        pooling_request(f"of {start}", prompt, "classify", use_activation=False, second_start=start)
        for start in starts
    ]
    with serve(reference.path, *shape, max_num_batched_tokens=160) as (group, loaded):
        run = generate(group, loaded, requests)
        for wrong in (len(prompt) + 1, -1):
            driver = Driver(group, every_draft(scheduler_limits(group, loaded)))
            with pytest.raises(RequestError, match="second_start"):
                driver.add_request(pooling_request("w", prompt, "classify", second_start=wrong))
    for index, scores_of_pair in enumerate(expected.scores):
        np.testing.assert_allclose(run.outputs[f"{index}"].pooled, scores_of_pair, **CLOSE)
    for start in starts:
        types = torch.arange(len(prompt)) >= (len(prompt) if start is None else start)
        with torch.no_grad():
            logits = reference.model(torch.tensor([prompt]), token_type_ids=types.long()[None])
        np.testing.assert_allclose(
            run.outputs[f"of {start}"].pooled, logits.logits[0].numpy(), **CLOSE
        )


@pytest.mark.parametrize(
    ("architecture", "shape"),
    [
        ("BertForSequenceClassification", (1, 1)),
        ("RobertaForSequenceClassification", (2, 1)),
        ("XLMRobertaForTokenClassification", (1, 2)),
        ("BertForTokenClassification", (2, 2)),
    ],
)
def test_classifiers_of_encoders(serve, checkpoint, architecture, shape):
    reference = checkpoint(architecture, num_labels=4)
    task = "token_classify" if "Token" in architecture else "classify"
    texts = make_prompts(6)
    requests = [pooling_request(f"{i}", p, task, use_activation=False) for i, p in enumerate(texts)]
    with serve(reference.path, *shape, max_num_batched_tokens=160) as (group, loaded):
        run = generate(group, loaded, requests)
        assert loaded.kv_cache[0].size_bytes == 0
    for index, prompt in enumerate(texts):
        expected = scores(reference, prompt).numpy()
        np.testing.assert_allclose(run.outputs[f"{index}"].pooled, expected, **CLOSE)


@pytest.mark.parametrize(
    ("architecture", "mode", "normalize", "shape"),
    [
        ("Qwen3Model", "lasttoken", True, (1, 1)),
        ("Qwen2Model", "mean", True, (2, 1)),
        ("XLMRobertaModel", "cls", True, (1, 2)),
        ("BertModel", "mean", False, (1, 1)),
    ],
)
def test_embedding_models_of_sentence_transformers(
    serve, checkpoint, architecture, mode, normalize, shape
):
    reference = checkpoint(architecture, seed=7)
    write_modules(reference.path, mode, 64, normalize=normalize)
    if architecture == "Qwen3Model":  # as Qwen3-Embedding's files say of themselves
        edit_config(reference, architectures=["Qwen3ForCausalLM"])
    texts = make_prompts(7, [3, 40, 1, 150])
    requests = [pooling_request(f"{i}", prompt, "embed") for i, prompt in enumerate(texts)]
    step = 160 if "ert" in architecture else STEP
    with serve(reference.path, *shape, max_num_batched_tokens=step) as (group, loaded):
        run = generate(group, loaded, requests)
        assert not loaded.metadata.generates
    for index, expected in enumerate(sentence_vectors(reference.path, texts)):
        np.testing.assert_allclose(run.outputs[f"{index}"].pooled, expected, **CLOSE)


GEMMA_4B, GEMMA_1B = "google/gemma-3-4b-it", "google/gemma-3-1b-it"


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        (GEMMA_1B, "Gemma3TextModel"),
        (GEMMA_1B, "Gemma3TextForSequenceClassification"),
        (GEMMA_4B, "Gemma3Model"),
        (GEMMA_4B, "Gemma3ForSequenceClassification"),
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "Mistral3Model"),
    ],
)
def test_text_models_by_the_names_of_their_classes(serve, model_root, name, architecture):
    config = shrunk(PUBLISHED[name]) | {"architectures": [architecture]}
    if architecture.endswith("Classification"):
        config["id2label"] = {str(label): f"label {label}" for label in range(3)}
    model, path = random_model(config, seed=5), model_root / architecture
    save_published(model, path, config)
    texts = [np.minimum(prompt, 90) for prompt in make_prompts(16, [3, 30])]
    task = "classify" if "id2label" in config else "embed"
    requests = [pooling_request(f"{i}", prompt, task) for i, prompt in enumerate(texts)]
    with serve(path, max_num_batched_tokens=STEP, max_model_len=64) as (group, loaded):
        run = generate(group, loaded, requests)
    for index, prompt in enumerate(texts):
        with torch.no_grad():
            output = model(torch.tensor([prompt.tolist()]))
        if task == "classify":
            expected = output.logits[0].softmax(-1).numpy()
        else:
            expected = embedding(output.last_hidden_state[0, -1])
        np.testing.assert_allclose(run.outputs[f"{index}"].pooled, expected, **CLOSE)


def test_output_that_is_not_finite_fails_alone(serve, checkpoint, model_root):
    poison = 300
    reference = checkpoint("LlamaModel", seed=9)
    tensors = load_file(reference.path / "model.safetensors")
    tensors["embed_tokens.weight"][poison] = torch.nan
    save_file(tensors, reference.path / "model.safetensors", {"format": "pt"})
    texts = [np.minimum(prompt, 290) for prompt in make_prompts(8, [20, 30, 25, 18])]
    texts[1][5] = texts[3][17] = poison
    requests = [
        pooling_request(f"{task}{index}", prompt, task)
        for index, prompt in enumerate(texts)
        for task in ("embed", "token_embed")
    ]
    with serve(reference.path, block_size=4, num_gpu_blocks=80) as (group, loaded):
        run = generate(group, loaded, requests)
        again = generate(group, loaded, [replace_id(r, "again") for r in requests[:1]])
    for index, prompt in enumerate(texts):
        for task in ("embed", "token_embed"):
            output = run.outputs[f"{task}{index}"]
            if index in (1, 3):
                assert output.finish_reason == "error"
                assert "NaN or infinite" in output.error
                continue
            states = last_states(reference, prompt)
            expected = embedding(states if task == "token_embed" else states[-1])
            np.testing.assert_allclose(output.pooled, expected, **CLOSE)
    np.testing.assert_array_equal(again.outputs["again"].pooled, run.outputs["embed0"].pooled)


def replace_id(request, req_id):
    return pooling_request(req_id, request.prompt, request.pooling.task)


def test_what_cannot_be_served_is_refused_by_name_and_alone(serve, checkpoint):
    decoder = checkpoint("Qwen3ForCausalLM", seed=3)
    encoder = checkpoint("BertForSequenceClassification", num_labels=4)
    (prompt,) = make_prompts(9, [20])
    with serve(decoder.path) as (group, loaded):
        scheduler = every_draft(scheduler_limits(group, loaded))
        driver = Driver(group, scheduler)
        driver.add_request(pooling_request("good", prompt, "embed"))
        for bad, named in (
            (pooling_request("a", prompt, "classify"), "embed, token_embed"),
            (pooling_request("b", prompt, "sort"), "sort"),
            (pooling_request("c", prompt, "embed", dimensions=65), "at most 64"),
            (pooling_request("d", prompt, "embed", dimensions=-1), "dimensions"),
            (pooling_request("s", prompt, "embed", second_start=3), "one token type"),
        ):
            with pytest.raises(RequestError, match=named):
                driver.add_request(bad)
        both = greedy_request("e", prompt, 4, temperature=0.5, pooling=bad.pooling)
        with pytest.raises(RequestError):
            driver.add_request(both)
        assert [output.req_id for output in driver.run()] == ["good"]
    with serve(encoder.path, max_num_batched_tokens=64) as (group, loaded):
        driver = Driver(group, every_draft(scheduler_limits(group, loaded)))
        driver.add_request(pooling_request("good", prompt, "classify"))
        with pytest.raises(RequestError, match="no output layer"):
            driver.add_request(greedy_request("a", prompt, 4))
        (longer,) = make_prompts(10, [65])
        with pytest.raises(RequestError, match="in one step"):
            driver.add_request(pooling_request("b", longer, "classify"))
        (too_long,) = make_prompts(10, [193])
        with pytest.raises(RequestError, match="max_model_len"):
            driver.add_request(pooling_request("c", too_long, "classify"))
        assert [output.req_id for output in driver.run()] == ["good"]


def test_outputs_do_not_wait_for_deferred_sampling(serve, checkpoint):
    reference = checkpoint("Qwen3ForCausalLM", seed=3)
    texts = make_prompts(15, [9, 14])
    requests = [pooling_request("e", texts[0], "embed"), greedy_request("g", texts[1], 1)]
    new = [
        NewRequest(
            req_id=request.id,
            token_ids=request.prompt,
            num_prompt_tokens=len(request.prompt),
            num_computed_tokens=0,
            block_ids=range(1 + 8 * index, 5 + 8 * index),
            extensions=request.extensions(()),
        )
        for index, request in enumerate(requests)
    ]
    counts = {request.req_id: len(request.token_ids) for request in new}
    with serve(reference.path, 2, 1, block_size=4) as (group, _):
        deferred = group.execute_model(
            SchedulerOutput(counts, scheduled_new_reqs=new, extensions=(StepMasks(deferred=["g"]),))
        )
        pooled = deferred.result().pooled
        sampled = group.sample_tokens(deferred).result()
        group.execute_model(SchedulerOutput(finished_req_ids=("e", "g"))).result()
    expected = embedding(last_states(reference, texts[0])[-1])
    np.testing.assert_allclose(pooled["e"][0], expected, **CLOSE)
    assert sampled.sampled == {"g": reference.greedy(texts[1].tolist(), 1)[0]}
    assert not sampled.pooled


def test_requests_of_a_killed_driver_end_with_the_next_one(daemons, checkpoint):
    reference = checkpoint("Qwen3ForCausalLM", seed=3)
    rng = random.Random(11)
    lines = [
        json.dumps(
            {"id": f"{task}{index}", "prompt_token_ids": prompt.tolist(), "pooling": {"task": task}}
        )
        for index, prompt in enumerate(make_prompts(12, [90, 5, 60, 33, 120]))
        for task in ("embed", "token_embed")
    ]
    sizes = {"max_num_batched_tokens": 32, "step_deadline_ms": 1000}
    config = worker_config(reference.path, 2, **sizes)
    plan = Plan(daemons.endpoints(2), config, lines)
    with WorkerGroup(plan.endpoints, config.parallel, lease=LONG_LEASE) as group:
        group.attach(force=True)
        loaded = group.prepare(config, num_gpu_blocks=NUM_GPU_BLOCKS, reload=True)
        expected = outputs_of(begin(group, loaded, plan))
    nursery = DriverNursery()
    try:
        nursery.live(replace(plan, death=Death(rng.randint(4, 9), [0], False)))
    finally:
        nursery.close()
    with WorkerGroup(plan.endpoints, config.parallel, lease=LONG_LEASE) as group:
        group.attach(keep_requests=True)
        loaded = group.prepare(config, num_gpu_blocks=NUM_GPU_BLOCKS)
        serving = begin(group, loaded, replace(plan, adopt=True))
        found = outputs_of(serving)
        group.detach()
    assert serving.adopted
    assert found.keys() == expected.keys()
    for req_id, values in expected.items():
        np.testing.assert_allclose(found[req_id], values, **CLOSE)


def outputs_of(serving):
    return {output.req_id: output.pooled for output in serving.driver.run()}


def test_embed_writes_arrays_and_lines(daemons, checkpoint):
    reference = checkpoint("Qwen3ForCausalLM", seed=3)
    directory = short_directory()
    texts = make_prompts(13, [4, 9, 2])
    lines = [
        json.dumps({"id": f"r{i}", "prompt_token_ids": p.tolist()}) for i, p in enumerate(texts)
    ]
    (directory / "in.jsonl").write_text("\n".join([*lines, '{"prompt_token_ids": []}']))
    words = ["embed", "--endpoints", daemons.endpoints(1)[0], "--model", str(reference.path)]
    words += ["--dtype", "float32", "--num-gpu-blocks", "64", "--reload", "--force"]
    words += ["--input", str(directory / "in.jsonl"), "--dimensions", "8", "--wait", "30"]
    to_file = ["--format", "npy", "--output", str(directory / "out.npy")]
    done = run_client(directory, *words, *to_file)
    expected = [embedding(last_states(reference, prompt)[-1], 8) for prompt in texts]
    found = np.load(directory / "out.npy", allow_pickle=False)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, **CLOSE)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line.get("rows") for line in told] == [1, 1, 1, None]
    assert "error" in told[3]
