"""`worker-daemon config show`: each setting with its value and where it comes from, as TOML that a
configuration file may hold. Reads no file but that of --config, and makes none."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from worker_daemon.settings import (
    DEFAULT_KV_FILE_BYTES,
    DEFAULT_UPLOAD_MEMORY_BYTES,
    KEYS,
    SettingSources,
)
from worker_host.plain_text import printable

_DEFAULTS: Final[Mapping[str, str | int | bool]] = {
    "share-gpu": False,
    "allow-download": False,
    "upload-memory-bytes": DEFAULT_UPLOAD_MEMORY_BYTES,
    "kv-file-bytes": DEFAULT_KV_FILE_BYTES,
    "reset-epoch": False,
    "log-level": "info",
    "log-format": "text",
}
"""Defaults that are plain values."""
_DEFAULTS_IN_WORDS: Final[Mapping[str, str]] = {
    "endpoint": "required",
    "device": "required",
    "state-dir": "the endpoint's directory, and the user's cache directory",
    "lora-root": "none: no adapters are served",
    "save-root": "none: saving is refused",
    "profile-dir": "profiles in the state directory or the user's cache directory",
    "key-file": "none: only the endpoint's directory protects the sockets",
    "authorized-keys": "none",
    "data-interface": "lo",
    "gpu-lock-dir": "/run/lock or /tmp",
    "max-kv-host-memory-bytes": "what the host has free",
    "kv-host-dir": "none: the host tier ends with the daemon",
    "kv-file-dir": "none: no KV blocks are kept in files",
    "metrics-listen": "none",
    "metrics-token-file": "none",
    "exit-with-parent-fd": "none",
}


def show_settings(sources: SettingSources) -> str:
    """Return one line per setting, in the order of `serve --help`."""
    return "".join(f"{printable(_line(key, sources))}\n" for key in KEYS)


def _line(key: str, sources: SettingSources) -> str:
    for origin, given in sources.by_origin:
        if (value := given.get(key)) not in (None, [], ""):
            return f"{key} = {_toml(value)}  # {origin}"
    if key in _DEFAULTS:
        return f"{key} = {_toml(_DEFAULTS[key])}  # default"
    if key == "model-root":
        return f"{key} = {_toml([str(Path.cwd())])}  # default: the working directory"
    return f"# {key}  # default: {_DEFAULTS_IN_WORDS[key]}"


def _toml(value: object) -> str:
    """Return a value in TOML, whose strings, numbers, switches and lists are JSON's."""
    return json.dumps(value, ensure_ascii=False)
