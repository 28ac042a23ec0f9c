"""Run by test_unpickling: a Worker from start-up to tokens under an audit hook that counts
unpickling. argv: a directory of models, the model's name. Prints the events that it saw."""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from rpc_schema import codec, config, kv_cache, lifecycle, step
from worker_client.requests import SamplingParams
from worker_daemon.worker.worker import Worker

SEEN: Counter[str] = Counter()
WATCHED = {"pickle.find_class", "marshal.load", "marshal.loads", "exec", "compile", "os.system"}


def main(root, model):
    torch.set_num_threads(1)
    worker = Worker("cpu", [Path(root)], lambda phase, seconds, done=0.0: None)
    ids = {"epoch": 1, "link": 1, "seq": 1}
    cache, scheduler = config.CacheConfig(), config.SchedulerConfig(max_num_seqs=4)
    rendezvous = config.Rendezvous(link=1, place=None, rank=0, local_world_size=1)
    worker.init_device(
        lifecycle.InitDevice(
            **ids,
            parallel=config.ParallelConfig(),
            rendezvous=rendezvous,
            cache=cache,
            scheduler=scheduler,
        )
    )
    worker.load_model(
        lifecycle.LoadModel(
            **ids,
            model=config.ModelConfig(model=model),
            scheduler=scheduler,
            cache=cache,
            graph=config.GraphConfig(),
        )
    )
    layers = worker.get_kv_cache_spec(lifecycle.GetKVCacheSpec(**ids)).layers
    plan = kv_cache.KVCacheConfig(
        num_blocks=9,
        block_size=16,
        groups=(
            kv_cache.KVCacheGroup(
                layer_names=tuple(layer.layer_name for layer in layers),
                block_size=16,
                sliding_window=None,
                dtype=layers[0].dtype,
            ),
        ),
        size_bytes=9 * 16 * sum(layer.bytes_per_token for layer in layers),
    )
    worker.initialize_from_config(lifecycle.InitializeFromConfig(**ids, kv_cache_configs=(plan,)))
    worker.compile_or_warm_up_model(lifecycle.CompileOrWarmUpModel(**ids))
    sys.addaudithook(lambda event, args: SEEN.update([event] if event in WATCHED else []))
    serve(worker)
    print(dict(SEEN))


def serve(worker):
    """Admission and decodes, each as it comes off the wire."""
    prompt = np.arange(5, dtype="<i4")
    params = SamplingParams(temperature=1.0, top_k=5, top_p=0.9, seed=3, logprobs=2)
    request = step.NewRequestData(
        slot=2,
        req_id="a",
        num_tokens=5,
        num_prompt_tokens=5,
        num_computed_tokens=0,
        extensions=params.extensions(),
    )
    first = step.ExecuteModel(
        epoch=1,
        link=1,
        seq=2,
        total_num_scheduled_tokens=5,
        scheduled=b"\4",
        num_scheduled_tokens=np.array([2, 5], "<i4").tobytes(),
        new_block_slots=np.array([2], "<u2").tobytes(),
        new_block_ids=np.array([3], "<i4").tobytes(),
        scheduled_new_reqs=(request,),
    )
    run(worker, first, [prompt.tobytes()])
    for seq in range(3, 10):
        decode = step.ExecuteModel(
            epoch=1, link=1, seq=seq, total_num_scheduled_tokens=1, scheduled=b"\4"
        )
        run(worker, decode, [])


def run(worker, message, arrays):
    received = codec.encode_step(message, arrays)
    reply, frames = worker.execute_model(codec.decode_step(received), received[1:]).result()
    answer = codec.decode_step_reply(codec.encode_step(reply, frames))
    assert len(answer.sampled_token_ids) == 4


if __name__ == "__main__":
    main(*sys.argv[1:])
