"""A stand-in of Hugging Face's hub on the loopback, for the real client (HF_ENDPOINT): repositories
with commits and branches, private and gated ones, large files behind a redirect, and cut
connections. The headers are those that the hub sends."""

import hashlib
import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

GOOD_TOKEN = "hf_goodGOODgoodGOODgoodGOODgoodGOOD"
LARGE = ".safetensors"
"""Suffix of the files that are stored with Git LFS."""


@dataclass
class Repository:
    """A repository: each commit has the files of a directory, as they were when it was made."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    is_gated: bool = False
    needs_token: bool = False
    claimed_sizes: dict[str, int] = field(default_factory=dict)
    """Sizes that the listing claims, by file."""

    def commit(self, directory: Path, branch: str = "main", **more: bytes) -> str:
        """Make a commit of a directory's files, and of more; return its hash."""
        files = {
            str(path.relative_to(directory)): path.read_bytes()
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        }
        files |= more
        digest = hashlib.sha1(usedforsecurity=False)
        for name, content in files.items():
            digest.update(name.encode() + content)
        self.commits[digest.hexdigest()] = files
        self.refs[branch] = digest.hexdigest()
        return digest.hexdigest()

    def resolve(self, revision: str) -> str | None:
        """Return the commit of a revision."""
        return revision if revision in self.commits else self.refs.get(revision)


@dataclass(frozen=True)
class Request:
    """A request that was answered."""

    method: str
    path: str
    range: str
    token: str


class HubServer:
    """Serves repositories until close()."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.cuts: Counter[str] = Counter()
        """How often the connection is still cut in the middle of a file, by name."""
        self.stalls: set[str] = set()
        """Files that end in silence."""
        self.status = 0
        """Answer everything with this status; 0: do not."""
        self.lists_hashes = True
        """False: listings have names alone, as those of some mirrors."""
        self.released = threading.Event()
        """Ends the silences."""
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def repository(self, repo_id: str) -> Repository:
        """Return a repository; make it if there is none."""
        return self.repositories.setdefault(repo_id, Repository())

    def downloaded(self) -> Counter[str]:
        """Return how often each file's content was asked for."""
        gets = [each.path for each in self.requests if each.method == "GET"]
        return Counter(path.rpartition("/")[2] for path in gets if "/resolve/" in path)

    def close(self) -> None:
        """End the server."""
        self.released.set()
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server_hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.server_hub, unquote(urlsplit(self.path).path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        hub.requests.append(Request(self.command, path, self.headers.get("Range", ""), token))
        if hub.status:
            return self._refuse(hub.status, "", "down")
        words = path.strip("/").split("/")
        if words[:2] == ["api", "models"]:
            repo_id, revision = "/".join(words[2:4]), "/".join(words[5:]) or "main"
        else:
            # Branches with slashes are quoted; commits, which alone are resolved here, have none.
            repo_id, revision = "/".join(words[:2]), words[3] if len(words) > 3 else ""
        repository = hub.repositories.get(repo_id)
        refusal = _refusal(repository, revision, token)
        if refusal is not None:
            return self._refuse(*refusal)
        assert repository is not None
        commit = repository.resolve(revision)
        assert commit is not None
        if words[:2] == ["api", "models"]:
            return self._send_info(repo_id, repository, commit)
        return self._send_file(repository, commit, "/".join(words[4:]), is_linked=words[2] == "cdn")

    def _send_info(self, repo_id: str, repository: Repository, commit: str) -> None:
        siblings = []
        for name, content in repository.commits[commit].items():
            size = repository.claimed_sizes.get(name, len(content))
            entry: dict[str, object] = {"rfilename": name}
            siblings.append(entry)
            if not self.server_hub.lists_hashes:
                continue
            entry |= {"size": size, "blobId": git_hash(content)}
            if name.endswith(LARGE):
                digest = etag_of(name, content)
                entry["lfs"] = {"sha256": digest, "size": size, "pointerSize": 134}
        body = json.dumps({"id": repo_id, "sha": commit, "siblings": siblings}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_file(
        self, repository: Repository, commit: str, name: str, *, is_linked: bool
    ) -> None:
        content = repository.commits[commit].get(name)
        if repository.is_gated:
            self._refuse(403, "GatedRepo", "Access is restricted")
        elif content is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
        elif name.endswith(LARGE) and not is_linked:
            self.send_response(302)
            place = self.server_hub.url + self.path.replace("/resolve/", "/cdn/", 1)
            self.send_header("Location", place)
            self.send_header("X-Linked-Size", str(len(content)))
            self.send_header("X-Linked-Etag", f'"{etag_of(name, content)}"')
            self.send_header("X-Repo-Commit", commit)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self._send_content(commit, name, content)

    def _send_content(self, commit: str, name: str, content: bytes) -> None:
        hub = self.server_hub
        begin = int(self.headers.get("Range", "bytes=0-")[6:].split("-")[0])
        self.send_response(206 if begin else 200)
        if begin:
            last = len(content) - 1
            self.send_header("Content-Range", f"bytes {begin}-{last}/{len(content)}")
        self.send_header("ETag", f'"{etag_of(name, content)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(content) - begin))
        self.end_headers()
        if self.command == "HEAD":
            return
        rest = content[begin:]
        is_cut = hub.cuts[name] > 0 or name in hub.stalls
        self.wfile.write(rest[: len(rest) // 2] if is_cut else rest)
        if is_cut:
            self.wfile.flush()
            hub.cuts[name] -= 1
            self.close_connection = True
        if name in hub.stalls:
            hub.released.wait()

    def _refuse(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _refusal(
    repository: Repository | None, revision: str, token: str
) -> tuple[int, str, str] | None:
    """Return status, code and message, as the hub has them; None: it answers."""
    if token and token != GOOD_TOKEN:
        return 401, "", "Invalid credentials in Authorization header"
    if repository is None or (repository.needs_token and not token):
        return 404 if token else 401, "RepoNotFound" if token else "", "Repository not found"
    if repository.resolve(revision) is None:
        return 404, "RevisionNotFound", f"Invalid rev id: {revision}"
    return None


def etag_of(name: str, content: bytes) -> str:
    """Return the hash by which the hub knows a file."""
    return hashlib.sha256(content).hexdigest() if name.endswith(LARGE) else git_hash(content)


def git_hash(content: bytes) -> str:
    """Return the hash by which git knows a file."""
    header = f"blob {len(content)}\0".encode()
    return hashlib.sha1(header + content, usedforsecurity=False).hexdigest()
