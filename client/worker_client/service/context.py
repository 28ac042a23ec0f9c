"""The objects that endpoints share."""

from dataclasses import dataclass

from worker_client.service.access import KeyCheck
from worker_client.service.admission import Admission
from worker_client.service.engine import Engine
from worker_client.service.settings import ServiceSettings


@dataclass(frozen=True, slots=True)
class ServiceContext:
    """Made by server.py; every endpoint's file has a function that takes it and returns a
    router."""

    settings: ServiceSettings
    engine: Engine
    access: KeyCheck
    admission: Admission
