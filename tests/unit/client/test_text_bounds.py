"""Texts and tokenizer files that take any time or memory: each is refused within its bounds, while
this process goes on running Python, and the next text is encoded."""

import contextlib
import json
import os
import random
import signal
import threading
import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from tests.support.waiting import wait_until
from worker_client.errors import ClientConfigError, RequestError
from worker_client.inputs.request_parser import RequestParser
from worker_client.inputs.stop_strings import StopWatch
from worker_client.inputs.text_stream import StreamedText
from worker_client.inputs.tokenizer import MAX_WINDOW, SHORT_TEXT_BYTES, Tokenizer

SEED = random.randrange(10**6)
CATASTROPHIC = Regex("(a+)+b")
HOSTILE_TEXT = ("a" * 20 + "c") * 2000
"""Minutes for CATASTROPHIC, in 40 KB, without a match that exceeds the limit of its engine."""


def byte_level(**parts):
    """A tokenizer of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    for part, value in parts.items():
        setattr(made, part, value)
    return made


@contextlib.contextmanager
def opened(path, reference):
    reference.save(str(path / "tokenizer.json"))
    with contextlib.closing(Tokenizer(path / "tokenizer.json")) as tokenizer:
        yield tokenizer


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    with opened(tmp_path_factory.mktemp("plain"), byte_level()) as tokenizer:
        yield tokenizer


@pytest.fixture
def hostile(tmp_path):
    split = pre_tokenizers.Split(CATASTROPHIC, "isolated")
    with opened(tmp_path, byte_level(pre_tokenizer=split)) as tokenizer:
        yield tokenizer


class Beat:
    """A thread that runs Python all the time. `processor_s`: what this process's threads used."""

    def __enter__(self):
        self.count, self._ends = 0, False
        self._thread = threading.Thread(target=self._run)
        self._began = time.process_time()
        self._thread.start()
        return self

    def _run(self):
        while not self._ends:
            self.count += 1
            time.sleep(0.002)

    def __exit__(self, *_):
        self._ends = True
        self._thread.join()
        self.processor_s = time.process_time() - self._began


def refused(call, field, said):
    with pytest.raises(RequestError, match=said) as error:
        call()
    assert error.value.field == field
    assert len(str(error.value)) < 1000
    assert "fix:" in str(error.value)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=300), special=st.booleans())
def test_ids_are_those_of_tokenizers(ours, text, special):
    assert (
        ours.encode(text, add_special_tokens=special)
        == byte_level().encode(text, add_special_tokens=special).ids
    )
    assert ours.decode(ours.encode(text)) == text


def test_long_texts_are_encoded_without_the_gil(ours):
    """`encode` of tokenizers holds it for seconds."""
    text = " ".join(map(str, range(400_000)))[: 2 << 20]
    with Beat() as beat:
        ids = ours.encode(text)
    assert len(ids) == len(text)
    assert beat.count > 20
    assert beat.processor_s < 1.0, "it was not encoded here"


@pytest.mark.parametrize("size", [5 << 20, 200 << 20])
def test_longer_texts_are_refused_before_they_cost(ours, size):
    began = time.process_time()
    refused(lambda: ours.encode("x" * size), "prompt", "too long")
    refused(lambda: ours.encode("é" * (size // 2)), "prompt", "too long")
    refused(lambda: ours.encode_word("x" * 2000), "bad_words", "characters")
    assert time.process_time() - began < 1.0
    assert ours.encode("é") == byte_level().encode("é").ids


def test_no_text_is_longer_than_its_context_can_be(tmp_path):
    with opened(tmp_path, byte_level()) as tokenizer:
        tokenizer.fit_context(100)  # its longest tokens have two bytes
        assert len(tokenizer.encode("x" * SHORT_TEXT_BYTES)) == SHORT_TEXT_BYTES
        refused(lambda: tokenizer.encode("x" * (SHORT_TEXT_BYTES + 1)), "prompt", "too long")
        tokenizer.fit_context(SHORT_TEXT_BYTES)
        assert len(tokenizer.encode("x" * (SHORT_TEXT_BYTES + 1))) == SHORT_TEXT_BYTES + 1
        tokenizer.fit_context(10**9)
        refused(lambda: tokenizer.encode("x" * (5 << 20)), "prompt", "too long")


def test_a_text_that_takes_long_is_ended_and_delays_no_other(hostile):
    errors = []

    def bad():
        with pytest.raises(RequestError, match="more than 1 s") as error:
            hostile.encode(HOSTILE_TEXT)
        errors.append(error.value)

    thread = threading.Thread(target=bad)
    with Beat() as beat:
        thread.start()
        num_done = 0
        while thread.is_alive():
            assert hostile.encode("hello")
            num_done += 1
        thread.join()
    assert num_done > 20
    assert beat.count > 100
    assert [error.field for error in errors] == ["prompt"]
    assert hostile.encode("aab") == byte_level().encode("aab").ids


def test_a_panic_of_tokenizers_is_an_error_of_the_text(hostile):
    refused(lambda: hostile.encode("a" * 40), "prompt", "retry-limit")
    assert hostile.encode("aab")


def test_a_text_that_takes_too_much_memory_is_refused(tmp_path):
    grows = normalizers.Sequence([normalizers.Replace("a", "aa")] * 40)
    with opened(tmp_path, byte_level(normalizer=grows)) as tokenizer:
        with pytest.raises(RequestError) as error:
            tokenizer.encode("a")
        assert error.value.field == "prompt"
        assert tokenizer.encode("b")


@pytest.mark.parametrize("when", ["idle", "all", "busy"])
def test_a_killed_process_costs_no_text(tmp_path, when):
    with opened(tmp_path, byte_level()) as tokenizer:
        text = "x" * (SHORT_TEXT_BYTES // 2)
        expected = tokenizer.encode(text)
        if when == "busy":
            texts = [text] * 40
            found = []
            thread = threading.Thread(target=lambda: found.extend(map(tokenizer.encode, texts)))
            thread.start()
            wait_until(lambda: found, "it encodes", 60)
            for pid in tokenizer._short.pids[-1:]:
                os.kill(pid, signal.SIGKILL)
            thread.join()
            assert found == [expected] * len(texts)
            return
        for pid in tokenizer._short.pids[: None if when == "all" else 1]:
            os.kill(pid, signal.SIGKILL)
        assert tokenizer.encode(text) == expected


def hostile_files(rng):
    """Yield files that a checkpoint must not have, and what is said of them."""
    plain = json.loads(byte_level().to_str())
    twice = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    number = rng.randint(18, 60)
    yield {**plain, "decoder": {"type": "Sequence", "decoders": [twice] * number}}, "bytes of text"
    nowhere = {"type": "Replace", "pattern": {"String": ""}, "content": "x" * 70_000}
    yield {**plain, "decoder": nowhere}, "bytes of text"
    regex = {"type": "Replace", "pattern": {"Regex": "(a+)+b"}, "content": ""}
    yield {**plain, "decoder": regex}, "regular expression"
    yield {**plain, "decoder": {"type": "Sequence", "decoders": [regex]}}, "regular expression"
    token = {"id": 256, "content": "x" * 70_000, "special": False, "single_word": False}
    token |= {"lstrip": False, "rstrip": False, "normalized": False}
    yield {**plain, "added_tokens": [token]}, "bytes of text"
    deep = {"type": "Lowercase"}
    for _ in range(rng.randint(150, 400)):
        deep = {"type": "Sequence", "normalizers": [deep]}
    yield {**plain, "normalizer": deep}, "recursion"
    split = {"type": "Split", "pattern": {"Regex": "(" * 9999}, "behavior": "Isolated"}
    yield {**plain, "pre_tokenizer": {**split, "invert": False}}, "cannot read"
    yield {**plain, "model": {"type": "BPE", "vocab": [], "merges": []}}, "cannot read"


def test_hostile_files_are_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    for file, said in hostile_files(random.Random(SEED)):
        path.write_text(json.dumps(file))
        with pytest.raises(ClientConfigError, match=said) as error:
            Tokenizer(path)
        assert error.value.field == "model"
    for text in ("[" * 10**6, '{"a":' * 10**6, "", "\udcff"):
        path.write_text(text, errors="surrogateescape")
        with pytest.raises(ClientConfigError, match="cannot read the tokenizer"):
            Tokenizer(path)
    with path.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ClientConfigError, match="at most"):
        Tokenizer(path)


def test_many_bad_words_are_refused_before_they_are_tokenized(ours):
    parser = RequestParser(ours.encode, encode_word=ours.encode_word)
    words = ["word"] * 10**5
    line = json.dumps({"prompt": "a", "bad_words": words})
    began = time.process_time()
    refused(lambda: parser.parse(line, 0), "bad_words", "too many")
    refused(
        lambda: parser.parse(json.dumps({"prompt": "a", "bad_words": ["x" * 10**6]}), 0),
        "bad_words",
        "characters",
    )
    assert time.process_time() - began < 1.0


def test_streams_and_stop_strings_take_linear_time(tmp_path):
    """Tokens without text filled a stream's window, and each token copied the text before it."""
    made = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "": 1, "x" * 500: 2}, "<unk>"))
    made.decoder = decoders.Fuse()

    def processor_s(stream, number):
        began = time.process_time()
        for _ in range(number):
            stream(1)
            stream(2)
        return time.process_time() - began

    with opened(tmp_path, made) as tokenizer:
        stream = tokenizer.stream()
        for _ in range(1000):
            assert stream.push(1) == ""
            assert len(stream._window) <= MAX_WINDOW + 1
        streamed = StreamedText(tokenizer)
        assert streamed.take([1] * 1000 + [2, 1, 2]) == "x" * 1000

        def watch():
            watch = StopWatch(["z" * 9], tokenizer.stream(), min_tokens=0, includes_stop=False)
            return watch.take

        short = min(processor_s(watch(), 2000) for _ in range(3))
        long = processor_s(watch(), 40_000)
        assert long < 20 * short * 4
