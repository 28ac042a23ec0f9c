"""Serves prompts at once in an asyncio program of one's own, on daemons that run already:

    python -m examples.embedded_driver ENDPOINTS MODEL PROMPT...

`worker-client serve` is the whole server (docs/service.md); this is its core.
"""

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from rpc_schema.config import ModelConfig, ParallelConfig, WorkerConfig
from worker_client.async_driver import AsyncDriver
from worker_client.driver import Driver
from worker_client.inputs.text_stream import StreamedText
from worker_client.inputs.tokenizer import Tokenizer, load_tokenizer
from worker_client.requests import GenerationRequest
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.worker_group import WorkerGroup


async def serve(endpoints: list[str], model: Path, prompts: list[str]) -> list[str]:
    """Print the texts as they come; return them."""
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None, "the model has a tokenizer.json"
    config = WorkerConfig(parallel=ParallelConfig(), model=ModelConfig(model=str(model.resolve())))

    @contextlib.contextmanager
    def open_driver() -> Iterator[Driver]:  # on the driver's thread
        with WorkerGroup(endpoints, config.parallel) as group:
            group.attach()
            scheduler = Scheduler(scheduler_limits(group.prepare(config), config), tokenizer)
            yield Driver(group, scheduler, recover=lambda died: group.replace(died.rank))

    async with AsyncDriver(open_driver) as driver:
        return await asyncio.gather(*(continued(driver, tokenizer, each) for each in prompts))


async def continued(driver: AsyncDriver, tokenizer: Tokenizer, prompt: str) -> str:
    """Return the text that continues a prompt."""
    ids, text, whole = (
        await asyncio.to_thread(tokenizer.encode, prompt),
        StreamedText(tokenizer),
        "",
    )
    async for progress in driver.generate(GenerationRequest(prompt, ids, max_tokens=20)):
        new = text.take(progress.token_ids, progress.output)
        whole += new
        sys.stdout.write(f"{prompt}: ...{new}\n")
    return whole


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1].split(","), Path(sys.argv[2]), sys.argv[3:]))
