"""The options of `serve` that are the server's, not its group's."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from worker_client.errors import config_error
from worker_client.inputs.model_source import AdapterSource
from worker_client.service.generation_defaults import SOURCES
from worker_client.service.key_files import read_keys_of
from worker_client.service.settings import (
    DRAIN_S,
    MAX_BODY_BYTES,
    MAX_PROMPTS,
    MAX_QUEUE,
    READ_S,
    WRITE_S,
    ServiceSettings,
)
from worker_host.log_lines import LOG_FORMATS

TOOL_FORMS: Final = ("hermes", "llama3_json", "mistral")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """Address of a server, its clients, and its bounds."""

    host: Annotated[
        str, typer.Option(envvar="WORKER_CLIENT_HOST", help="Address to listen at.")
    ] = "127.0.0.1"
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, envvar="WORKER_CLIENT_PORT", help="0: a free one."),
    ] = 8000
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of the model in requests; may be repeated. Default: its directory's or "
            "repository's."
        ),
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="WORKER_CLIENT_API_KEY",
            help="Key that clients must send. Other users of the host can read a command line: "
            "prefer the variable, or --api-key-file.",
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        typer.Option(envvar="WORKER_CLIENT_API_KEY_FILE", help="File of such keys, one a line."),
    ] = None
    admin_key: Annotated[
        str | None,
        typer.Option(envvar="WORKER_CLIENT_ADMIN_KEY", help="Key of administrators."),
    ] = None
    admin_key_file: Annotated[
        Path | None,
        typer.Option(envvar="WORKER_CLIENT_ADMIN_KEY_FILE", help="File of such keys."),
    ] = None
    tool_call_parser: Annotated[
        str,
        typer.Option(
            help=f"How the model writes calls of tools: {', '.join(TOOL_FORMS)}. Default: as its "
            "chat template shows."
        ),
    ] = ""
    generation_config: Annotated[
        str,
        typer.Option(
            help="Sampling defaults of requests: auto (those of the model's "
            "generation_config.json) or none."
        ),
    ] = SOURCES[0]
    max_queue: Annotated[
        int, typer.Option(min=0, help="Samples that may wait beyond --max-num-seqs.")
    ] = MAX_QUEUE
    max_prompts: Annotated[int, typer.Option(min=1, help="Prompts in one body.")] = MAX_PROMPTS
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Bytes of a body.")] = MAX_BODY_BYTES
    read_timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Time for a body to arrive.")
    ] = READ_S
    write_timeout: Annotated[
        float,
        typer.Option(min=0.1, metavar="SECONDS", help="Time for a client to read what is sent."),
    ] = WRITE_S
    request_timeout: Annotated[
        float | None,
        typer.Option(
            min=0.1, metavar="SECONDS", help="Time after which a request ends with an error."
        ),
    ] = None
    drain_s: Annotated[
        float,
        typer.Option(
            "--drain-s", min=0.0, metavar="SECONDS", help="Time for running requests at the end."
        ),
    ] = DRAIN_S
    log_format: Annotated[
        str, typer.Option(envvar="WORKER_CLIENT_LOG_FORMAT", help=", ".join(LOG_FORMATS))
    ] = LOG_FORMATS[0]

    def settings(self, adapters: tuple[AdapterSource, ...]) -> ServiceSettings:
        """Return the checked settings of a server with these adapters. Raises ClientConfigError."""
        if self.tool_call_parser and self.tool_call_parser not in TOOL_FORMS:
            fix = f"use one of {', '.join(TOOL_FORMS)}"
            given = self.tool_call_parser
            raise config_error("tool_call_parser", given, "there is no such form", fix)
        return ServiceSettings(
            host=self.host,
            port=self.port,
            names=tuple(self.served_model_name or ()),
            adapters=adapters,
            api_keys=read_keys_of("api_key", self.api_key, self.api_key_file),
            admin_keys=read_keys_of("admin_key", self.admin_key, self.admin_key_file),
            tool_call_parser=self.tool_call_parser,
            generation_config=self.generation_config,
            max_body_bytes=self.max_body_bytes,
            max_prompts=self.max_prompts,
            max_queue=self.max_queue,
            read_s=self.read_timeout,
            write_s=self.write_timeout,
            request_s=self.request_timeout,
            drain_s=self.drain_s,
            log_format=self.log_format,
        )
