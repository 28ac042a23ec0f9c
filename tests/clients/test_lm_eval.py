"""lm-eval's local-completions on a local task: its log likelihoods are those of transformers."""

import json

import lm_eval
import pytest
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

from tests.clients import documents as d
from tests.clients.conftest import KEY

TASK = {
    "task": "continuations",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "loglikelihood",
    "doc_to_text": "{{context}}",
    "doc_to_target": "{{continuation}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "perplexity", "aggregation": "perplexity"}],
}


@pytest.mark.parametrize("batch_size", [1, 3])
def test_log_likelihoods_of_a_task(server, tmp_path, monkeypatch, batch_size):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    cases = json.loads((server.directory / "likelihoods.json").read_text())
    lines = [json.dumps({"context": own[0], "continuation": own[1]}) for own in cases]
    source = tmp_path / "cases.jsonl"
    source.write_text("\n".join(lines))
    model = LocalCompletionsAPI(
        base_url=f"{server.url}/completions",
        model=d.MODEL,
        tokenizer=str(server.directory / d.MODEL),
        tokenizer_backend="huggingface",
        batch_size=batch_size,
    )
    task = {**TASK, "dataset_kwargs": {"data_files": {"test": str(source)}}}
    results = lm_eval.simple_evaluate(
        model=model, tasks=[task], task_manager=TaskManager(), bootstrap_iters=0
    )
    samples = sorted(results["samples"]["continuations"], key=lambda sample: sample["doc_id"])
    found = [sample["filtered_resps"][0][0] for sample in samples]
    assert found == pytest.approx([own[2] for own in cases], abs=1e-4)
