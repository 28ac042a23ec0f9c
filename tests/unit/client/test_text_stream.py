"""Text of requests in parts, with tokenizers of three kinds, against `tokenizers`' own decoding and
a search of the whole text."""

import itertools

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from worker_client.inputs.text_stream import StreamedText
from worker_client.inputs.tokenizer import MAX_WINDOW, REPLACEMENT, Tokenizer
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import RequestOutput, Scheduler, SchedulerLimits
from worker_client.scheduler_output import StepResult
from worker_client.service.marked_text import MarkedText

CHARACTERS = "aab  \n.Zé\u0301\u200d🙂👩🏽你好한ᄀ\U0001f1e9\U0001f1ea"
TEXTS = ["a ab aab. Zab é aé 🙂🙂 你好 a你", "aaab baba. ba\nb \u0301a \U0001f1e9\U0001f1ea"] * 8
SPECIAL = ["<bos>", "<eos>"]

text_of = st.text(CHARACTERS, max_size=30)
some_stops = st.lists(st.text(CHARACTERS, min_size=1, max_size=5), max_size=4)
fast = settings(max_examples=150, deadline=None, database=None)
few = settings(max_examples=30, deadline=None, database=None)


def byte_level():
    """Tokens are sequences of bytes, with or without whole characters."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<call>", special=False)])
    return tokenizer


def byte_fallback():
    """Words begin with a mark, and unknown characters are tokens of single bytes."""
    pieces = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", ".", "Z", "你", "▁a", "▁ab", "ab"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    model = models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def word_piece():
    """Continuations of words have a mark, and spaces are added between words."""
    trained = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trained.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=80, special_tokens=["<unk>", *SPECIAL], show_progress=False
    )
    trained.train_from_iterator(TEXTS, trainer)
    return trained


@pytest.fixture(scope="module", params=[byte_level, byte_fallback, word_piece])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def reference(kind):
    return kind()


@pytest.fixture(scope="module")
def ours(reference, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    reference.save(str(path))
    return Tokenizer(path)


def output_of(tokens, text=None):
    reason = "length" if text is None else "stop"
    return RequestOutput("a", list(tokens), reason, 1, 0, 0, None, text=text)


def split(data, tokens):
    """Parts of the tokens, some of them empty."""
    places = data.draw(st.lists(st.integers(0, len(tokens)), max_size=len(tokens)))
    bounds = [0, *sorted(places), len(tokens)]
    return [tokens[a:b] for a, b in itertools.pairwise(bounds)]


def whole_characters(reference, tokens):
    """Their text, without the beginning of a character at its end, which may hide those before."""
    begun = (tokens[:number] for number in range(len(tokens) + 1))
    texts = (reference.decode(each, skip_special_tokens=True) for each in begun)
    return max((text.rstrip(REPLACEMENT) for text in texts), key=len)


def ended(reference, tokens, stops, includes_stop):
    """Where a request with these tokens ends: their number, and the text up to a stop string."""
    for number in range(1, len(tokens) + 1):
        text = whole_characters(reference, tokens[:number])
        found = [(text.index(stop), len(stop)) for stop in stops if stop in text]
        if found:
            start, length = min(found)
            return number, text[: start + length if includes_stop else start]
    return len(tokens), None


def undecided(text, stops):
    """Text that no stop string can begin in, whatever comes."""
    for place in range(len(text)):
        if any(stop.startswith(text[place:]) and stop != text[place:] for stop in stops):
            return text[:place]
    return text


@fast
@given(st.data())
def test_parts_join_to_the_text_and_hold_a_stop_string_back(reference, ours, data):
    stops = data.draw(some_stops)
    includes_stop = data.draw(st.booleans())
    tokens = reference.encode(data.draw(text_of), add_special_tokens=False).ids
    number, text = ended(reference, tokens, stops, includes_stop)
    *parts, last = split(data, tokens[:number]) if number < len(tokens) else split(data, tokens)
    streamed = StreamedText(ours, stops, includes_stop=includes_stop)
    shown, taken = "", []
    if text is not None and not last:  # the last token comes with the end
        parts, last = [], tokens[:number]
    for part in parts:
        shown += streamed.take(part)
        taken += part
        known = whole_characters(reference, taken)
        assert shown == (known if includes_stop else undecided(known, stops))
    shown += streamed.take(last, output_of(tokens[:number], text))
    whole = reference.decode(tokens, skip_special_tokens=True)
    assert shown == (whole if text is None else text)


@fast
@given(st.data())
def test_any_tokens_give_the_text_of_all(reference, ours, data):
    """Bytes that are no characters, special tokens and ids without a token included."""
    ids = st.integers(0, reference.get_vocab_size() + 3)
    tokens = data.draw(st.lists(ids, max_size=60) | st.lists(st.integers(0, 8)))
    streamed = StreamedText(ours)
    *parts, last = split(data, tokens)
    joined = "".join(streamed.take(part) for part in parts)
    joined += streamed.take(last, output_of(tokens))
    assert joined == ours.decode(tokens)
    whole = reference.decode(tokens, skip_special_tokens=True)
    if REPLACEMENT not in whole or isinstance(reference.decoder, decoders.ByteLevel):
        assert joined == whole


@pytest.mark.parametrize("number", [MAX_WINDOW - 1, MAX_WINDOW, 5 * MAX_WINDOW])
def test_bytes_that_are_no_characters_are_not_held_for_long(tmp_path, number):
    reference = byte_level()
    reference.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer(tmp_path / "tokenizer.json")
    no_character, half = reference.token_to_id("ÿ"), reference.token_to_id("ä")  # 0xff, 0xe4
    for token in (no_character, half):
        stream = ours.stream()
        shown = ""
        for count in range(1, number + 1):
            shown += stream.push(token)
            assert len(shown) >= count - MAX_WINDOW - 1
        assert shown + stream.flush() == REPLACEMENT * number
    tokens = [half] * number + reference.encode("你a").ids
    stream = ours.stream()
    assert "".join(map(stream.push, tokens)) == REPLACEMENT * number + "你a"


def test_special_tokens_take_no_room(tmp_path):
    reference = byte_level()
    reference.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer(tmp_path / "tokenizer.json")
    first, *rest = reference.encode("🙂!").ids
    special, call = reference.token_to_id("<eos>"), reference.token_to_id("<call>")
    tokens = [first, *[special] * 1000, *rest, call, special]
    stream = ours.stream()
    assert "".join(map(stream.push, tokens)) == "🙂!<call>"


@pytest.mark.parametrize("min_tokens", [0, 4, 6])
def test_a_stop_string_that_comes_too_early_is_shown(tmp_path, min_tokens):
    """With the reference scheduler, which ignores one within min_tokens, as the other side."""
    reference = byte_level()
    reference.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer(tmp_path / "tokenizer.json")
    tokens = [reference.token_to_id(each) for each in "ab.ab.ab.ab."]
    scheduler = Scheduler(SchedulerLimits(8, 16, 128, 64, 4, vocab_size=400), ours)
    request = GenerationRequest(
        "a",
        np.array([1], np.int32),
        12,
        sampling=SamplingParams(min_tokens=min_tokens, stop=("b.a", ".ab.")),
    )
    scheduler.add_request(request)
    streamed, shown, outputs, sent = StreamedText(ours, request.sampling.stop), "", [], 0
    while not outputs:
        output = scheduler.schedule()
        outputs = scheduler.update_from_output(output, StepResult(["a"], [tokens[sent]]))
        sent += 1
        if not outputs:
            shown += streamed.take([tokens[sent - 1]])
    shown += streamed.take([], outputs[0])
    assert shown == outputs[0].text == {0: "a", 4: "ab", 6: "ab.a"}[min_tokens]


@few
@given(st.data())
def test_bytes_of_tokens_join_to_the_bytes_of_a_text(kind, reference, ours, data):
    if kind is word_piece:  # its tokens are no bytes
        return
    text = "a" + data.draw(text_of)
    tokens = reference.encode(text, add_special_tokens=False).ids
    joined = b"".join(map(ours.bytes_of, tokens))
    assert joined.removeprefix(b" " if kind is byte_fallback else b"") == text.encode()


@few
@given(st.data())
def test_marks_are_at_their_places(reference, ours, data):
    """A special token is nothing in a text, and itself in one with marks."""
    mark = reference.token_to_id(SPECIAL[0])
    runs = data.draw(st.lists(st.sampled_from(["a", "ab b", "b.b", "aab 🙂"]), max_size=5))
    encoded = [reference.encode(run, add_special_tokens=False).ids for run in runs]
    tokens = [token for run in encoded for token in (mark, *run)]
    *parts, last = split(data, tokens)
    marked = MarkedText(StreamedText(ours, ["Zab"]), {mark: "[M]"})
    shown = "".join(map(marked.take, parts)) + marked.take(last, output_of(tokens))
    pieces = shown.split("[M]")
    assert len(pieces) == len(runs) + 1
    for number in range(len(runs) + 1):
        before = [token for run in encoded[:number] for token in run]
        assert "".join(pieces[: number + 1]) == reference.decode(before)
