"""Two groups of daemons: one computes prompts, and the other decodes."""

import contextlib
import random
import time
from dataclasses import dataclass, field

from tests.support.checkpoints import prompts
from tests.support.serving import connect, greedy_request, scheduler_limits, worker_config
from tests.support.tiered_waves import num_loaded
from worker_client.driver import Driver
from worker_client.driver_parts.registry import DriverOptions
from worker_client.replicas.prefill_group import PrefillThread
from worker_client.scheduler import Scheduler

CONFIG = {
    "kv_host_memory_bytes": 1 << 20,
    "max_model_len": 96,
    "max_num_batched_tokens": 32,
    "num_gpu_blocks": 96,
}


SMALL_CHUNKS = {"max_num_batched_tokens": 8, "max_num_seqs": 8}
"""Changes of CONFIG, for prompts of many chunks."""


@dataclass
class Prompts:
    """Requests of fresh random prompts, of which some begin alike."""

    seed: int
    count: int = 8
    lengths: tuple[int, int] = (3, 60)
    requests: list[object] = field(default_factory=list)

    def __post_init__(self):
        rng = random.Random(self.seed)
        stem = prompts(rng.randrange(1 << 20), [21])[0].tolist()
        for index in range(self.count):
            own = prompts(rng.randrange(1 << 20), [rng.randint(*self.lengths)])[0].tolist()
            tokens = stem + own[:20] if index % 4 == 3 else own
            self.requests.append(greedy_request(f"r{index}", tokens, rng.randint(3, 12)))

    @property
    def flat(self):
        return self.requests


def split_config(config):
    """Fields of worker_config, and those of connect."""
    loading = {name: config[name] for name in ("num_gpu_blocks",) if name in config}
    return {name: each for name, each in config.items() if name not in loading}, loading


@contextlib.contextmanager
def opened(endpoints, model, shape, make_recover=None, changes=None, **options):
    """A group and its driver. changes: of CONFIG."""
    config, loading = split_config({**CONFIG, **(changes or {})})
    with connect(endpoints, worker_config(model.path, *shape, **config), **loading) as served:
        group, loaded = served
        if make_recover is not None:
            options["recover"] = make_recover(group)
        yield Driver(group, Scheduler(scheduler_limits(group, loaded)), **options)


@contextlib.contextmanager
def prefill_pair(
    endpoints,
    model,
    source,
    destination,
    *,
    recover=(None, None),
    timeout_s=20.0,
    reopen_s=None,
    decode_model=None,
    changes=(None, None),
    sources=None,
):
    """The driver of the group that decodes, and the thread of the other one. source, destination:
    (pp, tp) of the groups. recover: functions that return what a driver calls after a death.
    reopen_s: see PrefillThread. changes: of each group's CONFIG. sources: a list, for the drivers
    that the other group has had."""
    num_sources = source[0] * source[1]
    others, own = endpoints[:num_sources], endpoints[num_sources:]

    @contextlib.contextmanager
    def open_driver():
        with opened(others, model, source, recover[0], changes[0]) as driver:
            if sources is not None:
                sources.append(driver)
            yield driver

    with PrefillThread(open_driver, timeout_s=timeout_s, reopen_s=reopen_s) as prefill:
        options = DriverOptions(prefill=prefill)
        of = decode_model or model
        with opened(own, of, destination, recover[1], changes[1], options=options) as driver:
            yield driver, prefill


def run(driver, requests):
    """The outputs of requests, by id."""
    for request in requests:
        driver.add_request(request)
    return {output.req_id: output for output in driver.run()}


def run_until_early(driver, prefill, sent):
    """Keep some requests waiting, until blocks of one have come while its prompt is computed. The
    outputs, and the requests that wait then; drops the other ones."""
    num_before, outputs, waiting = prefill.counts.num_early_blocks, {}, []
    while prefill.counts.num_early_blocks == num_before:
        while len(waiting) < 4:
            waiting.append(sent.requests[len(waiting) + len(outputs)])
            driver.add_request(waiting[-1])
        outputs |= {output.req_id: output for output in driver.step()}
        waiting = [request for request in waiting if request.id not in outputs]
    del sent.requests[len(waiting) + len(outputs) :]
    return outputs, waiting


def no_slots(drivers):
    return not any(driver.scheduler.exchange.num_slots for driver in drivers)


def replaced(pair):
    """What makes the function that a driver calls after the death of its daemon."""

    def of_group(group):
        def recover(died):
            pair.restart_dead()
            group.replace(died.rank)

        return recover

    return of_group


def assert_blocks_come(driver, seed):
    """Send prompts until one has loaded blocks of the other group, within some seconds."""
    until, count = time.monotonic() + 20, 0
    while time.monotonic() < until:
        driver.scheduler.forget_prefixes()
        driver.scheduler.forget_host_tier()
        prompt = prompts(seed, [40])[0].tolist()
        outputs = run(driver, [greedy_request(f"{seed}-{count}", prompt, 3)])
        if num_loaded(outputs):
            return
        count += 1
        time.sleep(0.02)
    raise AssertionError(seed)
