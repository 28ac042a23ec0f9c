#!/usr/bin/env bash
# Make the environment of `make test-vllm`: tests/vllm/make_environment.sh PYTHON DIRECTORY.
# vLLM has no wheel without a device, so it is built from its source distribution, which then has nothing to compile.
set -eu
cd "$(dirname "$0")/../.."
VERSION=0.33.0
export VLLM_VERSION_OVERRIDE=$VERSION VLLM_TARGET_DEVICE=empty
source=build/vllm/vllm-$VERSION.tar.gz
pip=("$2/bin/python" -m pip install -q -c tests/vllm/constraints.txt)

"$1" -m venv --clear "$2"
# What vLLM is built with: torch first, as its build asks torch for its version.
"${pip[@]}" torch
"${pip[@]}" setuptools setuptools-scm setuptools-rust cmake ninja packaging jinja2 wheel
mkdir -p build/vllm
[ -f "$source" ] || "$2/bin/python" -m pip download -q --no-deps --no-binary :all: --no-build-isolation \
    -d build/vllm "vllm==$VERSION"
# What a server needs of vLLM's requirements: not those for videos and for compiled models.
tar -xOf "$source" "vllm-$VERSION/requirements/common.txt" |
    grep -vE '^(opencv-python-headless|depyf|mistral_common)' >build/vllm/requirements.txt
"${pip[@]}" -r build/vllm/requirements.txt mistral_common
"${pip[@]}" hypothesis pytest pytest-asyncio pytest-timeout rich tblib typer
"${pip[@]}" --no-deps --no-build-isolation "$source"
"${pip[@]}" --no-deps --no-build-isolation -e .
