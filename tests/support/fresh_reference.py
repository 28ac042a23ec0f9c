"""Shared by the tests of recomputed requests: each token, and its log probability, is the same as
that of transformers' model of its version, in float64, after the same tokens, all computed by that
version."""

from tests.support.checkpoints import prompts

CLOSER = 1e-5
"""In nats; float32."""


def texts_of(seed, lengths):
    """Random prompts of these lengths, as lists."""
    return [text.tolist() for text in prompts(seed, lengths)]


def assert_as_fresh(model_of, prompt, output, close=CLOSER):
    """Check that each token is what a request of its own gets after all tokens before it, from the
    weights of the token's version."""
    known, place = [*map(int, prompt), *output.token_ids], 0
    for run in output.weights_versions:
        expected = model_of[run.version].exact_logprobs(known)
        for _ in range(run.num_tokens):
            row, token = expected[len(prompt) + place - 1], output.token_ids[place]
            assert row[token] > row.max() - 10 * close, (output.req_id, place, run)
            if output.logprobs is not None:
                found = output.logprobs[place].logprobs[0]
                assert abs(found - row[token]) < close, (output.req_id, place, run)
            place += 1
    assert place == len(output.token_ids)


def assert_all_fresh(watched, model_of, texts, close=CLOSER):
    """Check the outputs of r0, r1, ... of a Watched, one for each text."""
    for number, text in enumerate(texts):
        assert_as_fresh(model_of, text, watched.outputs[f"r{number}"], close)
