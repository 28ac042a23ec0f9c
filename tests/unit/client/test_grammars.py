"""Grammars: what compiles and what is refused, by name and in time; masks against xgrammar's own
matcher, token by token."""

import json
import random
import time
from concurrent.futures import CancelledError
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer

from rpc_schema.structured import MAX_GRAMMAR_LENGTH, StructuredOutput
from tests.support.structured import (
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    allowed_tokens,
    begun,
    compiled,
    crossing_case,
    forced_schema,
    make_tokenizer,
    random_case,
    random_regex,
    regex_case,
    schema_case,
    settle,
    take,
)
from worker_client.errors import ClientConfigError, RequestError
from worker_client.inputs.grammar_options import KEYS, read_structured_output
from worker_client.inputs.request_parser import RequestParser
from worker_client.requests import GenerationRequest
from worker_client.structured.grammars import GrammarLimits, Grammars
from worker_client.structured.opening import open_grammars
from worker_client.structured.pending import PendingRequests

ONE = GrammarLimits(num_compilers=1, num_serving=1)
COMPILES_LONG = StructuredOutput(kind="json", text='{"type":"integer","multipleOf":62615533}')


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


def cpu_s(pid):
    return time.clock_gettime((~pid << 3) | 2)


def is_idle(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def matcher_of(grammars, **options):
    return begun(grammars, read_structured_output(options))


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


@pytest.fixture(scope="module")
def small(directory):
    limits = GrammarLimits(num_compilers=1, max_grammar_size=20_000, max_lexer_states=2_000)
    with closing(Grammars(directory, VOCAB_SIZE, [EOS_TOKEN_ID], limits)) as made:
        yield made


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_by_name_or_bounded(small, name):
    """Compiled or refused in time; and if one compiles, each of its masks is bounded too."""
    try:
        matcher = matcher_of(small, **HOSTILE[name])
    except RequestError as error:
        assert error.field.startswith("structured_outputs.")
        assert "\n" not in error.reason and len(error.reason) < 900
        return
    assert name in ("regex bomb", "states")
    rng = random.Random(1)
    for _ in range(200):
        tokens = allowed_tokens(matcher)
        if matcher.error or tokens == [EOS_TOKEN_ID]:
            break
        take(small, matcher, rng.choice(tokens))
    small.end(matcher)


def test_a_grammar_is_compiled_once_and_failures_are_remembered(directory):
    """The least recently used ones are forgotten."""
    good, bad = StructuredOutput(kind="regex", text="a+"), StructuredOutput(kind="regex", text="(")
    limits = GrammarLimits(max_cached=9)
    with closing(Grammars(directory, VOCAB_SIZE, [EOS_TOKEN_ID], limits)) as grammars:
        for grammar in (good, bad):
            futures = [grammars.compile(grammar) for _ in range(2)]
            assert not any(future.done() for future in futures)
            settle(grammars, lambda futures=futures: all(each.done() for each in futures))
            again = grammars.compile(grammar)
            assert again.done()
            errors = {str(each.exception()) for each in (*futures, again)}
            assert len(errors) == 1
        assert "structured_outputs.regex" in errors.pop()
        for index in range(limits.max_cached):
            compiled(grammars, StructuredOutput(kind="choice", text=f'["{index}"]'))
        assert not grammars.compile(good).done()
        assert grammars.compile(StructuredOutput(kind="choice", text='["7"]')).done()


def test_a_grammar_whose_requests_have_given_up_is_not_compiled(directory):
    """The one that runs is stopped, and those that wait do not begin."""
    with closing(Grammars(directory, VOCAB_SIZE, [EOS_TOKEN_ID], ONE)) as grammars:
        settle(grammars, lambda: all(is_idle(pid) for pid in grammars.pids))
        long = [grammars.compile(COMPILES_LONG) for _ in range(2)]
        settle(grammars, lambda: any(not is_idle(pid) for pid in grammars.pids))
        short = StructuredOutput(kind="regex", text="[ab]+g")
        waiting = [grammars.compile(short) for _ in range(2)]
        assert all(future.cancel() for future in (*long, *waiting))
        began = [time.process_time(), *(cpu_s(pid) for pid in grammars.pids)]
        compiled(grammars, StructuredOutput(kind="regex", text="[ab]+h"))
        assert sum(cpu_s(pid) for pid in grammars.pids) < sum(began) + 5.0
        assert not grammars.compile(short).done()
        compiled(grammars, short)


def test_closing_ends_the_wait_for_grammars(directory):
    grammars = Grammars(directory, VOCAB_SIZE, [EOS_TOKEN_ID])
    texts = ("[ab]+k", "[ab]+l", "[ab]+l")
    futures = [grammars.compile(StructuredOutput(kind="regex", text=text)) for text in texts]
    pids = grammars.pids
    grammars.close()
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(0)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_an_ended_text_may_only_end(grammars):
    matcher = matcher_of(grammars, choice=["a"])
    assert len(matcher.forced) == 1
    (first,) = allowed_tokens(matcher)
    take(grammars, matcher, first)
    for _ in range(3):
        assert allowed_tokens(matcher) == [EOS_TOKEN_ID]
        take(grammars, matcher, EOS_TOKEN_ID)
    assert not matcher.allows(first)
    take(grammars, matcher, first)
    assert "does not allow" in matcher.error


def test_choices_are_any_texts(grammars, directory):
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    choices = ["", 'say "x"', "back\\slash", "é\n\t", "a/b", "{}", "$", "'`"]
    grammar = read_structured_output({"choice": choices})
    for choice in choices:
        matcher = begun(grammars, grammar, tokenizer.encode(choice).ids)
        assert not matcher.error and matcher.allows(EOS_TOKEN_ID), choice


VALUE = {"a": [1, {"b c": "d\n e"}], "f": None}


@pytest.mark.parametrize(
    "options",
    [
        {"json_object": True},
        {"json": {"type": "object"}},
        {"json": {"x-guidance": {"coerce_one_of": True}}},
        {"json": "{}"},
        {"json": " true "},
    ],
)
def test_json_is_compact_unless_its_schema_asks_for_another_form(grammars, directory, options):
    encode = Tokenizer.from_file(str(directory / "tokenizer.json")).encode
    grammar = read_structured_output(options)

    def is_allowed(grammar, **form):
        matcher = begun(grammars, grammar, encode(json.dumps(VALUE, **form)).ids)
        return not matcher.error and matcher.allows(EOS_TOKEN_ID)

    assert is_allowed(grammar, separators=(",", ":"))
    for form in ({"separators": (", ", ":")}, {"separators": (",", ": ")}, {"indent": 1}):
        assert not is_allowed(grammar, **form)
    flexible = read_structured_output({"json": {"x-guidance": {"whitespace_flexible": True}}})
    assert is_allowed(flexible, indent=1) and is_allowed(flexible, separators=(",", ":"))
    spaced = {"item_separator": ", ", "key_separator": ": "}
    assert is_allowed(read_structured_output({"json": {"x-guidance": spaced}}))


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
    tokens = allowed_tokens(matcher)
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
    for options, theirs_compiled in reference(directory, seed):
        import xgrammar

        ours, theirs = matcher_of(grammars, **options), xgrammar.GrammarMatcher(theirs_compiled)
        for _ in range(30):
            mask = xgrammar.allocate_token_bitmask(1, VOCAB_SIZE)
            theirs.fill_next_token_bitmask(mask)
            bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
            expected = np.flatnonzero(bits[:VOCAB_SIZE]).tolist()
            # It takes special tokens for their names.
            expected = [token for token in expected if token >= EOS_TOKEN_ID]
            tokens = allowed_tokens(ours)
            if tokens != expected:
                # Where the next bytes are forced, llguidance takes the usual token for them alone.
                (only,) = tokens
                forced = text_of[only]
                others = [text_of[token] for token in expected]
                is_same = [forced.startswith(o) or o.startswith(forced) for o in others]
                assert only in expected and all(is_same), (seed, options)
            num_compared += 1
            token = rng.choice(tokens)
            take(grammars, ours, token)
            assert theirs.accept_token(token)
            if token == EOS_TOKEN_ID or text_of[token].endswith(NARROW_LEADS):
                break
    assert num_compared > 40


def test_a_grammar_that_waits_too_long_is_the_error_of_its_request(directory):
    """Of few processes, which other grammars keep busy."""
    limits = replace(ONE, compile_s=0.05)
    request = GenerationRequest("a", np.array([1], np.int32))
    with closing(Grammars(directory, VOCAB_SIZE, [EOS_TOKEN_ID], limits)) as grammars:
        pending = PendingRequests(grammars)
        assert not pending.add(request, COMPILES_LONG)
        ended = []
        settle(grammars, lambda: ended.extend(pending.take_done()) or ended)
        ((_, refusal),) = ended
        assert refusal.field.startswith("structured_outputs")
        assert "not compiled in time" in refusal.reason or "to compile" in refusal.reason


def test_a_grammar_is_not_late_because_its_driver_was_busy(directory, monkeypatch):
    """As with the replacement of a daemon: it gave the processes no work, and took no answer."""
    away, clock = [0.0], "worker_client.structured.attended_clock.time"
    moved = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(away))
    monkeypatch.setattr(clock, moved)
    sources = [read_structured_output({"regex": f"a{{{count}}}b*"}) for count in range(2, 8)]
    with closing(Grammars(directory, VOCAB_SIZE, [EOS_TOKEN_ID], ONE)) as grammars:
        pending, ended = PendingRequests(grammars), []
        for index, source in enumerate(sources[1:]):
            request = GenerationRequest(str(index), np.array([1], np.int32))
            assert not pending.add(request, source)
        matcher = grammars.begin(sources[0])
        for _ in range(3):
            away.append(3600.0)
            grammars.proceed()
            ended.extend(pending.take_done())
        settle(grammars, lambda: ended.extend(pending.take_done()) or not pending)
        settle(grammars, lambda: matcher.is_ready)
        assert [refusal for _, refusal in ended] == [None] * (len(sources) - 1)
        assert not matcher.error


def follow(grammars, options, choose, most=60):
    """The tokens that a request gets, each drawn from its mask."""
    matcher = begun(grammars, read_structured_output(options))
    tokens = []
    while len(tokens) < most and EOS_TOKEN_ID not in tokens:
        tokens.append(choose(allowed_tokens(matcher)))
        take(grammars, matcher, tokens[-1])
        assert not matcher.error
    grammars.end(matcher)
    return tokens


def test_forced_tokens_are_those_that_masks_leave_alone(grammars, directory):
    """For random grammars, also where a token crosses characters: a request that gains its forced
    tokens gets the same ones as a request that samples each."""
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    cases = [regex_case("(a|b)\u30c6\u30b9\u30c8[a-z]{12}")]
    makers = (random_case, crossing_case, lambda rng: schema_case(forced_schema(rng)))
    cases += [makers[number % 3](rng) for number in range(45)]
    num_forced = 0
    none = GrammarLimits(max_jump=0)
    with closing(Grammars(directory, VOCAB_SIZE, [EOS_TOKEN_ID], none)) as sampling:
        for case in cases:
            choices = random.Random(seed)
            expected = follow(sampling, case.options, choices.choice)
            choices = random.Random(seed)
            matcher = begun(grammars, read_structured_output(case.options))
            for token in expected:
                tokens = allowed_tokens(matcher)
                assert choices.choice(tokens) == token, (seed, case.options)
                num_forced += bool(matcher.forced)
                take(grammars, matcher, token)
            grammars.end(matcher)
    assert num_forced > 200, seed


def test_a_fork_goes_on_behind_forced_tokens_and_leaves_its_matcher_be(grammars):
    """Forks have the masks of matchers that take the same tokens; one that the grammar refuses
    fails alone, and so does one that ends."""
    matcher = matcher_of(grammars, regex="(ab|cd)long-word[0-9]{2}(x|yz)?")
    take(grammars, matcher, allowed_tokens(matcher)[0])
    before = allowed_tokens(matcher)
    taken = [*matcher.taken, *matcher.forced]
    assert matcher.forced, "its word is forced"
    tails: list[list[int]] = []
    for first in _behind(matcher)[:3]:
        tails += [[first], [first, first], [first, first, EOS_TOKEN_ID], [first, EOS_TOKEN_ID]]
    forks = [grammars.fork(matcher, tail) for tail in tails]
    settle(grammars, lambda: all(fork.is_ready for fork in forks))
    for tail, fork in zip(tails, forks, strict=True):
        alone = grammars.begin(matcher.grammar.source, [*taken, *tail])
        settle(grammars, lambda alone=alone: alone.is_ready)
        assert allowed_tokens(fork) == allowed_tokens(alone), tail
        assert bool(fork.error) == bool(alone.error) and fork.taken == alone.taken
        grammars.end(alone)
        grammars.end(fork)
    assert sum(bool(fork.error) for fork in forks) == 3
    assert allowed_tokens(matcher) == before and matcher.taken + list(matcher.forced) == taken
    grammars.end(matcher)


def _behind(matcher):
    """Tokens that may be next behind the forced ones."""
    bits = np.unpackbits(np.ascontiguousarray(matcher.mask).view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


def test_forced_tokens_are_bounded(directory):
    options = {"choice": ["x" * 40 + "a"]}
    lengths = {}
    for most in (0, 5, 1000):
        made = Grammars(directory, VOCAB_SIZE, [EOS_TOKEN_ID], GrammarLimits(max_jump=most))
        lengths[most] = len(matcher_of(made, **options).forced)
        assert len(made.forced_first(read_structured_output(options))) == lengths[most]
        made.close()
    assert lengths[0] == 0 and lengths[5] == 5 and lengths[1000] > 5


def test_forced_tokens_that_the_model_lacks_are_not_named(directory):
    """The tokenizer has more tokens than the model: a text is written with the model's."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    text, forced = '"name": "green"!', []
    for size in (270, VOCAB_SIZE):
        with closing(Grammars(directory, size, [EOS_TOKEN_ID])) as made:
            forced.append(list(matcher_of(made, choice=[text]).forced))
            assert tokenizer.decode(forced[-1]) == text
    assert max(forced[0]) < 270 <= max(forced[1])
