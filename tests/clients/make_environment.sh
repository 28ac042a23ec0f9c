#!/usr/bin/env bash
# Make the environment of `make test-clients`: tests/clients/make_environment.sh PYTHON DIRECTORY. It has clients alone: the server
# runs in .venv. litellm imports mcp where there are tools.
set -eu
cd "$(dirname "$0")/../.."
"$1" -m venv --clear "$2"
"$2/bin/python" -m pip install -q -c tests/clients/constraints.txt \
    openai langchain-openai litellm mcp instructor 'pydantic-ai-slim[openai]' 'lm-eval[api]' transformers \
    hypothesis psutil pytest pytest-timeout
