"""A pack in a Hub repository, read by bounded HTTP ranges: megabytes instead of the whole model.

Everything goes through huggingface_hub's own session, so HF_ENDPOINT, HF_TOKEN, proxies and custom
client factories apply. The revision is resolved to a commit once; files that the local cache holds
for that commit are read from disk. Its ``get_safetensors_metadata`` is not used: it reads indexed
files only and refuses headers over 25 MB, which a pack of many experts exceeds.
"""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # public, but not re-exported in typing's sense
    build_hf_headers,
    hf_raise_for_status,
    http_stream_backoff,
    validate_repo_id,
)

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.headers import FIRST_READ
from vllm_exl3.pack.source import LocalFolder, Range

__all__ = ["HubRepository", "is_repository_id", "open_repository"]

THREADS = 8
TIMEOUT = 30.0
"""Seconds without a byte after which a request is tried again."""

MAX_TEXT = 1 << 30
"""Largest JSON file that is read whole; the ledger of 75,000 linears takes 100 MB."""

# The HTTP library differs between huggingface_hub versions; its errors share this base class.
_NETWORK_ERRORS: tuple[type[Exception], ...] = (HfHubHTTPError.__bases__[0], ConnectionError)


def is_repository_id(name: str) -> bool:
    """Whether a string can be ``owner/name`` (or a bare name) rather than a path."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not name.startswith((".", "~"))


def open_repository(
    repository: str, revision: str | None, token: str | bool | None, cache_dir: str | Path | None
) -> "HubRepository | LocalFolder":
    """Resolve a repository at a revision; a snapshot that the cache holds whole comes as a folder.

    Raises:
        Exl3PackError: there is no such repository, revision or access, or no network and no snapshot.
    """
    if constants.is_offline_mode():
        return _cached_or_refuse(repository, revision, cache_dir, "HF_HUB_OFFLINE is set")
    try:
        info = HfApi(token=token).model_info(repository, revision=revision, timeout=TIMEOUT)
    except (RepositoryNotFoundError, RevisionNotFoundError, HfHubHTTPError) as error:
        raise _refused(repository, revision, token, error) from error
    except _NETWORK_ERRORS as error:
        return _cached_or_refuse(repository, revision, cache_dir, f"the Hub did not answer ({error})")
    commit = str(info.sha)
    names = tuple(sorted(file.rfilename for file in info.siblings or () if "/" not in file.rfilename))
    cached = {name: path for name in names if (path := _cached(repository, name, commit, cache_dir))}
    wanted = [name for name in names if name.endswith((".safetensors", ".json"))]
    if wanted and all(name in cached for name in wanted):
        return LocalFolder(cached[wanted[0]].parent, label=repository, commit=commit)
    return HubRepository(repository, commit, names, cached, token)


class HubRepository:
    """A repository at one commit, not or only partly in the local cache."""

    def __init__(
        self,
        repository: str,
        commit: str,
        names: tuple[str, ...],
        cached: dict[str, Path],
        token: str | bool | None,
    ) -> None:
        self.label = f"{repository} at {commit[:12]}"
        self.folder: Path | None = None
        self.commit: str | None = commit
        self.remarks: tuple[str, ...] = ()
        self._repository = repository
        self._names = names
        self._cached = cached
        self._token = token
        self._heads: dict[str, tuple[bytes, int]] = {}

    def names(self) -> tuple[str, ...]:
        """Names of all files at the top level, sorted."""
        return self._names

    def branches(self) -> list[str]:
        """Names of the repository's branches, main last; empty when the Hub does not tell."""
        return _branches(self._repository, self._token)

    def size(self, name: str) -> int:
        """Bytes of one file, as the answer to the first read states them."""
        if name in self._cached:
            return self._cached[name].stat().st_size
        return self._head(name)[1]

    def read(self, name: str, start: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``start``.

        Raises:
            Exl3PackError: the server refuses, ignores the range, or sends another number of bytes.
        """
        if not length:
            return b""
        if name in self._cached:
            with open(self._cached[name], "rb") as file:
                file.seek(start)
                return file.read(length)
        head = self._heads.get(name, (b"", 0))[0]
        if start + length <= len(head):
            return head[start : start + length]
        return self._range(name, start, length)[0]

    def read_many(self, ranges: Sequence[Range]) -> list[bytes]:
        """Many small ranges, in order, a few at a time."""
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(lambda item: self.read(*item), ranges))

    def whole(self, name: str) -> bytes:
        """All bytes of a text file; small files are not always served by ranges."""
        if name in self._cached:
            return self._cached[name].read_bytes()
        return self._get(name, {}, MAX_TEXT, 200)[0]

    def state(self) -> tuple[object, ...]:
        """Endpoint, repository and commit: a commit never changes."""
        return (constants.ENDPOINT, self._repository, self.commit)

    def _head(self, name: str) -> tuple[bytes, int]:
        if name not in self._heads:
            self._heads[name] = self._range(name, 0, FIRST_READ, exact=False)
        return self._heads[name]

    def _range(self, name: str, start: int, length: int, *, exact: bool = True) -> tuple[bytes, int]:
        """The bytes of a range and the file's size; a first read may get fewer than it asks for."""
        data, headers = self._get(name, {"Range": f"bytes={start}-{start + length - 1}"}, length, 206)
        match = re.match(r"bytes (\d+)-(\d+)/(\d+)$", headers.get("content-range", ""))
        expected = length
        if match and not exact:
            expected = min(length, int(match[3]))
        if match is None or int(match[1]) != start or len(data) != expected:
            raise self._fault(
                name, f"{len(data)} bytes, content-range {headers.get('content-range')!r}", f"{expected} from {start}"
            )
        return data, int(match[3])

    def _get(self, name: str, headers: dict[str, str], limit: int, status: int) -> tuple[bytes, dict[str, str]]:
        url = hf_hub_url(self._repository, name, revision=self.commit)
        # A compressed body would make byte offsets meaningless.
        headers = {**build_hf_headers(token=self._token), "Accept-Encoding": "identity", **headers}
        try:
            with http_stream_backoff("GET", url, headers=headers, timeout=TIMEOUT) as response:
                if response.status_code != status:
                    hf_raise_for_status(response)
                    raise self._fault(name, f"HTTP status {response.status_code}", f"{status}")
                data = bytearray()
                for chunk in response.iter_bytes():
                    data += chunk
                    if len(data) > limit:
                        raise self._fault(name, f"more than {limit} bytes", f"at most {limit}")
                return bytes(data), {key.lower(): value for key, value in response.headers.items()}
        except _NETWORK_ERRORS as error:
            raise self._fault(name, f"no answer ({error})", f"HTTP status {status}") from error

    def _fault(self, name: str, found: str, expected: str) -> Exl3PackError:
        return Exl3PackError(
            found=found,
            expected=expected,
            where=f"{name} in {self.label}, read from {constants.ENDPOINT}",
            remedy="Headers are read by HTTP ranges (status 206), which the server or a proxy in between did not "
            "serve as asked: try again, or download the pack and give the folder.",
        )


def _cached(repository: str, name: str, revision: str | None, cache_dir: str | Path | None) -> Path | None:
    path = try_to_load_from_cache(repository, name, cache_dir=cache_dir, revision=revision)
    return Path(path) if isinstance(path, str) else None


def _cached_or_refuse(repository: str, revision: str | None, cache_dir: str | Path | None, reason: str) -> LocalFolder:
    config = _cached(repository, "config.json", revision, cache_dir)
    if config is None:
        raise Exl3PackError(
            found=f"no cached snapshot of revision {revision or 'main'}, and {reason}",
            expected="a snapshot in the local cache, or a Hub that answers",
            where=f"{repository} in {cache_dir or constants.HF_HUB_CACHE}",
            remedy="Go online once, or download the pack and give its folder; there is no local folder of this name.",
        )
    remarks = () if constants.is_offline_mode() else (f"{reason}; the cached snapshot is used",)
    return LocalFolder(config.parent, label=repository, commit=config.parent.name, remarks=remarks)


def _refused(repository: str, revision: str | None, token: str | bool | None, error: Exception) -> Exl3PackError:
    name = revision or "main"
    if isinstance(error, RevisionNotFoundError):
        found, expected = f"no revision {name!r}", f"one of: {', '.join(_branches(repository, token)) or 'none'}"
        remedy = "Pass one of these with --revision."
    elif isinstance(error, GatedRepoError):
        found, expected, remedy = "a gated repository", "access to it", "Ask for access on its page, then set HF_TOKEN."
    elif isinstance(error, RepositoryNotFoundError):
        found, expected = "no such repository, or no access to it", "a public repository or a token that may read it"
        remedy = "Check the name (there is no local folder of this name either); set HF_TOKEN if it is private."
    else:
        found, expected, remedy = f"an error from the Hub ({error})", "its list of files", "Try again later."
    return Exl3PackError(found=found, expected=expected, where=f"{repository} at {constants.ENDPOINT}", remedy=remedy)


def _branches(repository: str, token: str | bool | None) -> list[str]:
    try:
        refs = HfApi(token=token).list_repo_refs(repository)
    except _NETWORK_ERRORS:
        return []  # only makes an error message richer
    names = sorted(branch.name for branch in refs.branches)
    return [name for name in names if name != "main"] + [name for name in names if name == "main"]
