"""Settings of the process: command line over environment over file. The only reader of
os.environ."""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Final, TypeAlias

from model_hub.cache import hub_cache
from rpc_schema.errors import ConfigError
from worker_daemon.contracts.hub import HubSettings
from worker_daemon.directories import claim_directory, state_home
from worker_daemon.errors import config_error
from worker_daemon.logs import LEVELS
from worker_daemon.regular_file import read_whole
from worker_host.log_lines import LOG_FORMATS

ENV_PREFIX: Final = "WORKER_DAEMON_"
_CONFIG_VARIABLE: Final = f"{ENV_PREFIX}CONFIG"
_OTHER_VARIABLES: Final = (_CONFIG_VARIABLE, f"{ENV_PREFIX}ENDPOINTS")
"""The configuration file's, and that of vLLM as a driver, which its daemons may inherit."""
_SERVICE_LINK: Final = re.compile(
    r"WORKER_DAEMON_(\w+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
"""Variables that Kubernetes sets in all containers for a service whose name begins like this."""
KEYS: Final = (
    "endpoint",
    "device",
    "state-dir",
    "model-root",
    "lora-root",
    "save-root",
    "profile-dir",
    "key-file",
    "authorized-keys",
    "data-interface",
    "gpu-lock-dir",
    "share-gpu",
    "allow-download",
    "upload-memory-bytes",
    "max-kv-host-memory-bytes",
    "kv-host-dir",
    "kv-file-dir",
    "kv-file-bytes",
    "metrics-listen",
    "metrics-token-file",
    "reset-epoch",
    "exit-with-parent-fd",
    "log-level",
    "log-format",
)
_LISTS: Final = ("model-root", "lora-root")
"""Options that may be given several times."""
_DEVICE: Final = re.compile(r"cpu|cuda:\d{1,3}")

Given: TypeAlias = Mapping[str, str | int | bool | list[str] | None]
"""The values of one source by key; a missing one is absent or None."""

ONE_HOST: Final = "lo"
"""The default interface of the tensor plane, which has no authentication."""
_TENSOR_PLANE: Final = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
CREDENTIAL_PREFIX: Final = "credential:"
_CREDENTIALS: Final = "CREDENTIALS_DIRECTORY"
_INTERFACE: Final = re.compile(r"[A-Za-z0-9_.-]{0,15}")
_FIXED: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}
"""torch must not end the process: the guard thread aborts communicators. Its warning about serial
messages of a pair does not apply: they are meant to be serial. And it must not load device backends
of installed packages on import."""
_FLIGHT_RECORDER: Final = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}
"""Number of operations that torch records per communicator, under its newer and older name."""
_FLIGHT_DUMPS: Final = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_SWITCHES: Final = {"true": True, "false": False, "1": True, "0": False}
_PASSIVE_WAITING: Final = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
"""For GNU's and LLVM's OpenMP: idle threads sleep. By default they spin for milliseconds, on cores
that the driver and the step need."""
_NUM_THREADS: Final = "OMP_NUM_THREADS"
_KERNEL_CACHE: Final = "TRITON_CACHE_DIR"
_LIBRARY_CACHES: Final = {
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash_attention",
    "CUTE_DSL_CACHE_DIR": "cute_dsl",
}
"""Directories of the code that optional libraries compile, in ours: their own choice is a directory
below /tmp that others may have made."""
_KEEPS_COMPILED: Final = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
_MAX_FILE_BYTES: Final = 1 << 20
DEFAULT_UPLOAD_MEMORY_BYTES: Final = 2 << 30
DEFAULT_KV_FILE_BYTES: Final = 16 << 30


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """The settings of `worker-daemon serve`."""

    endpoint: str
    """ipc://DIR/NAME; parsed by the server."""
    device: str
    """cpu or cuda:N."""
    state_dir: Path | None
    """Directory for epochs and compiled kernels; None: the endpoint's directory for epochs, the
    user's cache directory for kernels."""
    model_roots: tuple[Path, ...]
    """Directories that models must be under."""
    lora_roots: tuple[Path, ...]
    """Directories that LoRA adapters must be under; empty: adapters are refused."""
    save_root: Path | None
    """Directory for saved weights, by name; None: saving is refused."""
    profile_dir: Path | None
    """Directory for traces, if set; see profile_directory."""
    key_file: Path | None
    """The daemon's secret file; None (ipc only): any process that can open the sockets has all
    rights."""
    key_is_credential: bool
    """True if it is in systemd's directory of credentials."""
    authorized_keys: Path | None
    """The authorized keys; None without a key_file."""
    data_interface: str
    """The network interface of the tensor plane, which has no authentication. Empty: the loopback
    interface, unless the environment sets another for gloo and NCCL."""
    exit_with_parent_fd: int | None
    """The daemon ends when this file descriptor reads end-of-file."""
    gpu_lock_dir: Path | None
    """Directory of the locks of this host's GPUs; None: the default."""
    share_gpu: bool
    """True if another daemon may have the same GPU."""
    allow_download: bool
    """True if models that drivers name may be downloaded into the user's hub cache."""
    upload_memory_bytes: int
    """Limit on host memory for a driver's uploads."""
    max_kv_host_memory_bytes: int | None
    """Limit on host memory for the host tier; None: what the host has free."""
    kv_host_dir: Path | None
    """Directory in which the host tier outlives this daemon; None: it ends with it."""
    kv_file_dir: Path | None
    """Directory of this daemon's files of KV blocks; None: it keeps none."""
    kv_file_bytes: int
    """Bound on the size of these files."""
    metrics_listen: str
    """Place of metrics and health, unix:PATH or ADDRESS:PORT; empty: none. Parsed by the server."""
    metrics_token_file: Path | None
    """File with the token that readers of a port show."""
    metrics_token_is_credential: bool
    """True if it is in systemd's directory of credentials."""
    reset_epoch: bool
    """True: replace a stored epoch that cannot be used; see epochs.py."""
    log_level: str
    """One of debug, info, warning, error."""
    log_format: str
    """One of LOG_FORMATS."""
    notify_socket: str = ""
    """Address of the service manager's socket (sd_notify(3)); empty: none."""


@dataclass(frozen=True, slots=True)
class SettingSources:
    """The values of each source by its name, the one with precedence first."""

    by_origin: tuple[tuple[str, Given], ...]

    def merged(self) -> Given:
        """Return the values that count."""
        merged: dict[str, str | int | bool | list[str] | None] = {}
        for _, given in reversed(self.by_origin):
            merged |= given
        return merged


def read_sources(command_line: Given, config_file: Path | None) -> SettingSources:
    """Read the three sources.

    Raises:
        ConfigError: the file cannot be read, or a key or variable is unknown.
    """
    if config_file is None and (named := os.environ.get(_CONFIG_VARIABLE)):
        config_file = Path(named)
    told = {key: value for key, value in command_line.items() if value not in (None, [], False)}
    sources: list[tuple[str, Given]] = [
        ("argument", told),
        ("environment", read_environment(os.environ)),
    ]
    if config_file is not None:
        sources.append((f"file {config_file}", read_file(config_file)))
    return SettingSources(tuple(sources))


def load_settings(command_line: Given, config_file: Path | None) -> ProcessSettings:
    """Merge the three sources, the command line first.

    Raises:
        ConfigError: a value is missing, malformed or unknown.
    """
    settings = build_settings(read_sources(command_line, config_file).merged())
    return replace(settings, notify_socket=os.environ.get("NOTIFY_SOCKET", ""))


def early_log_format(told: str | None) -> str:
    """Return the format of what is logged before the settings are known: by the command line or
    the environment, if they name a valid one."""
    chosen = told or os.environ.get(f"{ENV_PREFIX}LOG_FORMAT", "")
    return chosen if chosen in LOG_FORMATS else LOG_FORMATS[0]


def journal_stream() -> str:
    """Return systemd's name of the file that is its journal; empty without systemd."""
    return os.environ.get("JOURNAL_STREAM", "")


def own_environment() -> Mapping[str, str]:
    """Return the environment, for a child that has the same."""
    return os.environ


def prepare_environment(data_interface: str | None = None) -> None:
    """Set the environment that torch, gloo and NCCL read on import; called before torch is
    imported. data_interface: None keeps the environment's or, without one, sets loopback."""
    for name, form in _TENSOR_PLANE.items():
        if data_interface is not None:
            os.environ[name] = form.format(data_interface)
        else:
            os.environ.setdefault(name, ONE_HOST)
    os.environ.update(_FIXED)


def prepare_flight_recorder(settings: ProcessSettings) -> None:
    """Make torch record the communicators' operations, and write its dumps to our directory. Called
    before torch is imported; does nothing for a daemon on the CPU."""
    if settings.device == "cpu":
        return
    for name, value in _FLIGHT_RECORDER.items():
        os.environ.setdefault(name, value)
    home = state_home(settings.state_dir, os.environ)
    for name in _FLIGHT_DUMPS:
        if home is not None:
            os.environ.setdefault(name, str(home / "nccl_trace_rank_"))


def prepare_kernel_cache(settings: ProcessSettings) -> None:
    """Set the directories of compiled kernels, Triton's and in it those of libraries, unless the
    environment does. Called before torch is imported; does nothing for a daemon on the CPU.

    Raises:
        ConfigError: the directory cannot be used, or other users can change its files.
        StartLaterError: there is no room for it now.
    """
    if settings.device == "cpu":
        return
    if chosen := os.environ.get(_KERNEL_CACHE):
        claim_directory(Path(chosen).absolute(), "compiled kernels", _KERNEL_CACHE)
    else:
        os.environ[_KERNEL_CACHE] = str(kernel_cache(settings.state_dir, os.environ))
    home = Path(os.environ[_KERNEL_CACHE]).absolute()
    for variable, name in _LIBRARY_CACHES.items():
        directory = os.environ.setdefault(variable, str(home / name))
        claim_directory(Path(directory).absolute(), "compiled kernels", variable)
    os.environ.setdefault(_KEEPS_COMPILED, "1")


def prepared_kernel_cache() -> Path | None:
    """Return the directory that prepare_kernel_cache set, or None before it did."""
    directory = os.environ.get(_KERNEL_CACHE)
    return Path(directory) if directory else None


def kernel_cache(state_dir: Path | None, environment: Mapping[str, str]) -> Path:
    """Make and check the directory of compiled kernels: in the daemon's state directory or, without
    one, in the user's cache directory (XDG Base Directory Specification 0.8), where all daemons
    share it. Its files are loaded and run, so no other user may write there.

    Raises:
        ConfigError: it cannot be made, or others may write there.
    """
    home = state_home(state_dir, environment)
    if home is None:
        problem = "this user has no home directory for compiled kernels"
        raise ConfigError(problem, field="state-dir", fix="give --state-dir, or set XDG_CACHE_HOME")
    for directory in (home, home / "kernels"):
        claim_directory(directory, "compiled kernels", "state-dir")
    return home / "kernels"


def prepare_waiting(settings: ProcessSettings) -> None:
    """Make torch's idle threads sleep, unless the environment sets otherwise. Called before torch
    is imported; does nothing for a daemon on a GPU."""
    if settings.device == "cpu":
        for name, value in _PASSIVE_WAITING.items():
            os.environ.setdefault(name, value)


def user_threads() -> int | None:
    """Return the first number in OMP_NUM_THREADS; None if it is unset or no positive integer."""
    first = os.environ.get(_NUM_THREADS, "").partition(",")[0].strip()
    return int(first) if first.isascii() and first.isdecimal() and int(first) else None


def hub_settings(settings: ProcessSettings) -> HubSettings:
    """Return where models by name are found: huggingface_hub's environment decides."""
    return HubSettings(hub_cache(os.environ), settings.allow_download, os.environ)


def visible_devices() -> str | None:
    """Return CUDA_VISIBLE_DEVICES if set; the N of cuda:N is an index into it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def profile_directory(settings: ProcessSettings) -> Path | None:
    """Return the directory for traces: profiles/ in the state directory or, without one, in the
    user's cache directory, unless another is set. None if this user has no home. Creates
    nothing."""
    if settings.profile_dir is not None:
        return settings.profile_dir
    home = state_home(settings.state_dir, os.environ)
    return None if home is None else home / "profiles"


def endpoint_home(settings: ProcessSettings) -> Path:
    """Return the directory of a tcp endpoint's lock and epoch: the state directory or, without one,
    the user's cache directory.

    Raises:
        ConfigError: this user has no home.
    """
    home = state_home(settings.state_dir, os.environ)
    if home is None:
        raise ConfigError("it is required", field="state-dir", fix="give --state-dir DIR")
    return home


def read_file(path: Path) -> Given:
    """Read a TOML file with the keys of the command line's options.

    Raises:
        ConfigError: it cannot be read, is not valid TOML, or has a key that no option has.
    """
    try:
        given = tomllib.loads(read_whole(path, _MAX_FILE_BYTES).decode())
    except (OSError, ValueError, RecursionError) as error:  # of TOML and of UTF-8 too
        fix = "name a TOML file with the options of this command"
        raise config_error("config", str(path), f"the file cannot be read: {error}", fix) from error
    for key in given:
        if key not in KEYS:
            problem = f"{path} has an unknown key"
            near = get_close_matches(key.replace("_", "-"), KEYS, 1)
            fix = f"did you mean {near[0]}?" if near else f"use one of {', '.join(KEYS)}"
            raise ConfigError(problem, field=key, fix=fix)
    return given


def read_environment(environment: Mapping[str, str]) -> Given:
    """Read the options from environment variables; WORKER_DAEMON_MODEL_ROOT and
    WORKER_DAEMON_LORA_ROOT separate paths by colons. An empty variable counts as unset.

    Raises:
        ConfigError: a variable with our prefix is not an option's.
    """
    given: dict[str, str | int | bool | list[str] | None] = {}
    keys = {ENV_PREFIX + key.upper().replace("-", "_"): key for key in KEYS}
    for name, value in environment.items():
        if not name.startswith(ENV_PREFIX) or not value:
            continue
        key = keys.get(name)
        if key is not None:
            given[key] = value.split(os.pathsep) if key in _LISTS else value
        elif name not in _OTHER_VARIABLES and not _SERVICE_LINK.fullmatch(name):
            known = [each.removeprefix(ENV_PREFIX) for each in (*keys, *_OTHER_VARIABLES)]
            near = get_close_matches(name.removeprefix(ENV_PREFIX), known, 1) or known
            fix = "unset it, or use " + " or ".join(ENV_PREFIX + each for each in near)
            raise config_error(name, value, "no option has this environment variable", fix)
    return given


def build_settings(given: Given) -> ProcessSettings:
    """Check merged values and give them their types.

    Raises:
        ConfigError: a value is missing or malformed.
    """
    endpoint = _required(given, "endpoint", "ipc:///DIR/NAME")
    key_file, authorized_keys = _keys(given)
    if endpoint.startswith("tcp://"):
        _check_tcp(given, endpoint)
    return ProcessSettings(
        endpoint=endpoint,
        device=_device(given),
        state_dir=_path(given, "state-dir"),
        model_roots=_roots(given, "model-root", "models", (Path.cwd(),)),
        lora_roots=_roots(given, "lora-root", "LoRA adapters", ()),
        save_root=_own_directory(given, "save-root", "saved weights"),
        profile_dir=_own_directory(given, "profile-dir", "traces"),
        key_file=key_file,
        key_is_credential=_is_credential(given, "key-file"),
        authorized_keys=authorized_keys,
        data_interface=_interface(given),
        exit_with_parent_fd=_file_descriptor(given),
        gpu_lock_dir=_path(given, "gpu-lock-dir"),
        share_gpu=_switch(given, "share-gpu"),
        allow_download=_switch(given, "allow-download"),
        upload_memory_bytes=_bytes(given, "upload-memory-bytes", DEFAULT_UPLOAD_MEMORY_BYTES),
        max_kv_host_memory_bytes=_most_bytes(given, "max-kv-host-memory-bytes"),
        kv_host_dir=_path(given, "kv-host-dir"),
        kv_file_dir=_own_directory(given, "kv-file-dir", "KV blocks"),
        kv_file_bytes=_bytes(given, "kv-file-bytes", DEFAULT_KV_FILE_BYTES),
        metrics_listen=_text(given, "metrics-listen", ""),
        metrics_token_file=_key_path(given, "metrics-token-file"),
        metrics_token_is_credential=_is_credential(given, "metrics-token-file"),
        reset_epoch=_switch(given, "reset-epoch"),
        log_level=_one_of(given, "log-level", "info", LEVELS),
        log_format=_one_of(given, "log-format", LOG_FORMATS[0], LOG_FORMATS),
    )


def _text(given: Given, key: str, default: str) -> str:
    value = given.get(key)
    if value is None:
        return default
    if not isinstance(value, str):
        raise config_error(key, value, "it is not a string", "put it in quotes")
    if not value:
        raise config_error(key, value, "it is empty", "give it a value, or leave it out")
    return value


def _required(given: Given, key: str, form: str) -> str:
    value = _text(given, key, "")
    if not value:
        raise config_error(key, None, "it is required", f"give --{key} {form}")
    return value


def _device(given: Given) -> str:
    device = _required(given, "device", "cpu or cuda:N")
    if not _DEVICE.fullmatch(device):
        raise config_error("device", device, "unknown device", "use cpu or cuda:N")
    return device


def _roots(given: Given, key: str, content: str, default: tuple[Path, ...]) -> tuple[Path, ...]:
    value = given.get(key)
    roots = [value] if isinstance(value, str) else value
    if roots is None:
        return default
    if not isinstance(roots, list) or not all(isinstance(root, str) for root in roots):
        raise config_error(key, value, "it is not a list of paths")
    for root in roots:
        if not root or not Path(root).is_dir():  # an empty path is the working directory
            fix = f"name a directory that holds {content}"
            raise config_error(key, root, "there is no such directory", fix)
    return tuple(Path(root).resolve() for root in roots)


def _check_tcp(given: Given, endpoint: str) -> None:
    """Raise ConfigError unless keys, model roots and interface are set: on a network there are no
    defaults for them."""
    fixes = {
        "key-file": "make a key by worker-daemon keygen, and give --key-file and --authorized-keys",
        "model-root": "give --model-root with each directory that drivers may load models from",
        "data-interface": "give --data-interface with the interface that the ranks' data takes; "
        "it is not encrypted",
    }
    for key, fix in fixes.items():
        if not given.get(key):
            raise config_error(key, None, f"{endpoint}: tcp needs a {key}", fix)


def _keys(given: Given) -> tuple[Path | None, Path | None]:
    """Return the two key files: both or neither."""
    key_file, authorized = (_key_path(given, key) for key in ("key-file", "authorized-keys"))
    if (key_file is None) != (authorized is None):
        missing = "authorized-keys" if authorized is None else "key-file"
        fix = "give both --key-file and --authorized-keys"
        raise config_error(missing, None, "both key files are needed", fix)
    return key_file, authorized


def _is_credential(given: Given, key: str) -> bool:
    return _text(given, key, "").startswith(CREDENTIAL_PREFIX)


def _key_path(given: Given, key: str) -> Path | None:
    text = _text(given, key, "")
    if not _is_credential(given, key):
        return _path(given, key)
    directory, name = os.environ.get(_CREDENTIALS), text.removeprefix(CREDENTIAL_PREFIX)
    if not directory or not name or name != Path(name).name:
        fix = f"use LoadCredential={name or 'NAME'}:FILE in the daemon's systemd unit"
        raise config_error(key, text, "there is no such credential", fix)
    return Path(directory) / name


def _interface(given: Given) -> str:
    name = _text(given, "data-interface", "")
    if not _INTERFACE.fullmatch(name):
        fix = (
            "name one of this host's interfaces, as in eth0; addresses and all interfaces at once "
            "are refused"
        )
        raise config_error("data-interface", name, "it is not the name of an interface", fix)
    return name


def _path(given: Given, key: str) -> Path | None:
    text = _text(given, key, "")
    return Path(text).absolute() if text else None


def _own_directory(given: Given, key: str, purpose: str) -> Path | None:
    directory = _path(given, key)
    return None if directory is None else claim_directory(directory, purpose, key)


def _switch(given: Given, key: str) -> bool:
    value = given.get(key, False)
    if isinstance(value, str) and value.lower() in _SWITCHES:
        return _SWITCHES[value.lower()]
    if value is None or isinstance(value, bool):
        return bool(value)
    raise config_error(key, value, "it must be on or off", f"use one of {', '.join(_SWITCHES)}")


def _integer(value: object) -> int:
    """Return a number, or the number that a text holds; -1 for anything else."""
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else -1


def _file_descriptor(given: Given) -> int | None:
    key = "exit-with-parent-fd"
    value = given.get(key)
    if value is not None and _integer(value) < 0:
        raise config_error(key, value, "it is not a file descriptor")
    return None if value is None else _integer(value)


def _bytes(given: Given, key: str, default: int) -> int:
    value = given.get(key)
    if value is None:
        return default
    number = _integer(value)
    if not 0 < number < 1 << 62:
        problem = "it is not a valid byte count"
        raise config_error(key, value, problem, f"use 1 or more; default: {default}")
    return number


def _most_bytes(given: Given, key: str) -> int | None:
    """Return a bound on bytes; None if it is not given."""
    return None if given.get(key) is None else _bytes(given, key, 1)


def _one_of(given: Given, key: str, default: str, known: Sequence[str]) -> str:
    value = _text(given, key, default)
    if value not in known:
        raise config_error(key, value, "unknown value", f"use one of {', '.join(known)}")
    return value
