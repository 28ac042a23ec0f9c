"""Blocks that a step moves to files and from there: checks what the step says of them. The
connector moves them (connectors/files.py).

Shapes: S blocks to store, L blocks to load.
"""

from collections.abc import Sequence

import numpy as np

from rpc_schema.codec import Frame
from rpc_schema.kv_files import FileMoves
from worker_daemon.contracts.arrays import Int32s
from worker_daemon.runner.connectors.files import FiledMoves
from worker_daemon.runner.parts.interface import PartContext, StepPart
from worker_daemon.runner.parts.moved_blocks import check_unique, read_blocks, read_hashes
from worker_daemon.runner.scheduled_step import StepLimits, invalid


class KVFilesPart(StepPart):
    """Has no rows and changes no logits: a step that moves blocks is otherwise as any."""

    step_extension = FileMoves
    in_sampling = False
    may_come_later = False
    loads_blocks = True

    @classmethod
    def serves(cls, context: PartContext) -> bool:
        return context.limits.has_kv_files

    def check_step(
        self, extension: FileMoves, frames: Sequence[Frame], limits: StepLimits
    ) -> FiledMoves:
        """Raises InvalidStepError: a block does not exist, a block or hash is named twice, or
        columns do not fit."""
        store_blocks = read_blocks("store_blocks", extension.store_blocks, limits)
        load_blocks = read_blocks("load_blocks", extension.load_blocks, limits)
        check_unique("store_blocks", store_blocks)
        check_unique("load_blocks", load_blocks)
        num_stores, num_loads = store_blocks.size, load_blocks.size
        width = extension.hash_bytes
        load_hashes = read_hashes("load_hashes", extension.load_hashes, num_loads, width)
        names, counts = np.unique(load_hashes, axis=0, return_counts=True)
        if len(names) < num_loads:
            name = names[int(counts.argmax())].tobytes().hex()
            raise invalid("extensions.load_hashes", name, "name it once in a step")
        return FiledMoves(
            extension.block_tag,
            store_blocks,
            read_hashes("store_hashes", extension.store_hashes, num_stores, width),
            load_blocks,
            load_hashes,
        )

    def loaded_blocks(self, step_values: FiledMoves) -> Int32s:
        return step_values.load_blocks
