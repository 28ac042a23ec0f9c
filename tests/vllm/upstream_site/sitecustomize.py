"""Settings for servers and engines that vLLM's own tests start, which know nothing of daemons: on
the path of their processes only. Each loads its own model, with a small KV cache."""

import os

import msgspec

if "WORKER_DAEMON_ENDPOINTS" in os.environ:
    from worker_client.vllm import configuration, settings

    read_settings, worker_config = settings.read_settings, configuration.worker_config
    CACHE_BYTES = 64 << 20

    def reading(additional_config):
        read = read_settings(additional_config)
        return msgspec.structs.replace(read, reload=True, force=True)

    def with_small_cache(*args):
        config = worker_config(*args)
        if config.cache.kv_cache_memory_bytes is not None:
            return config
        cache = msgspec.structs.replace(config.cache, kv_cache_memory_bytes=CACHE_BYTES)
        return msgspec.structs.replace(config, cache=cache)

    settings.read_settings = reading
    configuration.worker_config = with_small_cache
