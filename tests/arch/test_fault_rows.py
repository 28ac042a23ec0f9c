"""tests/faults/matrix.md names the tests of every row of the fault matrix, and they are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUM_ROWS = 42


def test_every_row_of_the_fault_matrix_names_tests_that_exist():
    text = (ROOT / "tests" / "faults" / "matrix.md").read_text()
    table = text[text.index("| row |") :]
    rows = {}
    for line in table.splitlines()[2:]:
        number, _, tests = line.strip("|").split("|")
        rows[int(number)] = re.findall(r"`(tests/[^`]+)`", tests)
    assert list(rows) == list(range(1, NUM_ROWS + 1))
    for number, files in rows.items():
        assert files, f"row {number}"
        for file in files:
            assert (ROOT / file).is_file(), file
