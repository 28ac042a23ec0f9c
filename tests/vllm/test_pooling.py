"""`--runner pooling`: outputs through vLLM equal those of transformers for each prompt alone."""

import contextlib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import edit_config, prompts
from tests.support.pooling_reference import embedding, last_states, scores, write_modules
from tests.support.structured import VOCAB_SIZE
from tests.vllm.models import write_tokenizer

LENGTHS = [3, 7, 40, 90, 1, 150, 33]
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
WHOLE = {"max_num_batched_tokens": 160}
"""Steps that hold the longest prompt."""


def make_prompts(seed, lengths=LENGTHS):
    """Without the lowest ids: RoBERTa counts no position for its padding token, 1."""
    return [np.maximum(prompt, 5) for prompt in prompts(seed, lengths, VOCAB_SIZE)]


@pytest.fixture(scope="module")
def pooling_engine(engine, checkpoint):
    """pooling_engine(architecture, pp, tp, mode=..., pooler=..., **fields): a vllm.LLM that pools,
    and the reference. mode: write modules.json, with or without a norm."""

    @contextlib.contextmanager
    def serve(architecture, pp=1, tp=1, *, mode=(), pooler=None, options=(), **fields):
        reference = checkpoint(architecture, vocab_size=VOCAB_SIZE, **fields)
        if not (reference.path / "tokenizer.json").exists():
            write_tokenizer(reference.path)
        if architecture.startswith("XLMRoberta"):  # vLLM asks for it, as older files have it
            edit_config(reference, position_embedding_type="absolute")
        if mode and not (reference.path / "modules.json").exists():
            kind, normalize = mode
            write_modules(reference.path, kind, 64, normalize=normalize)
        given = {"runner": "pooling", "skip_tokenizer_init": False, **dict(options)}
        with engine(reference.path, pp, tp, pooler_config=pooler, **given) as llm:
            yield llm, reference

    return serve


def run(llm, texts, task, **params):
    """Return vLLM's outputs, as arrays and whole."""
    from vllm import PoolingParams

    given = [{"prompt_token_ids": text.tolist()} for text in texts]
    outputs = llm.encode(given, PoolingParams(**params), pooling_task=task, use_tqdm=False)
    return [output.outputs.data.numpy() for output in outputs], outputs


def assert_close(values, wanted):
    for own, expected in zip(values, wanted, strict=True):
        assert own.shape == expected.shape
        np.testing.assert_allclose(own, expected, **CLOSE)


@pytest.mark.parametrize("pp", [1, 2])
def test_embeddings_of_a_decoder_that_generates(pooling_engine, pp):
    """In chunks, from cached prefixes, with and without the norm."""
    texts = make_prompts(1)
    with pooling_engine("Qwen3ForCausalLM", pp, seed=3) as (llm, reference):
        states = [last_states(reference, text)[-1] for text in texts]
        assert_close(run(llm, texts, "embed")[0], map(embedding, states))
        values, outputs = run(llm, texts, "embed", use_activation=False)
        assert_close(values, [each.numpy() for each in states])
        cached = [output.num_cached_tokens for output in outputs]
        assert cached == [(len(text) - 1) // 16 * 16 for text in texts]


def test_an_embedding_for_each_token(pooling_engine):
    """All states are needed: no cached prefix is used."""
    texts = make_prompts(2)
    options = {"num_gpu_blocks_override": 20}
    with pooling_engine(
        "Qwen3ForCausalLM", pooler={"task": "token_embed"}, options=options, seed=3
    ) as (llm, reference):
        wanted = [embedding(last_states(reference, text)) for text in texts]
        for _ in range(2):
            values, outputs = run(llm, texts, "token_embed")
            assert_close(values, wanted)
            assert sum(output.num_cached_tokens for output in outputs) == 0


@pytest.mark.parametrize(
    ("architecture", "pp", "mode", "normalize"),
    [("Qwen3Model", 1, "lasttoken", True), ("Qwen2Model", 2, "mean", False)],
)
def test_embedding_models_of_decoders(pooling_engine, architecture, pp, mode, normalize):
    """As modules.json says. vLLM would not cache prefixes of means; with its caching on, a mean is
    still computed from all states."""
    texts = make_prompts(3)
    options = {"enable_prefix_caching": True, "enable_chunked_prefill": True}
    with pooling_engine(architecture, pp, mode=(mode, normalize), options=options, seed=7) as (
        llm,
        reference,
    ):
        states = [last_states(reference, text) for text in texts]
        pooled = [each.mean(0) if mode == "mean" else each[-1] for each in states]
        for _ in range(2):
            values, _ = run(llm, texts, "embed")
            assert_close(values, [embedding(each, 0, normalize) for each in pooled])


@pytest.mark.parametrize(
    ("architecture", "tp", "mode", "normalize"),
    [("BertModel", 1, "mean", False), ("XLMRobertaModel", 2, "cls", True)],
)
def test_embedding_models_of_encoders(pooling_engine, architecture, tp, mode, normalize):
    """vLLM refuses several pipeline stages for them."""
    texts = make_prompts(4)
    with pooling_engine(architecture, 1, tp, mode=(mode, normalize), options=WHOLE, seed=7) as (
        llm,
        reference,
    ):
        states = [last_states(reference, text) for text in texts]
        pooled = [each.mean(0) if mode == "mean" else each[0] for each in states]
        for _ in range(2):
            values, _ = run(llm, texts, "embed")
            assert_close(values, [embedding(each, 0, normalize) for each in pooled])


@pytest.mark.parametrize(
    ("architecture", "pp", "tp", "num_labels"),
    [
        ("LlamaForSequenceClassification", 2, 1, 3),
        ("Qwen2ForSequenceClassification", 1, 1, 1),
        ("BertForSequenceClassification", 1, 2, 4),
    ],
)
def test_classifiers(pooling_engine, architecture, pp, tp, num_labels):
    texts = make_prompts(5)
    own = {} if "Bert" in architecture else {"pad_token_id": None}
    options = WHOLE if "Bert" in architecture else {}
    fields = {"num_labels": num_labels, **own}
    with pooling_engine(architecture, pp, tp, options=options, **fields) as (llm, reference):
        logits = [scores(reference, text) for text in texts]
        likely = [x.softmax(-1) if num_labels > 1 else torch.sigmoid(x) for x in logits]
        assert_close(run(llm, texts, "classify")[0], [each.numpy() for each in likely])
        raw, _ = run(llm, texts, "classify", use_activation=False)
        assert_close(raw, [each.numpy() for each in logits])


def test_classifier_of_each_token(pooling_engine):
    texts = make_prompts(6)
    with pooling_engine("Qwen3ForTokenClassification", num_labels=5) as (llm, reference):
        wanted = [scores(reference, text).softmax(-1).numpy() for text in texts]
        assert_close(run(llm, texts, "token_classify")[0], wanted)


def test_scores_of_pairs(pooling_engine):
    """A reranker: one label, of question and document in one prompt."""
    with pooling_engine("Qwen2ForSequenceClassification", num_labels=1, pad_token_id=None) as (
        llm,
        reference,
    ):
        tokenizer = llm.get_tokenizer()
        texts = ["red", "green and red", "name of it"]
        values = llm.score("which one", texts, use_tqdm=False)
        for text, value in zip(texts, values, strict=True):
            wanted = torch.sigmoid(scores(reference, tokenizer.encode("which one", text)))
            assert value.outputs.score == pytest.approx(wanted.item(), abs=1e-4)


def test_scores_of_late_interaction(pooling_engine):
    """vLLM compares the vectors of all tokens."""
    with pooling_engine("Qwen3ForCausalLM", 2, pooler={"task": "token_embed"}, seed=3) as (
        llm,
        reference,
    ):
        tokenizer = llm.get_tokenizer()

        def vectors(text):
            return embedding(last_states(reference, tokenizer.encode(text)))

        texts = ["red", "green and red"]
        values = llm.score("which one", texts, use_tqdm=False)
        for text, value in zip(texts, values, strict=True):
            wanted = (vectors("which one") @ vectors(text).T).max(1).sum()
            assert value.outputs.score == pytest.approx(float(wanted), abs=1e-4)


def test_output_that_is_not_finite_fails_alone(pooling_engine, checkpoint):
    poison = 300
    reference = checkpoint("LlamaModel", vocab_size=VOCAB_SIZE, seed=9)
    whole = reference.path / "model.safetensors"
    tensors = load_file(whole)
    tensors["embed_tokens.weight"][poison] = torch.nan
    save_file(tensors, whole, {"format": "pt"})
    texts = [np.minimum(text, 290) for text in make_prompts(7, [20, 30, 25, 18])]
    texts[1][5] = poison
    with pooling_engine("LlamaModel", seed=9) as (llm, _):
        for _ in range(2):
            values, _ = run(llm, texts, "embed")
            assert np.isnan(values.pop(1)).all()
            states = [last_states(reference, texts[at])[-1] for at in (0, 2, 3)]
            assert_close(values, map(embedding, states))


def test_outputs_that_fill_several_replies(pooling_engine):
    """A step of vLLM's has 16 MiB of outputs, and a reply 12. A prompt with more is refused."""
    fields = {
        "hidden_size": 512,
        "head_dim": 128,
        "num_hidden_layers": 2,
        "max_position_embeddings": 8192,
    }
    options = {
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 64,
        "max_model_len": 7000,
        "num_gpu_blocks_override": 1100,
    }
    texts = make_prompts(8, [150] * 60)
    with pooling_engine(
        "Qwen3ForCausalLM", 2, pooler={"task": "token_embed"}, options=options, **fields
    ) as (llm, reference):
        (longest,) = make_prompts(9, [6500])
        values, _ = run(llm, [longest, *texts], "token_embed")
        assert np.isnan(values.pop(0)).all()
        for at in (0, 30, 59):
            assert_close([values[at]], [embedding(last_states(reference, texts[at]))])
        assert sum(len(each) for each in values) == 60 * 150


MEAN = {"pooling_type": "MEAN"}
DECODER = "Qwen3ForCausalLM"
REFUSED = {
    "pooler_config.pooling_type": (DECODER, MEAN, {}),
    "enable_chunked_prefill": ("BertModel", MEAN, {"enable_chunked_prefill": True}),
    "logit_mean": (DECODER, {"logit_mean": 0.5}, {}),
    "convert": (DECODER, None, {"convert": "classify"}),
    "long_prefill_token_threshold": (DECODER, None, {"long_prefill_token_threshold": 16}),
}
"""What is refused at start, by the field that is named."""


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_served_is_refused_at_start(pooling_engine, field):
    architecture, pooler, options = REFUSED[field]
    with (
        pytest.raises(Exception, match=field),
        pooling_engine(architecture, pooler=pooler, options={**WHOLE, **options}, seed=3),
    ):
        pass


def test_embedding_model_does_not_generate(engine, checkpoint):
    reference = checkpoint("Qwen3Model", vocab_size=VOCAB_SIZE, seed=7)
    edit_config(reference, architectures=["Qwen3ForCausalLM"])
    with pytest.raises(Exception, match="runner"), engine(reference.path, runner="generate"):
        pass
