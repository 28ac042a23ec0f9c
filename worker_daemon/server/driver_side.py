"""The main thread's parts that face drivers: who holds the daemon, what it tells, and what it
answers."""

import time
from collections.abc import Callable

from worker_daemon.server.auth.security import Security
from worker_daemon.server.control import Control
from worker_daemon.server.dispatch import OpenRendezvousServer
from worker_daemon.server.events import Events
from worker_daemon.server.health.tracing import Tracing
from worker_daemon.server.progress import Progress
from worker_daemon.server.runtime_files import RuntimeFiles
from worker_daemon.server.session.attach import AttachHandler
from worker_daemon.server.session.cached_blocks_handler import CachedBlocksHandler
from worker_daemon.server.session.contact import HolderContact
from worker_daemon.server.session.draining import Draining
from worker_daemon.server.session.expert_loads import ExpertLoadReader
from worker_daemon.server.session.kv_transfer_handler import KVTransferHandler
from worker_daemon.server.session.lease import Lease, suspended_s
from worker_daemon.server.session.rendezvous import LinkRendezvous
from worker_daemon.server.session.status import StatusReport
from worker_daemon.server.session.upload_handler import UploadHandler
from worker_daemon.server.threads import DaemonThreads
from worker_daemon.server.wire.sockets import Sockets
from worker_daemon.worker.uploads import Uploads


class DriverSide:
    """Owned by the daemon; main thread only. Its parts reach the step thread by commands."""

    def __init__(
        self,
        files: RuntimeFiles,
        sockets: Sockets,
        threads: DaemonThreads,
        progress: Progress,
        security: Security,
        uploads: Uploads,
        *,
        open_rendezvous: OpenRendezvousServer,
        data_host: str,
        begin_shutdown: Callable[[str], None],
    ) -> None:
        """data_host: address at which ranks meet. begin_shutdown: see Control."""
        lease, post = Lease(time.monotonic, suspended_s), threads.post
        self.draining = Draining(post, lambda: self.events.publish_heartbeat(), lease, progress)
        self.report = StatusReport(
            endpoint=files.endpoint,
            progress=progress,
            guard=threads.guard,
            lease=lease,
            draining=self.draining,
            security=security,
            completion=threads.completion,
            device_watch=threads.device_watch,
            uploads=uploads,
            expert_loads=ExpertLoadReader(post, progress),
        )
        self.events = Events(sockets.events, self.report)
        self.contact = HolderContact(lease, threads.completion.channel.reaches, self.beat)
        self._attaching = AttachHandler(
            files.epochs,
            lease,
            self.contact,
            self.draining,
            progress,
            threads.guard,
            self.report,
            uploads,
            post,
        )
        need_attached = self._attaching.need_attached
        self.control = Control(
            socket=sockets.control,
            security=security,
            attaching=self._attaching,
            rendezvous=LinkRendezvous(
                open_rendezvous, data_host, need_attached, progress, threads.guard, post
            ),
            report=self.report,
            draining=self.draining,
            tracing=Tracing(post, need_attached, self.events.ask_driver),
            uploading=UploadHandler(uploads, need_attached, self.draining, progress),
            caching=CachedBlocksHandler(need_attached, progress),
            moving=KVTransferHandler(need_attached, progress),
            begin_shutdown=begin_shutdown,
        )

    def beat(self) -> None:
        """Watch the lease, and send a heartbeat."""
        self._attaching.watch_lease()
        self.events.publish_heartbeat()

    def close(self) -> None:
        """Close the sockets, after the last task of the control socket."""
        self.control.close()
        self.events.close()
