"""`python -m tests.support.stamps`: 1,000 updates over all cases, in a quarter of an hour or so."""

import argparse
import random
import sys

from tests.support.stamps.plan import CASES, Death
from tests.support.stamps.run import run_case

DEATHS: dict[Death, int] = {
    "driver": 2,
    "driver in update": 4,
    "rank": 2,
    "rank in update": 2,
    "trainer": 1,
}
"""Of each case."""


def main() -> None:
    """Run them."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.stamps", description=__doc__)
    parser.add_argument("--updates", type=int, default=1000, help="of all cases together")
    parser.add_argument("--only", choices=CASES, action="append", help="cases; may be repeated")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    given = parser.parse_args()
    names = given.only or list(CASES)
    for name in names:
        run_case(name, given.seed, given.updates // len(names), DEATHS, say)


def say(line: str) -> None:
    """Write a line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
