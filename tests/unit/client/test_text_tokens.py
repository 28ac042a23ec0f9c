"""Grammars and tokens that are more than their text: added and special tokens, normalizers, spaces
in front. What a grammar forces is written with tokens that its matcher takes, whatever the
tokenizer would make of the text."""

import json
import random
import re
from contextlib import closing

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from rpc_schema.structured import StructuredOutput
from tests.support.exhaustive import exhaustively
from tests.support.structured import allowed_tokens, begun, compiled, settle, take
from worker_client.errors import RequestError
from worker_client.inputs.grammar_options import read_structured_output
from worker_client.structured.grammars import GrammarLimits, Grammars
from worker_client.structured.mask_process import SLICES, as_llguidance
from worker_client.structured.text_tokens import TextTokens

END = "</s>"
SHOWN = ("<tool_call>", "</tool_call>", "<think>", "  ", "Zürich")
"""Added tokens that stay in the text of an output."""
SPECIAL = (END, "<|sep|>", "[INST]", "</think>")
DECOMPOSED = "Zu\u0308rich"
PIECES = (*SHOWN, *SPECIAL, DECOMPOSED, "\ufb01n", "A\u030a", "Ünit", "name", "a b", "😀", "x", " ")
"""Texts that tokenizers join, split, normalize or take for special tokens."""
TRAINED = [
    "think",
    "tool call",
    "name the name",
    "Zürich fine unit",
    DECOMPOSED,
    '{}[]": , <a> </a>',
]


def byte_level(rng, *, has_prefix=False, normalizer=None):
    """A random byte-level tokenizer with all added tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=has_prefix)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + rng.randint(0, 120),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(rng.choices(TRAINED, k=12), trainer)
    added = [AddedToken(text, special=False, rstrip=rng.random() < 0.2) for text in SHOWN]
    added += [AddedToken(text, special=True, lstrip=rng.random() < 0.2) for text in SPECIAL]
    rng.shuffle(added)
    for token in added:
        tokenizer.add_tokens([token])
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def random_tokenizer(rng):
    normalizer = rng.choice(
        [None, normalizers.NFC(), normalizers.NFKC(), normalizers.NFD(), normalizers.Lowercase()]
    )
    return byte_level(rng, has_prefix=rng.random() < 0.3, normalizer=normalizer)


def byte_fallback():
    """A tokenizer in the form of sentencepiece's, as Llama 2 has it."""
    pieces = ["<unk>", END, *(f"<0x{value:02X}>" for value in range(256))]
    pieces += ["▁", *"abcdehiknrtuxZ</>_", "▁a", "th", "in", "<tool_call>", "<think>"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("t", "h"), ("i", "n")]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.add_special_tokens(["<unk>", END])
    tokenizer.add_tokens(["<tool_call>"])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def random_grammar(rng):
    """A grammar's options, and the check of a text by another judge."""
    texts = ["".join(rng.choices(PIECES, k=rng.randint(1, 3))) for _ in range(rng.randint(1, 3))]
    kind = rng.choice(["regex", "choice", "lark", "gbnf", "const", "names"])
    if kind == "choice":
        return {"choice": texts}, lambda text: text in texts
    if kind == "const":
        value = rng.choice([texts[0], {texts[0]: texts[-1]}, [texts[0], 1]])
        return {"json": {"const": value}}, lambda text: json.loads(text) == value
    if kind == "names":
        names = list(dict.fromkeys(texts))
        schema = {
            "type": "object",
            "properties": {name: {"type": "integer", "minimum": 0, "maximum": 9} for name in names},
            "required": names,
            "additionalProperties": False,
        }
        options = {"json": {**schema, "x-guidance": {"whitespace_flexible": False}}}
        return options, lambda text: jsonschema.validate(json.loads(text), schema) is None
    first, last = texts[0], texts[-1]
    pattern = f"{re.escape(first)}[a-c]{{1,3}}{re.escape(last)}"
    if kind == "regex":
        rust = "".join(f"\\u{{{ord(c):x}}}" for c in first) + "[a-c]{1,3}"
        rust += "".join(f"\\u{{{ord(c):x}}}" for c in last)
        return {"regex": rust}, lambda text: re.fullmatch(pattern, text) is not None
    quoted = [json.dumps(text, ensure_ascii=False) for text in (first, last)]
    if kind == "lark":
        grammar = f"start: {quoted[0]} /[a-c]{{1,3}}/ {quoted[1]}"
    else:
        grammar = f"root ::= {quoted[0]} [a-c] [a-c]? [a-c]? {quoted[1]}"
    return {"grammar": grammar}, lambda text: re.fullmatch(pattern, text) is not None


def saved(tokenizer, directory):
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def decoded(tokenizer, tokens, end):
    """The text as `tokenizers` has it, without the end alone."""
    return tokenizer.decode([token for token in tokens if token != end], skip_special_tokens=False)


def mask_of(matcher, size):
    mask = np.zeros(-(-size // 32), np.int32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


@pytest.mark.parametrize("count", [25, exhaustively(1500)])
def test_matchers_take_every_token_of_their_masks(count):
    """Random grammars over random tokenizers, each followed to its end; and the text is one that
    the grammar allows, by other judges."""
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    num_forced = 0
    for _ in range(count):
        tokenizer = random_tokenizer(rng)
        end, size = tokenizer.token_to_id(END), tokenizer.get_vocab_size() + 5
        texts = TextTokens(tokenizer.to_str().encode(), size, [end])
        made = texts.tokenizer(SLICES, [end])
        special = {tokenizer.token_to_id(text) for text in SPECIAL}
        for _ in range(4):
            options, check = random_grammar(rng)
            where = (seed, options)
            grammar = read_structured_output(options)
            source = as_llguidance(grammar.kind, grammar.text, texts.names)
            matcher = LLMatcher(made, source, log_level=0)
            tokens = []
            while not tokens or tokens[-1] != end:
                allowed = mask_of(matcher, size)
                assert not matcher.is_error() and not texts.unwritable, (where, matcher.get_error())
                for token in rng.sample(allowed, min(8, len(allowed))):
                    assert matcher.deep_copy().consume_token(token), (where, tokens, token)
                assert not special.difference([end]).intersection(allowed), where
                num_forced += len(allowed) == 1
                tokens.append(rng.choice(allowed))
                assert matcher.consume_token(tokens[-1]), (where, tokens)
            assert check(decoded(tokenizer, tokens, end)), (where, tokens)
    assert num_forced > 10 * count, seed


def outputs_of(grammars, cases, seed, end, *, together):
    """The tokens of a request for each case, drawn from its masks; all at once, or one by one."""
    matchers, tokens = {}, {}
    choices = {name: random.Random(f"{seed}:{name}") for name in cases}
    groups = [list(cases)] if together else [[name] for name in cases]
    for names in groups:
        for name in names:
            grammar = read_structured_output(cases[name][0])
            compiled(grammars, grammar)
            matchers[name], tokens[name] = grammars.begin(grammar), []
        while left := [name for name in names if end not in tokens[name]]:
            settle(grammars, lambda left=left: all(matchers[name].is_ready for name in left))
            for name in left:
                matcher = matchers[name]
                assert not matcher.error, (seed, cases[name][0], matcher.error)
                token = choices[name].choice(allowed_tokens(matcher))
                tokens[name].append(token)
                grammars.take(matcher, [token])
        for name in names:
            grammars.end(matchers[name])
    return tokens


@pytest.mark.parametrize("count", [24, exhaustively(300)])
def test_tokens_are_the_same_with_and_without_jumps_alone_and_among_others(tmp_path, count):
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    tokenizer = random_tokenizer(rng)
    end, size = tokenizer.token_to_id(END), tokenizer.get_vocab_size()
    path = saved(tokenizer, tmp_path)
    cases = {f"r{number}": random_grammar(rng) for number in range(count)}
    found = []
    for most in (0, 1024):
        limits = GrammarLimits(max_jump=most, num_compilers=1, num_serving=1)
        with closing(Grammars(path, size, [end], limits)) as grammars:
            for together in (False, True):
                found.append(outputs_of(grammars, cases, seed, end, together=together))
    assert all(each == found[0] for each in found), seed
    for name, (options, check) in cases.items():
        assert check(decoded(tokenizer, found[0][name], end)), (seed, options)


@pytest.fixture(scope="module")
def shown_and_special(tmp_path_factory):
    """Grammars of a tokenizer, and the tokenizer, which composes characters."""
    tokenizer = byte_level(random.Random(1), normalizer=normalizers.NFC())
    path = saved(tokenizer, tmp_path_factory.mktemp("model"))
    end = tokenizer.token_to_id(END)
    with closing(Grammars(path, tokenizer.get_vocab_size(), [end])) as grammars:
        yield grammars, tokenizer, end


def finished(grammars, options, end):
    """The tokens of one request, of which each is the least that its mask allows."""
    matcher = begun(grammars, read_structured_output(options))
    tokens = []
    while end not in tokens and len(tokens) < 60:
        assert not matcher.error, (options, matcher.error)
        tokens.append(min(allowed_tokens(matcher)))
        take(grammars, matcher, tokens[-1])
    grammars.end(matcher)
    assert not matcher.error and tokens[-1] == end
    return tokens


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"regex": r'<tool_call>\{"n": [3]\}</tool_call>'}, '<tool_call>{"n": 3}</tool_call>'),
        ({"grammar": 'root ::= "<think>" [a] "</think>"'}, "<think>a</think>"),
        ({"choice": ["</s>"]}, "</s>"),
        ({"json": {"const": "</s>"}}, '"</s>"'),
        ({"grammar": 'start: "</s>"'}, "</s>"),
        ({"regex": DECOMPOSED}, DECOMPOSED),
        ({"grammar": r'root ::= "Zu\u0308rich\u0022" [\u0061]'}, DECOMPOSED + '"a'),
        ({"grammar": 'start: <think> "a" </think> "<think></think>" // <think>\n'},
         "<think>a</think><think></think>"),
        ({"grammar": "start: <|sep|> /<think>/"}, "<|sep|><think>"),
    ],
)  # fmt: skip
def test_a_text_is_a_text_and_a_name_is_a_token(shown_and_special, options, text):
    """A special token comes by its name only; another added token is text too."""
    grammars, tokenizer, end = shown_and_special
    tokens = finished(grammars, options, end)
    assert decoded(tokenizer, tokens, end) == text
    named = re.findall(r"(?<![\"/])(?:<\|sep\|>|</think>)(?![\"/])", options.get("grammar", ""))
    special = {tokenizer.token_to_id(each) for each in SPECIAL} - {end}
    assert sorted(special & set(tokens)) == sorted(map(tokenizer.token_to_id, set(named)))
    if text.startswith(SHOWN[:3]):
        assert tokens[0] == tokenizer.encode(text).ids[0]


def test_what_no_text_matches_is_refused_with_a_fix(shown_and_special):
    grammars, _, _ = shown_and_special
    for options in (
        {"json": {"$ref": "#"}},
        {"json": {"anyOf": [{"$ref": "#"}]}},
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}},
        {"grammar": 'root ::= root "a"'},
        {"regex": r"[^\s\S]"},
    ):
        with pytest.raises(RequestError, match="no text goes on") as refused:
            compiled(grammars, read_structured_output(options))
        assert refused.value.field == f"structured_outputs.{next(iter(options))}"
        assert "an alternative without" in refused.value.fix
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    endless |= {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
    with pytest.raises(RequestError, match="too complex") as refused:
        compiled(grammars, read_structured_output({"json": endless}))
    assert refused.value.fix


def test_a_text_that_the_model_has_no_tokens_for_is_refused(tmp_path):
    """Of a byte-level tokenizer without all bytes."""
    tokenizer = byte_level(random.Random(2))
    fields = json.loads(tokenizer.to_str())
    del fields["model"]["vocab"]["Ã"]
    fields["model"]["merges"] = [each for each in fields["model"]["merges"] if "Ã" not in str(each)]
    fields["model"]["vocab"] = {k: v for k, v in fields["model"]["vocab"].items() if "Ã" not in k}
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    end = tokenizer.token_to_id(END)
    with closing(Grammars(tmp_path, tokenizer.get_vocab_size(), [end])) as grammars:
        with pytest.raises(RequestError, match="no tokens for a text"):
            compiled(grammars, StructuredOutput(kind="choice", text='["aé"]'))
        matcher = begun(grammars, StructuredOutput(kind="choice", text='["aé", "ab"]'))
        take(grammars, matcher, tokenizer.token_to_id("a"))
        assert allowed_tokens(matcher) == [tokenizer.token_to_id("b")]


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_bytes_of_tokens_are_llguidances(kind):
    """But for added tokens between angle brackets, which are special to it."""
    tokenizer = byte_level(random.Random(3)) if kind == "byte level" else byte_fallback()
    end = tokenizer.token_to_id(END)
    texts = TextTokens(tokenizer.to_str().encode(), tokenizer.get_vocab_size(), [end])
    theirs = LLTokenizer(tokenizer.to_str(), eos_token=[end], slices=[])
    ours = texts.tokenizer([], [end])
    numbers = range(tokenizer.get_vocab_size())
    assert [ours.decode_bytes([n]) for n in numbers] == [theirs.decode_bytes([n]) for n in numbers]
    mine = {n for n in numbers if ours.is_special_token(n)}
    added = {tokenizer.token_to_id(text) for text in SHOWN} - {None}
    assert mine == {n for n in numbers if theirs.is_special_token(n)} - added


def test_a_prefix_of_sentencepiece_is_not_written():
    tokenizer = byte_fallback()
    end = tokenizer.token_to_id(END)
    texts = TextTokens(tokenizer.to_str().encode(), tokenizer.get_vocab_size(), [end])
    texts.tokenizer([], [end])
    for text in ("a", " a", "thin  a", "é</s>", "<think><tool_call>", "<0x41>", "▁"):
        tokens = texts(text.encode())
        assert b"".join(texts.tokens[token] for token in tokens) == text.encode(), text
        assert end not in tokens
    assert texts(b" a") == [tokenizer.token_to_id("▁a")]
    assert texts(b"<tool_call>") == [tokenizer.token_to_id("<tool_call>")]
