"""Grammars: what compiles and what is refused, by name and in time; masks against xgrammar's own
matcher, token by token."""

import json
import math
import random
import threading
from collections import Counter
from concurrent.futures import CancelledError
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer

from rpc_schema.structured import MAX_GRAMMAR_LENGTH, StructuredOutput
from tests.support.structured import (
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    forced_schema,
    make_tokenizer,
    random_case,
    random_regex,
    schema_case,
)
from tests.support.waiting import wait_until
from worker_client.errors import ClientConfigError, RequestError
from worker_client.request_parser import RequestParser
from worker_client.requests import GenerationRequest
from worker_client.structured.grammars import (
    REQUESTS_PER_COMPILATION,
    GrammarLimits,
    Grammars,
)
from worker_client.structured.opening import open_grammars
from worker_client.structured.options import KEYS, read_structured_output
from worker_client.structured.pending import PendingRequests


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def grammars(directory):
    made = Grammars(directory, VOCAB_SIZE, [EOS_TOKEN_ID, 9999])
    yield made
    made.close()


def matcher_of(grammars, **options):
    return grammars.begin(read_structured_output(options))


def allowed(grammars, *matchers):
    words = grammars.fill(matchers)
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row).tolist() for row in bits]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "structured_outputs"),
        ({"json": {}, "regex": "a"}, "structured_outputs"),
        ({"structural_tag": "{}"}, "structured_outputs.structural_tag"),
        ({"disable_fallback": True}, "structured_outputs.disable_fallback"),
        ({"json": 3}, "structured_outputs.json"),
        ({"json_object": False}, "structured_outputs.json_object"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": ["a", 1]}, "structured_outputs.choice"),
        ({"choice": "ab"}, "structured_outputs.choice"),
        ({"regex": ["a"]}, "structured_outputs.regex"),
        ({"regex": ""}, "structured_outputs.regex"),
        ({"grammar": "x" * (MAX_GRAMMAR_LENGTH + 1)}, "structured_outputs.grammar"),
    ],
)
def test_options_that_make_no_grammar_are_refused_by_name(options, field):
    line = json.dumps({"prompt_token_ids": [1], "structured_outputs": options})
    with pytest.raises(RequestError) as refused:
        RequestParser(None).parse(line, 0)
    assert refused.value.field == field


def test_options_become_the_grammar_that_a_request_carries():
    schema = {"type": "integer"}
    expected = StructuredOutput(kind="json", text='{"type":"integer"}')
    for given in (schema, '{"type":"integer"}'):
        assert read_structured_output({"json": given, "regex": None}) == expected
    assert read_structured_output({"json_object": True}).kind == "json"
    line = json.dumps({"prompt_token_ids": [1], "structured_outputs": {"json": schema}})
    request = RequestParser(None, seed=1).parse(line, 0)
    assert expected in request.extensions(())
    assert len(KEYS) == 5


HOSTILE = {
    "not JSON": {"json": '{"type":'},
    "nonsense": {"json": {"type": "nonsense"}},
    "false": {"json": "false"},
    "unsatisfiable": {"json": {"enum": []}},
    "another document": {"json": {"$ref": "http://example.com/x"}},
    "a file": {"json": {"$ref": "file:///etc/passwd"}},
    "deep": {"json": '{"type":"array","items":' * 3000 + "{}" + "}" * 3000},
    "unsupported": {"json": {"type": "array", "uniqueItems": True}},
    "open regex": {"regex": "(a"},
    "look-ahead": {"regex": "(?=a)b"},
    "back-reference": {"regex": r"(a)\1"},
    "unknown rule": {"grammar": "root ::= nowhere"},
    "no grammar": {"grammar": ":::="},
    "deep EBNF": {"grammar": "root ::= " + "(" * 20000 + '"a"' + ")" * 20000},
    "many symbols": {"grammar": "root ::= " + " ".join(f'("{i}"|[a-z]|"b")' for i in range(3900))},
    "regex bomb": {"regex": "((a{1,900}b?){1,900}c?){1,900}"},
    "states": {"regex": "[ab]*a[ab]{20000}(x|[ab]{9000}y)"},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_by_name_or_bounded(directory, name):
    """Compiled or refused in time; and if one compiles, each of its masks is bounded too."""
    limits = GrammarLimits(num_threads=1, max_grammar_size=20_000, max_lexer_states=2_000)
    grammars = Grammars(directory, VOCAB_SIZE, [EOS_TOKEN_ID], limits)
    try:
        matcher = matcher_of(grammars, **HOSTILE[name])
    except RequestError as error:
        assert error.field.startswith("structured_outputs.")
        assert "\n" not in error.reason and len(error.reason) < 900
        return
    finally:
        grammars.close()
    assert name in ("regex bomb", "states")
    rng = random.Random(1)
    for _ in range(200):
        (tokens,) = allowed(grammars, matcher)
        if matcher.is_error() or tokens == [EOS_TOKEN_ID]:
            break
        assert grammars.consume([(matcher, rng.choice(tokens))]) == [True]


def check_outcome(future, is_good):
    if is_good:
        future.result(20)
    else:
        with pytest.raises(RequestError):
            future.result(20)


def test_a_grammar_is_compiled_once_and_failures_are_remembered(grammars):
    good, bad = StructuredOutput(kind="regex", text="a+"), StructuredOutput(kind="regex", text="(")
    for grammar in (good, bad):
        for future in [grammars.compile(grammar) for _ in range(2)]:
            check_outcome(future, grammar is good)
        first = grammars._compiled[grammar].first
        check_outcome(grammars.compile(grammar), grammar is good)
        assert grammars._compiled[grammar].first is first
    few = grammars.limits.max_cached
    many = [StructuredOutput(kind="choice", text=f'["{index}"]') for index in range(few + 5)]
    for future in [grammars.compile(each) for each in many]:
        future.result(20)
    assert len(grammars._compiled) == few
    assert not grammars._compiling


def test_a_grammar_that_several_requests_use_is_compiled_a_few_times(directory, monkeypatch):
    """Copies of one compilation share a lock."""
    grammar, slow, bad = (
        StructuredOutput(kind="regex", text=text) for text in ("[ab]+c", "[ab]+d", "[ab")
    )
    compiled = []
    compile_one = Grammars._compile
    may_go_on = threading.Event()

    def note(self, each):
        assert may_go_on.wait(20)
        compiled.append(each)
        return compile_one(self, each)

    monkeypatch.setattr(Grammars, "_compile", note)
    monkeypatch.setattr("worker_client.structured.grammars.MAX_AGAIN_S", 60.0)
    limits = GrammarLimits(max_compilations=3)
    with closing(Grammars(directory, VOCAB_SIZE, [EOS_TOKEN_ID], limits)) as grammars:
        futures = [grammars.compile(grammar) for _ in range(32)]  # all before it is compiled
        refused = [grammars.compile(bad) for _ in range(3)]
        may_go_on.set()
        for future in futures:
            future.result(20)
        for future in refused:
            with pytest.raises(RequestError):
                future.result(20)
        for compilation in grammars._compiled[grammar].compilations:
            compilation.matcher.result(20)
        matchers = [grammars.begin(grammar) for _ in range(9)]
        numbers = [matcher.compilation for matcher in matchers]
        assert sorted(Counter(numbers).values()) == [3, 3, 3]
        assert len({tuple(tokens) for tokens in allowed(grammars, *matchers)}) == 1
        first = allowed(grammars, matchers[0])[0][0]
        assert grammars.consume([(matchers[0], first)]) == [True]
        fresh = [grammars.begin(grammar) for _ in range(3)]
        assert len({tuple(tokens) for tokens in allowed(grammars, *fresh, matchers[1])}) == 1

        monkeypatch.setattr("worker_client.structured.grammars.MAX_AGAIN_S", 0.0)
        for future in [grammars.compile(slow) for _ in range(9)]:
            future.result(20)
        assert len({grammars.begin(slow).compilation for _ in range(9)}) == 1
    assert compiled.count(grammar) == 3
    assert compiled.count(bad) == 1
    assert compiled.count(slow) == 1, "others wait for the threads"


def test_a_grammar_is_compiled_again_for_concurrent_requests_not_for_sequential_ones(directory):
    grammar = StructuredOutput(kind="regex", text="[ab]+e")
    limits = GrammarLimits(max_compilations=2)

    def begin_another(grammars):
        grammars.compile(grammar).result(20)
        for compilation in grammars._compiled[grammar].compilations[1:]:
            compilation.matcher.result(20)
        return grammars.begin(grammar)

    with closing(Grammars(directory, VOCAB_SIZE, [EOS_TOKEN_ID], limits)) as grammars:
        assert len({begin_another(grammars).compilation for _ in range(20)}) == 1
        assert len(grammars._compiled[grammar].compilations) == 1
        matchers = [begin_another(grammars) for _ in range(4 * REQUESTS_PER_COMPILATION)]
        numbers = [matcher.compilation for matcher in matchers]
        assert len(set(numbers[:REQUESTS_PER_COMPILATION])) == 1
        assert sorted(Counter(numbers).values()) == [2 * REQUESTS_PER_COMPILATION] * 2
        kept = matchers.pop()
        matchers.clear()
        assert begin_another(grammars).compilation != kept.compilation, "the other has none"


def test_a_grammar_whose_requests_have_given_up_is_not_compiled(directory, monkeypatch):
    long, given_up = (StructuredOutput(kind="regex", text=text) for text in ("[ab]+f", "[ab]+g"))
    compiled = []
    compile_one = Grammars._compile
    may_go_on = threading.Event()

    def note(self, each):
        assert may_go_on.wait(20)
        if self is grammars:  # another test's may still be at work
            compiled.append(each)
        return compile_one(self, each)

    monkeypatch.setattr(Grammars, "_compile", note)
    limits = GrammarLimits(num_threads=1)
    with closing(Grammars(directory, VOCAB_SIZE, [EOS_TOKEN_ID], limits)) as grammars:
        first = grammars.compile(long)
        waiting = [grammars.compile(given_up) for _ in range(3)]
        assert all(future.cancel() for future in waiting)
        may_go_on.set()
        first.result(20)
        last = StructuredOutput(kind="regex", text="[ab]+h")
        grammars.compile(last).result(20)  # behind the others
        assert compiled == [long, last]
        grammars.compile(given_up).result(20)  # of a later request
        assert compiled == [long, last, given_up]


@pytest.fixture
def may_go_on(monkeypatch):
    """An event for which each compilation waits."""
    compile_one, event = Grammars._compile, threading.Event()

    def late(self, each):
        assert event.wait(20)
        return compile_one(self, each)

    monkeypatch.setattr(Grammars, "_compile", late)
    return event


def test_begin_without_compile_gets_a_grammar_whose_other_requests_gave_up(directory, may_go_on):
    grammar, before = (StructuredOutput(kind="regex", text=text) for text in ("[ab]+i", "[ab]+j"))
    with closing(Grammars(directory, VOCAB_SIZE, [EOS_TOKEN_ID], GrammarLimits(num_threads=1))) as (
        grammars
    ):
        grammars.compile(before)
        assert grammars.compile(grammar).cancel()
        begun = []
        adopting = threading.Thread(target=lambda: begun.append(grammars.begin(grammar)))
        adopting.start()
        wait_until(lambda: len(grammars._compiling[grammar].waiting) == 2, "it waits")
        may_go_on.set()
        adopting.join(20)
        assert len(begun) == 1


def test_further_compilations_that_take_long_fail_no_request(directory, monkeypatch):
    grammar = StructuredOutput(kind="regex", text="[ab]+m")
    compile_one, compiled = Grammars._compile, []
    may_begin, may_go_on = threading.Event(), threading.Event()

    def late(self, each):
        compiled.append(each)
        assert (may_begin if compiled.count(grammar) == 1 else may_go_on).wait(20)
        return compile_one(self, each)

    monkeypatch.setattr(Grammars, "_compile", late)
    monkeypatch.setattr("worker_client.structured.grammars.MAX_AGAIN_S", 60.0)
    limits = GrammarLimits(max_compilations=2, compile_s=60.0)
    with closing(Grammars(directory, VOCAB_SIZE, [EOS_TOKEN_ID], limits)) as grammars:
        pending = PendingRequests(grammars)
        for index in range(2 * REQUESTS_PER_COMPILATION):
            pending.add(GenerationRequest(str(index), np.array([1], np.int32)), grammar)
        may_begin.set()
        wait_until(lambda: compiled.count(grammar) == 2, "it is compiled again")
        late = SimpleNamespace(monotonic=lambda: math.inf)
        monkeypatch.setattr("worker_client.structured.pending.time", late)
        reasons = [reason for _, reason in pending.take_done()]
        assert reasons == [""] * (2 * REQUESTS_PER_COMPILATION)
        grammars.begin(grammar)
        may_go_on.set()


def test_closing_ends_the_wait_for_grammars(directory, may_go_on):
    grammars = Grammars(directory, VOCAB_SIZE, [EOS_TOKEN_ID], GrammarLimits(num_threads=1))
    texts = ("[ab]+k", "[ab]+l", "[ab]+l")
    futures = [grammars.compile(StructuredOutput(kind="regex", text=text)) for text in texts]
    grammars.close()
    may_go_on.set()
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(20)


def test_an_ended_text_may_only_end(grammars):
    matcher = matcher_of(grammars, choice=["a"])
    (first,) = allowed(grammars, matcher)
    assert len(first) == 1
    assert grammars.consume([(matcher, first[0])]) == [True]
    for _ in range(3):
        assert allowed(grammars, matcher) == [[EOS_TOKEN_ID]]
        assert grammars.consume([(matcher, EOS_TOKEN_ID)]) == [True]
    assert grammars.consume([(matcher, first[0])]) == [False]


def test_choices_are_any_texts(grammars, directory):
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    choices = ["", 'say "x"', "back\\slash", "é\n\t", "a/b", "{}", "$", "'`"]
    for choice in choices:
        matcher = matcher_of(grammars, choice=choices)
        tokens = tokenizer.encode(choice).ids
        assert matcher.consume_tokens([*tokens, EOS_TOKEN_ID]), choice


def test_a_model_without_a_tokenizer_or_an_end_refuses_each_request(tmp_path, directory):
    for path, ends in ((tmp_path, [EOS_TOKEN_ID]), (directory, []), (directory, [VOCAB_SIZE])):
        with pytest.raises(ClientConfigError):
            Grammars(path, VOCAB_SIZE, ends)
        compiled = open_grammars(path, VOCAB_SIZE, ends).compile(
            StructuredOutput(kind="regex", text="a")
        )
        with pytest.raises(RequestError, match="structured output is not possible"):
            compiled.result(0)


def test_a_tokenizer_may_have_more_tokens_than_the_model(directory):
    size = 390
    grammars = Grammars(directory, size, [EOS_TOKEN_ID])
    matcher = matcher_of(grammars, regex=".*")
    (tokens,) = allowed(grammars, matcher)
    assert grammars.num_words == -(-size // 32) and max(tokens) < 32 * grammars.num_words
    grammars.close()


NARROW_LEADS = ("\u00e0", "\u00ed", "\u00f0", "\u00f4")
"""First bytes of UTF-8 characters that few second bytes may follow, as the tokenizer writes them.
xgrammar allows the second bytes of surrogates."""


def reference(directory, seed):
    """Pairs of our matcher's options and xgrammar's compiled grammar."""
    xgrammar = pytest.importorskip("xgrammar")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    info = xgrammar.TokenizerInfo(
        [tokenizer.id_to_token(token) for token in range(tokenizer.get_vocab_size())],
        xgrammar.VocabType.BYTE_LEVEL,
        vocab_size=VOCAB_SIZE,
        stop_token_ids=[EOS_TOKEN_ID],
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    rng = random.Random(seed)
    for _ in range(12):
        regex = random_regex(rng)
        yield {"regex": regex}, compiler.compile_regex(regex)
    ebnf = 'root ::= sum\\nsum ::= atom ("+" atom)*\\natom ::= "x" | "yz" | "(" sum ")"\\n'
    ebnf = ebnf.replace("\\n", "\n")
    yield {"grammar": ebnf}, compiler.compile_grammar(ebnf)


def test_masks_are_xgrammars_token_by_token(grammars, directory):
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    num_compared = 0
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    text_of = [tokenizer.id_to_token(token) or "" for token in range(VOCAB_SIZE)]
    for options, compiled in reference(directory, seed):
        import xgrammar

        ours, theirs = matcher_of(grammars, **options), xgrammar.GrammarMatcher(compiled)
        for _ in range(30):
            mask = xgrammar.allocate_token_bitmask(1, VOCAB_SIZE)
            theirs.fill_next_token_bitmask(mask)
            bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
            expected = np.flatnonzero(bits[:VOCAB_SIZE]).tolist()
            # It takes special tokens for their names.
            expected = [token for token in expected if token >= EOS_TOKEN_ID]
            (tokens,) = allowed(grammars, ours)
            if tokens != expected:
                # Where the next bytes are forced, llguidance takes the usual token for them alone.
                (only,) = tokens
                forced = text_of[only]
                others = [text_of[token] for token in expected]
                is_same = [forced.startswith(o) or o.startswith(forced) for o in others]
                assert only in expected and all(is_same), (seed, options)
            num_compared += 1
            token = rng.choice(tokens)
            assert grammars.consume([(ours, token)]) == [True]
            assert theirs.accept_token(token)
            if token == EOS_TOKEN_ID or text_of[token].endswith(NARROW_LEADS):
                break
    assert num_compared > 40


def test_a_grammar_that_waits_too_long_is_the_error_of_its_request(directory):
    """Of one thread, which another grammar keeps busy."""
    limits = GrammarLimits(num_threads=1, compile_s=0.05)
    grammars = Grammars(directory, VOCAB_SIZE, [EOS_TOKEN_ID], limits)
    is_over = threading.Event()
    grammars._compiler.submit(is_over.wait, 60.0)
    found = grammars.compile(StructuredOutput(kind="regex", text="abc"))
    with pytest.raises(TimeoutError):
        found.result(limits.compile_s)
    is_over.set()
    grammars.close()


def test_forced_tokens_are_those_that_masks_leave_alone(grammars):
    """Each is the only one of the mask after those before it, and the mask after the last leaves a
    choice. A matcher that is asked stays as it is: one that is never asked has the same masks."""
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    num_forced = 0
    for number in range(60):
        case = schema_case(forced_schema(rng)) if number % 2 else random_case(rng)
        asked, other = (matcher_of(grammars, **case.options) for _ in range(2))
        for _ in range(60):
            forced = grammars.forced(asked)
            ahead = replace(other, matcher=other.matcher.deep_copy())
            for token in forced:
                assert allowed(grammars, ahead) == [[token]], (seed, case.options)
                assert ahead.consume_tokens([token])
            (choice,) = allowed(grammars, ahead)
            assert len(choice) > 1 or choice == [EOS_TOKEN_ID], (seed, case.options)
            num_forced += len(forced)
            mine, theirs = allowed(grammars, asked, other)
            assert mine == theirs, (seed, case.options)
            token = rng.choice(mine)
            if token == EOS_TOKEN_ID:
                break
            assert asked.consume_tokens([token]) and other.consume_tokens([token])
    assert num_forced > 1000, seed


def test_forced_tokens_are_bounded(directory):
    options = {"choice": ["x" * 40 + "a"]}
    lengths = {}
    for most in (0, 5, 1000):
        made = Grammars(directory, VOCAB_SIZE, [EOS_TOKEN_ID], GrammarLimits(max_jump=most))
        lengths[most] = len(made.forced(matcher_of(made, **options)))
        made.close()
    assert lengths[0] == 0 and lengths[5] == 5 and lengths[1000] > 5


def test_forced_tokens_that_the_model_lacks_are_not_named(directory):
    """The tokenizer has more tokens than the model: the mask of such a token allows none."""
    grammars = Grammars(directory, 60, [EOS_TOKEN_ID])
    matcher = matcher_of(grammars, choice=["a\u00e9b"])
    forced = grammars.forced(matcher)
    assert all(token < 60 for token in forced)
    whole = Grammars(directory, VOCAB_SIZE, [EOS_TOKEN_ID])
    everything = whole.forced(matcher_of(whole, choice=["a\u00e9b"]))
    assert max(everything) >= 60 and everything[: len(forced)] == forced
    for made in (grammars, whole):
        made.close()
