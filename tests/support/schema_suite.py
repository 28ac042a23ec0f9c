"""The public JSON schema test suite against our grammars: no text that it calls invalid is allowed,
and what random sampling under the masks yields validates. `make schemas` runs it on the copy of the
suite in jsonschema's source distribution."""

import argparse
import json
import random
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
from tokenizers import Tokenizer

from tests.support.structured import (
    COMPACT,
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    allowed_tokens,
    begun,
    compiled,
    make_tokenizer,
    take,
)
from worker_client.errors import RequestError
from worker_client.inputs.grammar_options import read_structured_output
from worker_client.structured.grammars import Grammars
from worker_client.structured.matchers import GrammarMatcher

DRAFTS = ("draft2019-09", "draft2020-12")
"""Drafts whose schemas name their draft. Others are read as the newest one."""
MAX_TOKENS = 400


def read_suite(archive: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each case of the required tests, with its place."""
    with tarfile.open(archive) as files:
        for member in sorted(files.getmembers(), key=lambda each: each.name):
            *_, folder, draft, name = ("", "", *Path(member.name).parts)
            if folder == "tests" and draft in DRAFTS and name.endswith(".json"):
                content = files.extractfile(member)
                assert content is not None
                for case in json.load(content):
                    yield f"{draft}/{name}: {case['description']}", case


class Suite:
    """Runs cases; counts outcomes and keeps the texts that are allowed wrongly."""

    def __init__(self, seed: int, num_outputs: int) -> None:
        directory = Path(tempfile.mkdtemp())
        self._tokenizer: Tokenizer = make_tokenizer(directory)
        self._grammars = Grammars(directory, VOCAB_SIZE, [EOS_TOKEN_ID])
        self._rng = random.Random(seed)
        self._num_outputs = num_outputs
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []

    def run(self, place: str, case: Mapping[str, Any]) -> None:
        """Compile a case's schema, judge the suite's texts, and sample outputs."""
        schema = case["schema"]
        compact = {**schema, "x-guidance": COMPACT} if isinstance(schema, dict) else schema
        try:
            grammar = read_structured_output({"json": json.dumps(compact)})
            compiled(self._grammars, grammar)
        except RequestError:
            self.outcomes["schemas refused"] += 1
            return
        self.outcomes["schemas compiled"] += 1
        for test in case["tests"]:
            text = json.dumps(test["data"], separators=(",", ":"), ensure_ascii=False)
            matcher = begun(self._grammars, grammar, self._tokenizer.encode(text).ids)
            is_allowed = matcher.allows(EOS_TOKEN_ID)
            self._grammars.end(matcher)
            outcome = "allowed" if is_allowed else "not allowed"
            self.outcomes[f"{'valid' if test['valid'] else 'invalid'} texts {outcome}"] += 1
            if is_allowed and not test["valid"]:
                self.wrong.append(f"{place}: allows {text}")
        validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        for _ in range(self._num_outputs):
            matcher = begun(self._grammars, grammar)
            output = self._sample(matcher)
            self._grammars.end(matcher)
            if output is None:
                self.outcomes["outputs cut at their length"] += 1
                continue
            self.outcomes["outputs"] += 1
            try:
                validator(schema).validate(json.loads(output))
            except (ValueError, jsonschema.ValidationError) as error:
                self.wrong.append(f"{place}: sampled {output}: {error}")

    def _sample(self, matcher: GrammarMatcher) -> str | None:
        """Return an output, each token drawn from the mask; None if it does not end."""
        tokens: list[int] = []
        for _ in range(MAX_TOKENS):
            allowed = allowed_tokens(matcher)
            can_end = EOS_TOKEN_ID in allowed
            if can_end and (len(allowed) == 1 or self._rng.random() < 0.5):
                return str(self._tokenizer.decode(tokens))
            token = self._rng.choice([each for each in allowed if each != EOS_TOKEN_ID])
            take(self._grammars, matcher, token)
            tokens.append(token)
        return None


def main() -> int:
    """Run the suite; return 1 if a text is allowed wrongly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path, help="jsonschema's source distribution, .tar.gz")
    parser.add_argument("--outputs", type=int, default=20, help="random outputs for each schema")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    options = parser.parse_args()
    print(f"seed {options.seed}")
    suite = Suite(options.seed, options.outputs)
    for place, case in read_suite(options.archive):
        suite.run(place, case)
    for outcome, count in sorted(suite.outcomes.items()):
        print(f"{count:7,}  {outcome}")
    print("\n".join(suite.wrong) or "no text is allowed wrongly")
    return 1 if suite.wrong or not suite.outcomes["outputs"] else 0


if __name__ == "__main__":
    sys.exit(main())
