"""Replicas on real daemons, one of which is killed at random while both serve: its requests, with
random subsets of all features, go on in the other one as one request each, and get the same tokens
as transformers'. MIXED_SEED=n runs that seed. On fake daemons: tests/unit/client."""

import asyncio
import contextlib
import os
import random
import threading
from functools import partial

import pytest
from msgspec.structs import replace

from tests.support.installed_processors import NAMES
from tests.support.mixed_features import ROOM, Judge, make_adapters, random_mix
from tests.support.serving import worker_config
from tests.support.structured import EOS_TOKEN_ID, VOCAB_SIZE, make_tokenizer
from tests.support.waiting import PATIENCE_S
from worker_client.driver import Driver
from worker_client.driver_parts.registry import DriverOptions
from worker_client.inputs.request_parser import RequestParser
from worker_client.replicas.driver import DataParallelDriver
from worker_client.replicas.group import DataParallelGroup
from worker_client.requests import forked, with_adapter
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.structured.grammars import Grammars
from worker_client.structured.opening import open_grammars

pytestmark = pytest.mark.slow

MODEL = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS_TOKEN_ID, "seed": 45}
SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 24, "max_model_len": 64}
NUM_BLOCKS = 40
TASKS = ("embed",)
COUNT = 24
SEED = int(os.environ.get("MIXED_SEED", random.randrange(1 << 30)))


@pytest.fixture(scope="module")
def model(checkpoint):
    made = checkpoint("Qwen3ForCausalLM", **MODEL)
    make_tokenizer(made.path)
    return made


@pytest.fixture(scope="module")
def judge(model):
    grammars = Grammars(model.path, VOCAB_SIZE, [EOS_TOKEN_ID])
    yield Judge(model, make_adapters(model, SEED), grammars)
    grammars.close()


@pytest.fixture
def opened(daemons, model):
    """Two replicas that are loaded anew: (group, loaded, config)."""
    config = worker_config(model.path, lora=ROOM, logits_processors=NAMES, **SIZES)
    config = replace(config, parallel=replace(config.parallel, data_parallel_size=2))
    with DataParallelGroup(daemons.endpoints(2), config.parallel) as group:
        group.attach(force=True)
        yield group, group.prepare(config, num_gpu_blocks=NUM_BLOCKS, reload=True), config


class Heard:
    """What readers have got of requests, and whether it came once."""

    def __init__(self):
        self.tokens, self.logprobs, self.outputs = {}, {}, {}

    async def read(self, driver, request):
        async for each in driver.generate(request):
            assert each.req_id not in self.outputs
            self.tokens.setdefault(each.req_id, []).extend(each.token_ids)
            if each.reports is not None and each.reports.logprobs is not None:
                self.logprobs.setdefault(each.req_id, []).extend(each.reports.logprobs)
            if each.output is not None:
                self.outputs[each.req_id] = each.output

    def check(self, judge, requests):
        samples = {sample.id: sample for request in requests for sample in forked(request)}
        assert self.outputs.keys() == samples.keys()
        for name, output in self.outputs.items():
            judge.check(samples[name], output)
            assert self.tokens[name] == output.token_ids
            if output.logprobs is not None:
                assert self.logprobs.get(name, []) == output.logprobs


@pytest.mark.parametrize("comes_back", [False, True])
def test_requests_of_a_killed_replica_go_on_in_the_other(
    opened, daemons, model, judge, tmp_path, comes_back
):
    print(f"MIXED_SEED={SEED}")
    group, loaded, config = opened
    rng, hidden_size = random.Random(SEED + comes_back), model.model.config.hidden_size
    mix = random_mix(rng, TASKS, COUNT, tmp_path, hidden_size)
    parser = RequestParser(None, seed=1, directory=mix.directory)
    requests = [parser.from_fields(line, index) for index, line in enumerate(mix.lines)]
    adapters = {name: group.loras.add(name).extension for name in named_adapters(requests)}
    requests = [
        each if each.lora is None else with_adapter(each, adapters[each.lora]) for each in requests
    ]
    lost, have_ended = rng.randrange(2), threading.Event()
    least, heard = rng.randrange(0, 250), Heard()

    def recover(replica, died):
        assert died.rank == lost
        assert have_ended.wait(PATIENCE_S), "they wait for nothing"
        if not comes_back:
            raise died
        daemons.restart_dead()
        replica.replace(died.rank)

    @contextlib.contextmanager
    def open_driver(replica, own):
        metadata = own.metadata
        grammars = open_grammars(model.path, metadata.vocab_size, metadata.eos_token_ids)
        with contextlib.closing(grammars):
            yield Driver(
                replica,
                Scheduler(scheduler_limits(own, config)),
                recover=partial(recover, replica),
                options=DriverOptions(grammars),
            )

    async def main():
        opening = [partial(open_driver, *p) for p in zip(group.replicas, loaded, strict=True)]
        async with DataParallelDriver(opening) as driver:
            tasks = [asyncio.create_task(heard.read(driver, each)) for each in requests]
            while sum(map(len, heard.tokens.values())) < least and not all(t.done() for t in tasks):
                await asyncio.sleep(0.002)
            daemons.kill(lost)
            await asyncio.gather(*tasks)
            have_ended.set()
            if comes_back:
                again, later = Heard(), requests[:6]
                await asyncio.gather(*(again.read(driver, each) for each in later))
                again.check(judge, later)
        heard.check(judge, requests)

    asyncio.run(main())


def named_adapters(requests):
    """The adapters that requests name."""
    return {each.lora for each in requests if each.lora is not None}
