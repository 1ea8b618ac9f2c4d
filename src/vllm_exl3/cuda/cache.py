"""The cubin cache: compiled kernels on disk, shared by processes that do not trust each other's crashes.

One file a cubin, named by the fingerprint of everything that decides its bytes. A file is loaded only if this user owns
it, nobody else can write it or its folder, and the SHA-256 stored in it matches: machine code runs on the GPU with this
process' data. Files are written under a lock to a temporary name and renamed, so readers never see half of one. A full
disk costs the cache, not the run.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from vllm_exl3.env import user_cache

__all__ = ["CubinCache", "default_folder"]

logger = logging.getLogger("vllm.exl3")

_MAGIC = b"EXL3CUBIN1\n"
_DIGEST = hashlib.sha256().digest_size


def default_folder() -> Path:
    """Where cubins go without ``VLLM_EXL3_CACHE``: the user's cache folder."""
    return user_cache() / "cubins"


class CubinCache:
    """Cubins by fingerprint in one folder.

    Args:
        folder: created when missing, for this user alone.

    Attributes:
        unkept: how many kernels were built here and could not be stored.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unkept = 0
        self._told: set[str] = set()
        self._told_lock = threading.Lock()

    def get(self, fingerprint: str, label: str, build: Callable[[], bytes]) -> tuple[bytes, bool]:
        """The cubin, from disk or built and stored.

        Args:
            fingerprint: hex digest of all that decides the cubin.
            label: what messages call it.
            build: compiles it; called at most once across the processes that share the folder, unless storing fails.

        Returns:
            The cubin, and whether it came from disk.
        """
        path = self.folder / f"{fingerprint}.cubin"
        image = self._read(path, label)
        if image is not None:
            return image, True
        with self._locked(fingerprint):
            image = self._read(path, label)  # another process may have built it while this one waited
            if image is not None:
                return image, True
            image = build()
            self._write(path, image)
        return image, False

    def refusal(self) -> str | None:
        """Why compiled kernels cannot be kept here, or None where they can."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".new-"):
                pass
            status = self.folder.stat()
        except OSError as error:
            return f"{self.folder} cannot be written ({error.strerror}): set VLLM_EXL3_CACHE to a folder that can"
        if (reason := _untrusted(status, "folder")) is not None:
            return f"{self.folder}: {reason}, so no kernel from there would be loaded; set VLLM_EXL3_CACHE to another"
        return None

    def _first(self, key: str) -> bool:
        """True at the first call with a key."""
        with self._told_lock:
            told = key in self._told
            self._told.add(key)
        return not told

    def _say_once(self, key: str, message: str, *arguments: object) -> None:
        if self._first(key):
            logger.warning(message, *arguments)

    def _read(self, path: Path, label: str) -> bytes | None:
        try:
            # Without waiting: a pipe of this name would never be written.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._say_once(
                str(path), "%s: the cached kernel %s cannot be opened (%s); compiling it", path, label, error
            )
            return None
        try:
            with open(descriptor, "rb", closefd=False) as file:
                if (reason := _untrusted(os.stat(path.parent), "folder")) is not None:
                    self._say_once("folder", "%s: no cached kernel from there is used: %s", self.folder, reason)
                    return None
                reason = _untrusted(os.fstat(descriptor), "file")
                data = b"" if reason is not None else file.read()
        except OSError as error:  # a folder of this name, a failing disk
            reason, data = f"it cannot be read ({error})", b""
        finally:
            os.close(descriptor)
        if reason is None:
            image = data[len(_MAGIC) + _DIGEST :]
            if data.startswith(_MAGIC) and data[len(_MAGIC) :][:_DIGEST] == hashlib.sha256(image).digest():
                return image
            reason = "its content does not match its hash"
        self._say_once(str(path), "%s: the cached kernel %s is not used: %s; compiling it again", path, label, reason)
        return None

    def _write(self, path: Path, image: bytes) -> None:
        temporary = ""
        try:
            with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".new-", delete=False) as file:
                temporary = file.name
                file.write(_MAGIC + hashlib.sha256(image).digest() + image)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            with self._told_lock:
                self.unkept += 1
            self._say_once("write", "%s: compiled kernels are not kept: %s", self.folder, error)

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Said, since it takes minutes where the other process compiles, and for ever where it was stopped.
            if self._first("wait"):
                logger.info("EXL3: another process compiles kernels into %s, and this one waits for them", self.folder)
            fcntl.flock(descriptor, fcntl.LOCK_EX)

    @contextlib.contextmanager
    def _locked(self, fingerprint: str) -> Iterator[None]:
        """One builder per cubin across processes; without a usable folder everyone builds for themselves."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self.folder / f"{fingerprint}.lock", flags, 0o600)
        except OSError as error:
            self._say_once("lock", "%s: the kernel cache cannot be used: %s", self.folder, error)
            yield
            return
        try:
            try:
                self._lock(descriptor)
            except OSError as error:  # a file system without locks
                self._say_once("lock", "%s: the kernel cache cannot be locked: %s", self.folder, error)
            yield
        finally:
            with contextlib.suppress(OSError):
                # Closing would not do: a process that was forked meanwhile has the lock as well.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _untrusted(status: os.stat_result, what: str) -> str | None:
    """Why machine code must not be taken from a file or folder with this status, or None."""
    if status.st_uid != os.getuid():
        return f"the {what} belongs to user {status.st_uid}, not to {os.getuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write the {what} (mode {stat.S_IMODE(status.st_mode):o})"
    return None
