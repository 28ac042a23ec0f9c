"""`python -m tests.support.rerun PYTEST-ARGUMENTS`: runs pytest; tests that fail by chance, at most
three, run once more alone. CONTRIBUTING.md has the rules."""
