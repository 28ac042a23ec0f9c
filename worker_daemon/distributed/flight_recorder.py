"""What NCCL's communicators last did, as torch's flight recorder kept it. Not every torch has
one."""

from torch._C import _distributed_c10d


def dump() -> bytes:
    """Return the record as JSON; empty where this torch keeps none. May be called from any thread,
    also while another waits inside a communicator."""
    dump_json = getattr(_distributed_c10d, "_dump_nccl_trace_json", None)
    if dump_json is None:
        return b""
    record: bytes | str = dump_json(includeCollectives=True, onlyActive=False)
    return record if isinstance(record, bytes) else record.encode()
