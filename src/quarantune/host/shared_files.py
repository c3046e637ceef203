"""Files in directories that other users may also write to: caches, logs and saved results.

Whoever may write to a directory may put a link in the place of a program's file. So this module opens files by their
names in an open directory, follows no links there, and sets the mode only of files that it made. It makes a draft under
an unused name, writes it through the same descriptor, and then renames it.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import itertools
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_FILE = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_DIRECTORY = os.O_DIRECTORY | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
"""O_PATH also opens a directory whose names this user may not list."""
_ODD = {
    errno.ELOOP: "it is a symbolic link, which is not followed",
    errno.ENXIO: "it is not a regular file",  # a socket, or a pipe
    errno.EISDIR: "it is a directory",
}


_NO_FLOCK = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EACCES})
"""Errors of filesystems without locks, and of filelock for a file that another user may replace (sticky bit)."""
_ADVICE = {
    errno.ENOSPC: "make room on its disk",
    errno.EDQUOT: "free some of your quota on its disk",
    errno.EROFS: "mount its disk so that it can be written",
    errno.ENAMETOOLONG: "choose a directory with a shorter path",
    errno.EMFILE: "close some of this process's files, raise their limit (`ulimit -n`)",
    errno.ENFILE: "close files, because the machine has too many open",
    errno.EFBIG: "raise the limit on the size of files (`ulimit -f`)",
}
"""Remedies for errors of writing. Callers append another remedy."""
_POLL_S = 0.005
"""Seconds between two attempts to take a lock."""


class NotAFileError(OSError):
    """The path is not a regular file."""


class TooLargeError(OSError):
    """The file is larger than the caller accepts."""


class Directory(contextlib.AbstractContextManager["Directory"]):
    """An open directory. It opens, renames and removes files by their names, without following links.

    The path to the directory may contain links, because the user has chosen it. Folders below it may not be links.
    """

    def __init__(self, path: Path, *below: str, make: bool = False, shares: bool = True) -> None:
        """Opens a directory.

        Args:
            path: the directory that the user has chosen.
            below: the names of the folders that lead from `path` to the directory to open.
            make: whether to make missing folders. A new folder is writable for all who may write to its parent.
            shares: whether new files are writable for all who may write to the directory. Otherwise they have the usual
                mode, and a file that replaces another keeps the mode of the replaced one.

        Raises:
            OSError: the directory cannot be opened, a folder is a link, or the directory's name marks it as this
                user's own but another user owns it or may write to it.
        """
        self.path = path.joinpath(*below)
        self._shares = shares
        self._fd = _open_root(path, make=make)
        try:
            for name in below:
                inner = self._open_folder(name, make=make)
                os.close(self._fd)
                self._fd = inner
        except BaseException:
            os.close(self._fd)
            raise

    def __exit__(self, *_: object) -> None:
        """Closes the directory."""
        self.close()

    def close(self) -> None:
        """Closes the directory."""
        os.close(self._fd)

    def open(self, name: str, flags: int) -> int:
        """Opens a regular file, and never waits for a pipe, a terminal or a device.

        `O_CREAT` makes a missing file. In a shared directory, everybody who may write to the directory may write to the
        new file, whatever the umask is.

        Raises:
            NotAFileError: the name belongs to something else.
            OSError: the file cannot be opened.
        """
        try:
            if not flags & os.O_EXCL:
                return _opened(name, flags & ~os.O_CREAT | os.O_NOFOLLOW, self._fd)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
        try:
            fd = os.open(name, flags | _FILE | os.O_EXCL, 0o666, dir_fd=self._fd)
        except OSError as error:
            # Another process was quicker. sshfs raises EPERM instead if its server reports only a failure.
            if not isinstance(error, FileExistsError) and not self.is_there(name):
                raise
            if flags & os.O_EXCL:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name) from None
            return self.open(name, flags)
        if self._shares:
            mode = os.fstat(self._fd).st_mode
            _add_mode(fd, (0o060 if mode & 0o020 else 0) | (0o006 if mode & 0o002 else 0))
        return fd

    def read(self, name: str, *, largest_bytes: int) -> bytes:
        """Returns the content of a regular file.

        Args:
            name: the file.
            largest_bytes: the largest size accepted.

        Raises:
            NotAFileError: the name belongs to something else.
            TooLargeError: the file is larger.
            OSError: the file cannot be read, or does not exist.
        """
        return _content(self.open(name, os.O_RDONLY), name, largest_bytes)

    def read_afresh(self, name: str, *, largest_bytes: int) -> bytes:
        """Reads a file as `read` does, but under a new name, about which no network filesystem has cached anything.

        Under the old name, the machine may still see a file that another host has replaced. If the new name cannot be
        made, this method reads the old one.
        """
        new = draft_name(name)
        try:
            self.link(name, new)
        except FileNotFoundError:
            raise
        except OSError:
            return self.read(name, largest_bytes=largest_bytes)
        try:
            return self.read(new, largest_bytes=largest_bytes)
        finally:
            self.remove(new)

    def replace(self, name: str, content: bytes) -> None:
        """Replaces a file's content atomically. A link is replaced, not followed.

        Raises:
            OSError: the disk or the directory refused, and the file is unchanged.
        """
        with self.draft(draft_name(name), name) as take_place:
            take_place(content)

    @contextlib.contextmanager
    def draft(self, name: str, target: str) -> Iterator[Callable[[bytes], None]]:
        """Makes an empty draft of a file, and removes it unless it has taken the file's place.

        Args:
            name: the draft.
            target: the file.

        Yields:
            A function that replaces the file's content atomically, and safely from a crash of the machine. It leaves
            the file unchanged and raises `FileNotFoundError` if the draft was removed, or `OSError` if the disk or the
            directory refuses.

        Raises:
            FileExistsError: the draft's name is taken.
        """
        fd = self.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

        def take_place(content: bytes) -> None:
            if not self._shares and self.is_there(target) and stat.S_ISREG(mode := self.status(target).st_mode):
                os.fchmod(fd, stat.S_IMODE(mode))  # a link's mode would let everybody write
            write_all(fd, content)
            os.fsync(fd)
            if not self.is_same(name, fd):
                raise FileNotFoundError(errno.ENOENT, "the draft was removed")
            self.rename(name, target)
            self.sync()

        try:
            yield take_place
        finally:
            with contextlib.suppress(OSError):
                if self.is_same(name, fd):
                    self.remove(name)
            os.close(fd)

    def names(self, pattern: str = "*") -> list[str]:
        """Returns the names that match a pattern, sorted."""
        with self._readable() as fd:
            return sorted(fnmatch.filter(os.listdir(fd), pattern))

    def status(self, name: str) -> os.stat_result:
        """Returns the status of a file; a link is not followed."""
        return os.stat(name, dir_fd=self._fd, follow_symlinks=False)

    def is_there(self, name: str) -> bool:
        """Returns whether the name is taken."""
        with contextlib.suppress(FileNotFoundError):
            return bool(self.status(name))
        return False

    def is_same(self, name: str, fd: int) -> bool:
        """Returns whether a name still belongs to an open file."""
        with contextlib.suppress(OSError):
            return os.path.samestat(self.status(name), os.fstat(fd))
        return False

    def rename(self, name: str, new: str) -> None:
        """Renames a file, replacing any file that has the new name."""
        os.replace(name, new, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def link(self, name: str, new: str) -> None:
        """Gives a file a second name, which must be unused."""
        os.link(name, new, src_dir_fd=self._fd, dst_dir_fd=self._fd, follow_symlinks=False)

    def remove(self, name: str) -> None:
        """Removes a file, if it exists. A directory in its place is set aside."""
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(self.status(name).st_mode):
                self.rename(name, self.free_name(name))
            else:
                os.unlink(name, dir_fd=self._fd)

    def free_name(self, name: str) -> str:
        """Returns an unused name under which to set an unusable file aside."""
        stem = f"{name}.corrupt-{time.strftime('%Y%m%dT%H%M%S')}"
        names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(1)))
        return next(aside for aside in names if not self.is_there(aside))

    def sync(self) -> None:
        """Waits until the names are on the disk, if the filesystem supports that."""
        with contextlib.suppress(OSError), self._readable() as fd:
            os.fsync(fd)

    @contextlib.contextmanager
    def _readable(self) -> Iterator[int]:
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            yield fd
        finally:
            os.close(fd)

    def _open_folder(self, name: str, *, make: bool) -> int:
        if make and not self.is_there(name):
            try:
                os.mkdir(name, dir_fd=self._fd)
            except OSError:
                if not self.is_there(name):
                    raise
            else:
                fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
                _add_mode(fd, os.fstat(self._fd).st_mode & 0o022)
                os.close(fd)
        return _open_folder(name, self._fd)


@contextlib.contextmanager
def side_lock(place: Directory, name: str, wait_s: float = 0.0) -> Iterator[bool | None]:
    """Holds the lock on a side file that is never removed: a `FileLock`, released by the kernel when its holder dies.

    A fork of the holder closes its copy of the lock. filelock refuses a link in the place of the file. This function
    makes the file first: filelock follows links in the place of folders, locks pipes, and cannot set the mode of a new
    file without setting it on an existing one.

    A filesystem without locks is not a failure, because writers also announce themselves. filelock's substitute would
    hold until somebody sees that its holder is dead, which other hosts cannot see. On some filesystems locks have no
    effect: the kernel grants a second lock while the first is held.

    Args:
        place: the directory.
        name: the file; a missing one is made.
        wait_s: the longest wait for other holders in seconds.

    Yields:
        Whether the lock was granted; None if the filesystem has no locks, or they have no effect.

    Raises:
        OSError: the file cannot be opened.
    """
    from filelock import FileLock  # only writers need it, and its import takes 30 ms

    os.close(place.open(name, os.O_RDWR | os.O_CREAT))
    # Not one lock for each thread: one thread may take a claim and another release it.
    lock, second = (FileLock(place.path / name, thread_local=False, fallback_to_soft=False) for _ in range(2))
    is_granted: bool | None = False
    try:
        with contextlib.suppress(TimeoutError):
            lock.acquire(wait_s, _POLL_S)
            is_granted = True
            second.acquire(0.0)
            is_granted = None
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        is_granted = None
    try:
        yield is_granted
    finally:
        for each in (second, lock):
            # The work under the lock is done: an error of the release must not look like a failure of that work.
            with contextlib.suppress(OSError):
                each.release()


def draft_name(name: str) -> str:
    """Returns an unused name for a draft of a file."""
    return f".{name}.{secrets.token_hex(8)}.tmp"


def advice(error: OSError) -> str:
    """Returns a remedy for an error of writing a file. Callers append another remedy."""
    if isinstance(error, (NotAFileError, NotADirectoryError, FileExistsError)):
        return "move away the thing in its place"
    is_refused = isinstance(error, PermissionError)
    return _ADVICE.get(error.errno or 0, "make the directory writable" if is_refused else "see whether its disk works")


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Writes all of `data` at the file's current position."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def read(path: Path, *, largest_bytes: int, below: Path | None = None, afresh: bool = False) -> bytes:
    """Returns the content of a regular file.

    Args:
        path: the file.
        largest_bytes: the largest size accepted.
        below: the directory that the user has chosen, below which nothing may be a link; None if the user has named
            the file, or nobody ever writes to its directory.
        afresh: whether to read it as `Directory.read_afresh` does; ignored if `below` is None.

    Raises:
        NotAFileError: the path leads to something else.
        TooLargeError: the file is larger.
        OSError: the file cannot be read, or does not exist.
    """
    if below is None:
        return _content(_opened(os.fspath(path), 0, None), os.fspath(path), largest_bytes)
    with directory_of(path, below=below) as place:
        return (place.read_afresh if afresh else place.read)(path.name, largest_bytes=largest_bytes)


def directory_of(path: Path, *, below: Path, make: bool = False) -> Directory:
    """Opens the directory of a file that lies in `below`, or in a folder there."""
    return Directory(below, *path.relative_to(below).parts[:-1], make=make)


def paths(directory: Path, *patterns: str) -> list[Path]:
    """Returns the paths that match patterns of `name` or `folder/name`, sorted within each pattern.

    Unreadable folders contribute no paths.
    """
    found: list[Path] = []
    for folder, _, name in (pattern.rpartition("/") for pattern in patterns):
        for each in _names(directory, pattern=folder) if "*" in folder else [folder]:
            found += [directory / each / one for one in _names(directory, each, pattern=name)]
    return found


def _names(directory: Path, folder: str = "", *, pattern: str) -> list[str]:
    with contextlib.suppress(OSError), Directory(directory, *filter(None, [folder])) as place:
        return place.names(pattern)
    return []


def own_directory(parent: Path) -> Path:
    """Returns the path of this user's own directory in a shared one, such as /tmp.

    `Directory` refuses it if it belongs to another user, or if everybody may write to it.
    """
    return parent / f"quarantune-{os.getuid()}"


def _open_root(path: Path, *, make: bool) -> int:
    is_own = path == own_directory(path.parent)
    if make:
        path.mkdir(mode=0o700 if is_own else 0o777, parents=True, exist_ok=True)
    fd = _open_folder(os.fspath(path), None) if is_own else os.open(path, _DIRECTORY)
    about = os.fstat(fd)
    if is_own and (about.st_uid != os.geteuid() or about.st_mode & 0o002):
        os.close(fd)
        raise PermissionError(errno.EPERM, "its name marks it as yours alone, but others may write to it")
    return fd


def _open_folder(name: str, directory_fd: int | None) -> int:
    try:
        return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=directory_fd)
    except NotADirectoryError:
        found = f"{os.path.basename(name)!r} is not a directory, or is a symbolic link, which is not followed"
        raise NotADirectoryError(errno.ENOTDIR, found) from None


def _opened(name: str, flags: int, directory_fd: int | None) -> int:
    """Opens a regular file that exists."""
    try:
        fd = os.open(name, flags | _FILE, dir_fd=directory_fd)
    except OSError as error:
        if error.errno not in _ODD:
            raise
        raise NotAFileError(error.errno, _ODD[error.errno], name) from None
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.ENXIO
        raise NotAFileError(code, _ODD[code], name)
    return fd


def _content(fd: int, name: str, largest_bytes: int) -> bytes:
    # On a network filesystem, the size may belong to an earlier file of this name: read up to the end.
    with os.fdopen(fd, "rb") as file:
        if os.fstat(fd).st_size <= largest_bytes and len(data := file.read()) <= largest_bytes:
            return data
    raise TooLargeError(errno.EFBIG, f"it is larger than {largest_bytes >> 10} KiB", name)


def _add_mode(fd: int, wanted: int) -> None:
    """Adds permissions to a file that this process made."""
    with contextlib.suppress(OSError):
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        if mode & wanted != wanted:
            os.fchmod(fd, mode | wanted)
