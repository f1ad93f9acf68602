"""What can be converted: checkpoints of any format, opened as entries whose bytes are read when wanted.

    a directory with .metadata     of distckpt or stock PyTorch, in any format
    *.safetensors                  in a directory, or one file
    zarr.json                      a store of zarr v3, through tensorstore
    a file of torch.save           mapped into memory

A tensor is read in any range of its bytes, row by row, however its chunks lie; that takes a few MiB for each
thread.

Invariants:
    * What a commit has checksums of is compared with them before it is handed out.
    * Chunks that do not fill their tensor are refused when the source is opened.

Threads: entries may be read by several at once.
"""

from __future__ import annotations

import copy
import fnmatch
import glob
import io
import itertools
import json
import math
import os
import pickle
import shlex
import threading
import types
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.serialization import skip_data

from distckpt.errors import CheckpointError, ConfigError, IntegrityError, WriteError
from distckpt.formats import contiguous_strides, format_of, open_format, safetensors_dtypes
from distckpt.geometry import misfit
from distckpt.integrity import Integrity, load_integrity
from distckpt.manifest import METADATA
from distckpt.metadata import unpickle_metadata
from distckpt.storage import Storage, is_url, open_storage, reopen_storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    Path = tuple[str | int, ...]

_PIECE_BYTES = 8 << 20
"""What is read of a chunk at once."""
_KEPT_BYTES = 64 << 20
_MOST_HEADER_BYTES = 100_000_000
_SUFFIX = ".safetensors"
_INDEX = ".safetensors.index.json"
_MAIN_INDEX = "model" + _INDEX
_ZARR = "zarr.json"
_LOCAL_HEADER_BYTES = 30
_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
"""Their tensors cannot be made without scales, and so have no frame."""


class ObjectSource:
    """A Python object, as torch.save has written it.

    Attributes:
        fqn: Name of the entry.
        path: Keys that lead to it in the state.
        origin: Its name in the source, whatever `strip` has made of it.
    """

    def __init__(self, fqn: str, path: Path, read: Callable[[], bytes]) -> None:
        self.fqn = self.origin = fqn
        self.path = path
        self.read = read


class EmptySource(ObjectSource):
    """A dict without keys, which nothing but a file of torch.save has a place for."""


class TensorSource:
    """A tensor whose bytes can be read in any range; those of subclasses differ in where they come from.

    Attributes:
        fqn: Name of the entry.
        path: Keys that lead to it in the state.
        origin: Its name in the source, whatever `strip` has made of it.
        dtype: Of its elements.
        shape: In elements.
        requires_grad: What is known of that.
        nbytes: Bytes of all elements.
    """

    def __init__(
        self,
        fqn: str,
        path: Path,
        dtype: torch.dtype,
        shape: Sequence[int],
        *,
        requires_grad: bool = False,
    ) -> None:
        self.fqn = self.origin = fqn
        self.path = path
        self.dtype = dtype
        self.shape = tuple(shape)
        self.requires_grad = requires_grad
        self.nbytes = math.prod(self.shape) * dtype.itemsize

    def read_into(self, low: int, high: int, target: memoryview) -> None:
        """Fill `target` with bytes [low, high) of the elements, row by row, in the machine's order of bytes.

        Raises:
            IntegrityError: They are not what was written.
            WriteError: The storage refuses.
        """
        raise NotImplementedError


class Source:
    """An opened checkpoint.

    Attributes:
        url: Where it is.
        entries: All that it holds, in its own order.
        tree: The containers of the state with the names of entries in them, if the source has their kinds and
            keys; None if there are paths alone.
    """

    def __init__(
        self,
        url: str,
        entries: Iterable[TensorSource | ObjectSource],
        tree: Mapping[Any, Any] | None = None,
    ) -> None:
        self.url = url
        self.entries = list(entries)
        self.tree = tree


def open_source(
    url: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
    *,
    timeout_s: float | None = None,
    weights_only: bool = True,
) -> Source:
    """Open a checkpoint for reading, whatever its format.

    Args:
        url: A directory, or a file of safetensors or torch.save; which of them is not told by its name.
        storage_options: Passed to fsspec.
        timeout_s: As for `open_storage`.
        weights_only: Whether to refuse Python objects whose loading can run code.

    Raises:
        CheckpointError: There is none.
        ConfigError: It cannot be opened with what is installed.
        IntegrityError: It is damaged.
        WriteError: The storage refuses.
    """
    text, path = os.fspath(url), _local(url)
    if path is not None and os.path.isfile(path):
        if not path.endswith(_SUFFIX):
            return _torch_file(path, weights_only=weights_only)
        folder, file = os.path.split(path)
        # Absolute, and so local, whatever colons are in it.
        storage = open_storage(os.path.realpath(folder), storage_options, timeout_s=timeout_s)
        return Source(text, _safetensors(_Reader(storage, timeout_s), [file]))
    if path is None and text.endswith(_SUFFIX):
        folder, _, file = text.rpartition("/")
        # What follows a scheme at once lies in no folder.
        if is_url(folder):
            storage = open_storage(folder, storage_options, timeout_s=timeout_s)
            if _is_file(storage, file):
                return Source(text, _safetensors(_Reader(storage, timeout_s), [file]))
    storage = open_storage(url, storage_options, timeout_s=timeout_s)
    read = _Reader(storage, timeout_s)
    metadata = storage.read(METADATA)
    if metadata is not None:
        return Source(storage.url, _dcp(read, bytes(metadata), weights_only=weights_only))
    present = storage.list()
    files = sorted(name for name in present if name.endswith(_SUFFIX))
    if files:
        return Source(storage.url, _indexed(read, files, present))
    if _ZARR in present:
        return Source(storage.url, _zarr(storage))
    what = ", ".join(sorted(present)[:4]) or "nothing"
    raise CheckpointError(
        f"{storage.url} holds no complete checkpoint: neither {METADATA}, nor *{_SUFFIX}, nor {_ZARR}; "
        f"there is {what}"
    )


def _local(url: str | os.PathLike[str]) -> str | None:
    """Return the path on this machine that was given; None if it is elsewhere."""
    text = os.fspath(url)
    if not isinstance(url, str):
        return text
    text = text.removeprefix("file://")
    # Without a scheme, colons are those of a name: the storages that fsspec chains have one.
    return None if "://" in text and is_url(text) else text


def _is_file(folder: Storage, name: str) -> bool:
    try:
        return folder.read(name, 0, 1) is not None
    except WriteError:
        # There are servers that answer so where a directory is read.
        if f"{name}/" in folder.list():
            return False
        raise


def select(
    entries: Sequence[TensorSource | ObjectSource], include: Sequence[str], exclude: Sequence[str]
) -> list[TensorSource | ObjectSource]:
    """Return the entries whose names fit one of `include`, if there are any, and none of `exclude`.

    Raises:
        CheckpointError: Two of them have one name.
        ConfigError: A pattern fits nothing, or nothing is left.
    """
    for pattern in (*include, *exclude):
        if not any(fnmatch.fnmatchcase(entry.fqn, pattern) for entry in entries):
            names = ", ".join(entry.fqn for entry in entries[:3])
            raise ConfigError(f"no entry has a name that fits {pattern!r}; there are {names}, ...")
    chosen = [
        entry
        for entry in entries
        if (not include or any(fnmatch.fnmatchcase(entry.fqn, pattern) for pattern in include))
        and not any(fnmatch.fnmatchcase(entry.fqn, pattern) for pattern in exclude)
    ]
    if not chosen:
        raise ConfigError("nothing is left to convert: every entry is excluded")
    [(fqn, count)] = Counter(entry.fqn for entry in chosen).most_common(1)
    if count > 1:
        paths = " and ".join(str(list(entry.path)) for entry in chosen if entry.fqn == fqn)
        raise CheckpointError(
            f"{count} entries are named {fqn!r}, with the keys {paths}: rename one, or leave them out "
            f"({_exclude(fqn)})"
        )
    return chosen


def _exclude(fqn: str) -> str:
    """Return the option that leaves an entry out, whatever its name means to a shell or as a pattern."""
    return f"--exclude {shlex.quote(glob.escape(fqn))}"


def strip(
    entries: Sequence[TensorSource | ObjectSource], prefix: str, tree: Mapping[Any, Any] | None = None
) -> tuple[list[TensorSource | ObjectSource], Mapping[Any, Any] | None]:
    """Return entries without `prefix` where their names begin with it, and `Source.tree` for these names.

    Keys follow: what a prefix takes of a name, it takes of the keys that lead to the entry.

    Raises:
        ConfigError: No name begins with it, one is no more than it, or two entries would come to one place.
    """
    if not any(entry.fqn.startswith(prefix) for entry in entries):
        names = ", ".join(entry.fqn for entry in entries[:3])
        raise ConfigError(f"no entry has a name that begins with {prefix!r}; there are {names}, ...")
    stripped = [_without(entry, prefix) if entry.fqn.startswith(prefix) else entry for entry in entries]
    bearers: dict[str, str] = {}
    # What holds entries is none itself, and has either keys or places.
    kinds: dict[Path, tuple[type | None, str]] = {}
    for entry in stripped:
        origin = bearers.setdefault(entry.fqn, entry.origin)
        if origin != entry.origin:
            raise ConfigError(
                f"without {prefix!r}, {origin!r} and {entry.origin!r} would both be named {entry.fqn!r}: "
                f"leave one out ({_exclude(entry.origin)})"
            )
        for depth in range(1, len(entry.path) + 1):
            kind = type(entry.path[depth]) if depth < len(entry.path) else None
            found, origin = kinds.setdefault(entry.path[:depth], (kind, entry.origin))
            if found is not kind:
                raise ConfigError(
                    f"without {prefix!r}, {origin!r} and {entry.origin!r} do not go into one state: "
                    f"leave one out ({_exclude(entry.origin)})"
                )
    if tree is not None:
        tree = _strip_tree(tree, prefix, {entry.origin: entry.fqn for entry in stripped})
    return stripped, tree


def _without(entry: TensorSource | ObjectSource, prefix: str) -> TensorSource | ObjectSource:
    fqn, path = entry.fqn.removeprefix(prefix), entry.path
    if not fqn:
        raise ConfigError(f"without {prefix!r}, nothing would be left of the name {entry.fqn!r}")
    if ".".join(map(str, path)) == entry.fqn:
        num_keys, rest = _cut(path, prefix)
        path = (str(path[num_keys]).removeprefix(rest), *path[num_keys + 1 :])
    else:
        path = (fqn,)
    own = copy.copy(entry)
    own.fqn, own.path = fqn, path
    return own


def _cut(keys: Sequence[Any], prefix: str) -> tuple[int, str]:
    """Return how many keys a prefix of their name takes as a whole, and what it takes of the next one."""
    num_keys = 0
    while num_keys < len(keys) - 1 and prefix.startswith(f"{keys[num_keys]}."):
        prefix = prefix.removeprefix(f"{keys[num_keys]}.")
        num_keys += 1
    return num_keys, prefix


def _strip_tree(tree: Mapping[Any, Any], prefix: str, names: Mapping[str, str]) -> Mapping[Any, Any]:
    """Return a tree of the new names of entries, by their old ones; of what has none, nothing is in it.

    Raises:
        ConfigError: Two entries would have one key.
    """
    ways: list[tuple[str, list[tuple[Any, Any]]]] = []
    for name, way in _leaves(tree):
        if name not in names:
            continue
        if name.startswith(prefix):
            num_keys, rest = _cut([key for _, key in way], prefix)
            way = way[num_keys:]
            container, key = way[0]
            # A state is a dict; and what a container has beside its keys is about these.
            if rest or isinstance(container, list):
                way[0] = ({}, str(key).removeprefix(rest))
        ways.append((names[name], way))
    [root, *others] = {id(way[0][0]): way[0][0] for _, way in ways}.values()
    stripped = {} if others else _emptied(root)
    for name, way in ways:
        at = stripped
        for (_, key), (container, _) in itertools.pairwise(way):
            at = _put(at, key, [] if isinstance(container, list) else _emptied(container))
        other = _put(at, way[-1][1], name)
        if other is not name:
            # Keys that are equal, with other names: 1 and True.
            raise ConfigError(f"without {prefix!r}, {other!r} and {name!r} would have one key")
    return stripped


def _leaves(tree: Any) -> Iterator[tuple[str, list[tuple[Any, Any]]]]:
    """Yield the names in a tree, each with the containers and keys that lead to it."""
    for key, each in enumerate(tree) if isinstance(tree, list) else tree.items():
        if isinstance(each, str):
            yield each, [(tree, key)]
        else:
            for name, way in _leaves(each):
                yield name, [(tree, key), *way]


def _put(container: Any, key: Any, value: Any) -> Any:
    """Return what a container has at a key, which is `value` if there was nothing."""
    if not isinstance(container, list):
        return container.setdefault(key, value)
    container.extend([None] * (key + 1 - len(container)))
    if container[key] is None:
        container[key] = value
    return container[key]


def _why(error: Exception) -> str:
    """Return what a foreign error says, in a line and without whom to tell."""
    first = str(error).partition("\n")[0].partition(", file an issue")[0]
    return first or type(error).__name__


class _Cast(TensorSource):
    def __init__(self, source: TensorSource, dtype: torch.dtype) -> None:
        super().__init__(source.fqn, source.path, dtype, source.shape, requires_grad=source.requires_grad)
        self._source = source

    def read_into(self, low: int, high: int, target: memoryview) -> None:
        own, other = self.dtype.itemsize, self._source.dtype.itemsize
        step = _PIECE_BYTES // max(own, other)
        first, stop = low // own, -(-high // own)
        for start in range(first, stop, step):
            end = min(start + step, stop)
            data = bytearray((end - start) * other)
            self._source.read_into(start * other, end * other, memoryview(data))
            cast = torch.frombuffer(data, dtype=self._source.dtype).to(self.dtype).view(torch.uint8).numpy()
            begin, until = max(low, start * own), min(high, end * own)
            np.frombuffer(target, np.uint8)[begin - low : until - low] = cast[
                begin - start * own : until - start * own
            ]


def cast(source: TensorSource, dtype: torch.dtype) -> TensorSource:
    """Return `source` with elements of `dtype`, if they are floating-point numbers; else as it is.

    Raises:
        ConfigError: torch does not make the one of the other.
    """
    if source.dtype == dtype or not source.dtype.is_floating_point:
        return source
    try:
        torch.empty(1, dtype=source.dtype).to(dtype)
    except RuntimeError as error:
        raise ConfigError(
            f"{source.fqn!r} is of {source.dtype}, of which torch makes no {dtype}: "
            f"leave it out ({_exclude(source.fqn)}), or convert without another dtype"
        ) from error
    return _Cast(source, dtype)


# Chunks in files.


class _Reader:
    """Reads files of one checkpoint, on any thread."""

    def __init__(self, storage: Storage, timeout_s: float | None) -> None:
        self.storage = storage
        self._timeout_s = timeout_s
        self._local = threading.local()
        self._loaded: OrderedDict[_Chunk, memoryview] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, chunk: _Chunk, load: Callable[[], memoryview]) -> memoryview:
        """Return the elements of a chunk that has to be loaded as a whole; the last few stay in memory."""
        with self._lock:
            data = self._loaded.pop(chunk, None)
            if data is None:
                data = load()
            self._loaded[chunk] = data
            while len(self._loaded) > 1 and sum(each.nbytes for each in self._loaded.values()) > _KEPT_BYTES:
                self._loaded.popitem(last=False)
            return data

    def __call__(self, file: str, start: int, nbytes: int) -> memoryview:
        """Return bytes of a file.

        Raises:
            IntegrityError: There are fewer.
            WriteError: The storage refuses.
        """
        storage = self.storage
        if storage.spec:
            storage = getattr(self._local, "storage", None) or reopen_storage(
                self.storage.spec, timeout_s=self._timeout_s
            )
            self._local.storage = storage
        data = storage.read(file, start, nbytes)
        if data is None or len(data) != nbytes:
            found = "is missing" if data is None else f"ends {nbytes - len(data)} bytes early"
            raise IntegrityError(f"{self.storage.url}/{file} {found}", file=file)
        return memoryview(data)


class _Stretch(NamedTuple):
    """Bytes of a file that hold a chunk, and what they are compared with.

    Attributes:
        file: The file.
        offset: Where they begin.
        nbytes: How many there are.
    """

    file: str
    offset: int
    nbytes: int


class _Chunk:
    """A chunk of a tensor, its elements row by row in some stretch of a file.

    Args:
        read: Reads files.
        stretch: Where it is, with what stands around it.
        dtype: Of the elements.
        offsets: Of the chunk in the tensor.
        sizes: Of the chunk.
        integrity: The checksums of the commit.
        fqn: For messages.
        weights_only: As for torch.load.
    """

    def __init__(
        self,
        read: _Reader,
        stretch: _Stretch,
        dtype: torch.dtype,
        offsets: Sequence[int],
        sizes: Sequence[int],
        *,
        fqn: str,
        integrity: Integrity | None = None,
        weights_only: bool = True,
    ) -> None:
        self.offsets = tuple(offsets)
        self.sizes = tuple(sizes)
        self._read = read
        self._stretch = stretch
        self._dtype = dtype
        self._integrity = integrity
        self._fqn = fqn
        self._weights_only = weights_only
        self._nbytes = math.prod(sizes) * dtype.itemsize
        is_raw = format_of(stretch.file).name != "torch_dist"
        self._payload: int | None = 0 if is_raw else None
        """Where the elements begin in the stretch; None until it is known, negative if they do not lie so."""
        self._lock = threading.Lock()

    def read(self, low: int, high: int) -> memoryview:
        """Return bytes [low, high) of the elements."""
        with self._lock:
            if self._payload is None:
                self._payload = self._find_payload()
        if self._payload < 0:
            return self._read.keep(self, self._load)[low:high]
        return self._read_item(self._payload + low, self._payload + high)

    def _read_item(self, low: int, high: int) -> memoryview:
        """Return bytes of the stretch, compared with the commit, if it has checksums of them."""
        file, offset, _ = self._stretch
        if self._integrity is None:
            return self._read(file, offset + low, high - low)
        first, stop = self._integrity.widen(file, offset, low, high)
        data = self._read(file, offset + first, stop - first)
        self._integrity.check_part(file, offset, first, data, self._fqn)
        return data[low - first : high - first]

    def _find_payload(self) -> int:
        if self._dtype in _QUANTIZED:
            return -1
        frame = open_format("torch_dist").frame(self._dtype, self.sizes, contiguous_strides(self.sizes))
        if len(frame.prefix) + self._nbytes + len(frame.suffix) == self._stretch.nbytes:
            head = self._read(self._stretch.file, self._stretch.offset, len(frame.prefix))
            if bytes(head) == frame.prefix:
                return len(frame.prefix)
        try:
            found = _payload_in_archive(_RangeFile(self._read, self._stretch), self._dtype, self.sizes)
        except (zipfile.BadZipFile, pickle.UnpicklingError, ValueError, LookupError, EOFError):
            return -1
        return -1 if found is None or found + self._nbytes > self._stretch.nbytes else found

    def _load(self) -> memoryview:
        data = self._read_item(0, self._stretch.nbytes)
        try:
            loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=self._weights_only)
        except Exception as error:
            raise IntegrityError(
                f"{self._read.storage.url}/{self._stretch.file}: {self._fqn!r} cannot be loaded: "
                f"{type(error).__name__}: {error}",
                file=self._stretch.file,
                item=self._fqn,
            ) from error
        if not isinstance(loaded, torch.Tensor) or (loaded.dtype, tuple(loaded.shape)) != (
            self._dtype,
            self.sizes,
        ):
            raise IntegrityError(
                f"{self._read.storage.url}/{self._stretch.file}: {self._fqn!r} is not what the metadata says",
                file=self._stretch.file,
                item=self._fqn,
            )
        if not _is_plain(loaded):
            raise CheckpointError(
                f"{self._fqn!r} is a {type(loaded).__name__} of {loaded.dtype}, {loaded.layout}, on "
                f"{loaded.device}: it cannot be converted; leave it out ({_exclude(self._fqn)})"
            )
        return memoryview(_bytes_of(loaded).data)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is its elements, one stretch after the other, and nothing beside."""
    return (
        tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)
        # What has a dispatch of its own wraps others.
        and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


def _bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the elements of a plain tensor, row by row; a copy only if they do not lie so."""
    rows = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A single element is contiguous with any stride, with which it cannot be viewed as bytes.
    return rows.as_strided((rows.numel(),), (1,)).view(torch.uint8).numpy()


class _RangeFile(io.RawIOBase):
    """A stretch of a file, as a file of its own."""

    def __init__(self, read: _Reader, stretch: _Stretch) -> None:
        self._read = read
        self._stretch = stretch
        self._position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._stretch.nbytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int = -1, /) -> bytes:
        left = max(0, self._stretch.nbytes - self._position)
        size = left if size < 0 else min(size, left)
        if size == 0:
            return b""
        data = bytes(self._read(self._stretch.file, self._stretch.offset + self._position, size))
        self._position += size
        return data


class _Layout(pickle.Unpickler):
    """Reads how a tensor lies in its storage, out of data.pkl of torch.save, and runs nothing of it."""

    def persistent_load(self, pid: Any) -> Any:
        return pid

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        return lambda *arguments: (f"{module}.{name}", *arguments)


def _payload_in_archive(file: _RangeFile, dtype: torch.dtype, sizes: tuple[int, ...]) -> int | None:
    """Return where the elements begin in an archive of torch.save; None if they do not lie row by row."""
    with zipfile.ZipFile(file) as archive:
        root = archive.namelist()[0].partition("/")[0]
        with archive.open(f"{root}/byteorder") as record:
            if record.read() != b"little":
                return None
        with archive.open(f"{root}/data.pkl") as record:
            rebuilt = _Layout(record).load()
        if isinstance(rebuilt, tuple) and rebuilt[0] == "torch._utils._rebuild_parameter":
            rebuilt = rebuilt[1]
        if not isinstance(rebuilt, tuple) or rebuilt[0] != "torch._utils._rebuild_tensor_v2":
            return None
        _, storage, first, shape, strides = rebuilt[:5]
        [kind] = storage[1]()
        if getattr(getattr(torch, kind.rpartition(".")[2], None), "_dtype", None) is not dtype:
            return None
        # A seventh says that it is conjugated or negated.
        is_plain = len(rebuilt) < 8 or not rebuilt[7]
        if not is_plain or tuple(shape) != sizes or tuple(strides) != contiguous_strides(sizes):
            return None
        record_info = archive.getinfo(f"{root}/data/{storage[2]}")
        if record_info.compress_type != zipfile.ZIP_STORED:
            return None
        file.seek(record_info.header_offset)
        header = file.read(_LOCAL_HEADER_BYTES)
        names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        return int(record_info.header_offset + _LOCAL_HEADER_BYTES + names + first * dtype.itemsize)


class _Chunked(TensorSource):
    """A tensor in chunks that lie in files."""

    def __init__(self, *args: Any, chunks: Sequence[_Chunk], requires_grad: bool = False) -> None:
        super().__init__(*args, requires_grad=requires_grad)
        wrong = misfit(self.shape, [(chunk.offsets, chunk.sizes) for chunk in chunks])
        if wrong is not None:
            raise IntegrityError(f"{self.fqn!r} is not complete: {wrong}", item=self.fqn)
        strides = contiguous_strides(self.shape)
        self._strides = strides
        self._chunks = []
        for chunk in chunks:
            if 0 in chunk.sizes:
                continue
            first = sum(at * step for at, step in zip(chunk.offsets, strides, strict=True))
            last = sum(
                (at + size - 1) * step
                for at, size, step in zip(chunk.offsets, chunk.sizes, strides, strict=True)
            )
            self._chunks.append((first * self.dtype.itemsize, (last + 1) * self.dtype.itemsize, chunk))
        self._chunks.sort(key=lambda each: each[:2])

    def read_into(self, low: int, high: int, target: memoryview) -> None:
        out = np.frombuffer(target, np.uint8)
        for first, stop, chunk in self._chunks:
            if first >= high:
                break
            if stop > low:
                self._copy(chunk, low, high, out)

    def _copy(self, chunk: _Chunk, low: int, high: int, out: np.ndarray[Any, Any]) -> None:
        """Copy what [low, high) of the tensor has of a chunk: runs that lie in one stretch of both."""
        itemsize = self.dtype.itemsize
        sizes, inner = chunk.sizes, len(chunk.sizes)
        while inner > 0 and (inner == len(sizes) or sizes[inner] == self.shape[inner]):
            inner -= 1
        run = math.prod(sizes[inner:]) * itemsize
        base = sum(at * step for at, step in zip(chunk.offsets, self._strides, strict=True)) * itemsize
        # The last of the outer dimensions: runs at equal distances, copied many at a time.
        count = sizes[inner - 1] if inner else 1
        pitch = self._strides[inner - 1] * itemsize if inner else run
        outer = itertools.product(*map(range, sizes[: max(0, inner - 1)]))
        for number, place in enumerate(outer):
            start = base + sum(at * self._strides[dim] for dim, at in enumerate(place)) * itemsize
            if start >= high:
                break
            first = max(0, (low - start - run) // pitch + 1)
            stop = min(count, -(-(high - start) // pitch))
            if first < stop:
                self._copy_runs(chunk, number * count, start, pitch, run, range(first, stop), low, high, out)

    @staticmethod
    def _copy_runs(
        chunk: _Chunk,
        runs_before: int,
        start: int,
        pitch: int,
        run: int,
        wanted: range,
        low: int,
        high: int,
        out: np.ndarray[Any, Any],
    ) -> None:
        """Copy runs of a chunk.

        Args:
            chunk: The chunk.
            runs_before: How many runs of the chunk lie before these.
            start: Where run 0 begins in the tensor, in bytes.
            pitch: From one run to the next, in the tensor.
            run: Bytes of a run.
            wanted: Which runs.
            low: First byte of the tensor that is wanted.
            high: Byte after the last.
            out: Where byte `low` of the tensor is the first.
        """
        at_once = max(1, _PIECE_BYTES // run)
        for first in range(wanted.start, wanted.stop, at_once):
            stop = min(first + at_once, wanted.stop)
            # Of the first and the last run perhaps a part.
            begin = max(0, low - (start + first * pitch)) if stop - first == 1 else 0
            end = min(run, high - (start + first * pitch)) if stop - first == 1 else run
            for piece in range(begin, end, _PIECE_BYTES) if stop - first == 1 else (0,):
                until = min(piece + _PIECE_BYTES, end) if stop - first == 1 else run
                at = (runs_before + first) * run
                data = np.frombuffer(chunk.read(at + piece, (runs_before + stop - 1) * run + until), np.uint8)
                if stop - first == 1:
                    to = start + first * pitch + piece - low
                    out[to : to + len(data)] = data
                    continue
                for number, own in enumerate(data.reshape(stop - first, run), first):
                    to = start + number * pitch - low
                    head, tail = max(0, -to), min(run, len(out) - to)
                    out[to + head : to + tail] = own[head:tail]


def _dcp(read: _Reader, data: bytes, *, weights_only: bool) -> Iterator[TensorSource | ObjectSource]:
    url = read.storage.url
    integrity = load_integrity(read.storage, data)
    metadata = unpickle_metadata(data, f"{url}/{METADATA}", weights_only=weights_only)
    chunks_of: dict[str, list[tuple[Any, Any]]] = {}
    for index, info in (metadata.storage_data or {}).items():
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{url}: {index.fqn!r} was written through extensions")
        chunks_of.setdefault(index.fqn, []).append((index, info))
    for fqn, entry in metadata.state_dict_metadata.items():
        path = tuple((metadata.planner_data or {}).get(fqn, (fqn,)))
        if not isinstance(entry, TensorStorageMetadata):
            if len(chunks_of.get(fqn, ())) != 1:
                raise IntegrityError(f"{url}: the metadata does not say where {fqn!r} lies", item=fqn)
            [(_, info)] = chunks_of[fqn]
            stretch = _Stretch(info.relative_path, info.offset, info.length)
            yield ObjectSource(fqn, path, _object_reader(read, stretch, integrity, fqn))
            continue
        sizes = {
            tuple(chunk.offsets): tuple(chunk.sizes)
            for chunk in reversed(entry.chunks)
            if 0 not in chunk.sizes
        }
        chunks = [
            _Chunk(
                read,
                _Stretch(info.relative_path, info.offset, info.length),
                entry.properties.dtype,
                tuple(index.offset),
                sizes[tuple(index.offset)],
                fqn=fqn,
                integrity=integrity,
                weights_only=weights_only,
            )
            for index, info in chunks_of.get(fqn, [])
            if tuple(index.offset) in sizes
        ]
        yield _Chunked(
            fqn,
            path,
            entry.properties.dtype,
            entry.size,
            chunks=chunks,
            requires_grad=entry.properties.requires_grad,
        )


def _object_reader(
    read: _Reader, stretch: _Stretch, integrity: Integrity | None, fqn: str
) -> Callable[[], bytes]:
    def load() -> bytes:
        data = read(*stretch)
        if integrity is not None:
            integrity.check(stretch.file, stretch.offset, data, fqn)
        return bytes(data)

    return load


def _indexed(read: _Reader, files: Sequence[str], present: Mapping[str, int]) -> list[TensorSource]:
    """Return the tensors of the files that the index names, if there is one; else of all.

    Raises:
        IntegrityError: A file or a tensor that it names is not there; `file` is filled.
    """
    indices = [name for name in present if name.endswith(_INDEX)]
    index = _MAIN_INDEX if _MAIN_INDEX in indices else indices[0] if len(indices) == 1 else None
    if index is None:
        return list(_safetensors(read, files))
    where = f"{read.storage.url}/{index}"
    try:
        weights = dict(json.loads(bytes(read(index, 0, present[index])))["weight_map"])
        named = sorted(set(weights.values()))
    except (ValueError, LookupError, TypeError) as error:
        raise IntegrityError(f"{where} is no index: {error}", file=index) from error
    for name in named:
        if name not in present:
            raise IntegrityError(f"{where} names {name}, which is missing", file=name)
    found = list(_safetensors(read, named))
    missing = weights.keys() - {source.fqn for source in found}
    if missing:
        raise IntegrityError(f"{where} names {min(missing)!r}, which no file holds", file=index)
    return found


def _safetensors(read: _Reader, files: Sequence[str]) -> Iterator[TensorSource]:
    chunks_of: dict[str, list[_Chunk]] = {}
    kinds: dict[str, torch.dtype] = {}
    dtypes = safetensors_dtypes()
    for file in files:
        url = f"{read.storage.url}/{file}"
        nbytes = int.from_bytes(read(file, 0, 8), "little")
        if nbytes > _MOST_HEADER_BYTES:
            raise IntegrityError(f"{url} is no file of safetensors: a header of {nbytes} bytes", file=file)
        spans: list[tuple[int, int]] = []
        try:
            header = json.loads(bytes(read(file, 8, nbytes)))
            sharding = json.loads((header.pop("__metadata__", None) or {}).get("DCP_SHARDING_INFO", "{}"))
            for fqn, told in header.items():
                dtype = dtypes.get(told["dtype"])
                if dtype is None:
                    raise CheckpointError(f"{url}: {fqn!r} is of {told['dtype']}, which torch has not")
                low, high = map(int, told["data_offsets"])
                shape = tuple(map(int, told["shape"]))
                if not 0 <= low <= high or high - low != math.prod(shape) * dtype.itemsize:
                    raise ValueError(f"{fqn!r} of {shape} lies at {low} to {high}")
                offsets = tuple(sharding.get(fqn, {}).get("saved_offsets", (0,) * len(shape)))
                if kinds.setdefault(fqn, dtype) != dtype:
                    raise ValueError(f"{fqn!r} has two dtypes")
                spans.append((low, high))
                stretch = _Stretch(file, 8 + nbytes + low, high - low)
                chunks_of.setdefault(fqn, []).append(_Chunk(read, stretch, dtype, offsets, shape, fqn=fqn))
            spans.sort()
            if any(low < end for (_, end), (low, _) in itertools.pairwise(spans)):
                raise ValueError("tensors overlap")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise IntegrityError(f"{url} is damaged: {error}", file=file) from error
        end = max((high for _, high in spans), default=0)
        if end:
            # That the file reaches so far.
            read(file, 8 + nbytes + end - 1, 1)
    for fqn, chunks in chunks_of.items():
        ends = [[at + size for at, size in zip(chunk.offsets, chunk.sizes, strict=True)] for chunk in chunks]
        yield _Chunked(
            fqn, (fqn,), kinds[fqn], tuple(map(max, *ends)) if len(ends) > 1 else ends[0], chunks=chunks
        )


# Whatever else reads itself.


class _Rows(TensorSource):
    """A tensor of which some rows can be had as an array.

    Args:
        *args: As for `TensorSource`.
        rows: Returns the bytes of some rows.
        num_rows: How many these are in all.
        requires_grad: As for `TensorSource`.
    """

    def __init__(
        self,
        *args: Any,
        rows: Callable[[int, int], np.ndarray[Any, Any]],
        num_rows: int,
        requires_grad: bool = False,
    ) -> None:
        super().__init__(*args, requires_grad=requires_grad)
        self._rows = rows
        self._num_rows = num_rows

    def read_into(self, low: int, high: int, target: memoryview) -> None:
        out = np.frombuffer(target, np.uint8)
        if low == high:
            return
        row = self.nbytes // self._num_rows
        at_once = max(1, _PIECE_BYTES // row)
        for first in range(low // row, -(-high // row), at_once):
            stop = min(first + at_once, -(-high // row))
            data = self._rows(first, stop)
            begin, end = max(low, first * row), min(high, stop * row)
            out[begin - low : end - low] = data[begin - first * row : end - first * row]


def _zarr(storage: Storage) -> Iterator[TensorSource]:
    try:
        import tensorstore
    except ImportError as error:
        raise ConfigError(
            f"{storage.url} is a store of zarr, read through tensorstore: pip install 'distckpt[zarr]'"
        ) from error
    root = getattr(storage, "root", None)
    if root is None:
        raise ConfigError(
            f"{storage.url}: a store of zarr by another tool is read from a local directory only"
        )
    for folder, _, files in sorted(os.walk(root)):
        if _ZARR not in files:
            continue
        with open(os.path.join(folder, _ZARR), "rb") as file:
            document = json.loads(file.read())
        if document.get("node_type") != "array":
            continue
        name = os.path.relpath(folder, root)
        dtype = getattr(torch, str(document.get("data_type")), None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{folder} is of {document.get('data_type')}, which torch has not")
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": folder + "/"}}
        array = tensorstore.open(spec, read=True).result()
        path = tuple(map(_key, name.split("/"))) if name != "." else ("array",)
        # One row of one row of many is many rows.
        shape, rows = array.shape, array
        while rows.ndim > 1 and rows.shape[0] == 1:
            rows = rows[0]
        yield _Rows(".".join(path), path, dtype, shape, rows=_rows_of(rows), num_rows=_first(rows.shape))


def _key(name: str) -> str:
    """Return the key whose name for zarr this is; see `formats.zarr.array_path`."""
    return "" if name == "%" else unquote(name, errors="surrogatepass")


def _first(shape: Sequence[int]) -> int:
    return shape[0] if len(shape) else 1


def _rows_of(array: Any) -> Callable[[int, int], np.ndarray[Any, Any]]:
    def rows(first: int, stop: int) -> np.ndarray[Any, Any]:
        part = array[first:stop] if array.ndim else array
        return np.ascontiguousarray(part.read().result()).reshape(-1).view(np.uint8)

    return rows


def _torch_file(path: str, *, weights_only: bool) -> Source:
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    except Exception as error:
        raise CheckpointError(
            f"{path} is no checkpoint that torch.load(mmap=True) takes: {_why(error)}"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not the dict of a state")
    entries: list[TensorSource | ObjectSource] = []
    return Source(path, entries, _named(state, (), entries))


def _named(value: Any, path: Path, entries: list[TensorSource | ObjectSource]) -> Any:
    """Return containers with the names of what they hold, which is added to `entries`.

    They are taken apart as torch's flatten_state_dict does it, so that names are those that a save gives; it
    does not tell what the keys were before they became text.
    """
    if isinstance(value, Mapping) and (value or not path):
        named = _emptied(value)
        for key, each in value.items():
            named[key] = _named(each, (*path, str(key)), entries)
        return named
    if isinstance(value, list) and _is_taken_apart(value):
        return [_named(each, (*path, place), entries) for place, each in enumerate(value)]
    entries.append(_entry_of(value, path))
    return entries[-1].fqn


def _is_taken_apart(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(each, torch.Tensor) or _is_taken_apart(each) for each in value)
    return isinstance(value, Mapping)


def _emptied(value: Mapping[Any, Any]) -> Any:
    """Return a dict of the same kind: that of a module has versions beside its keys."""
    if type(value) is not OrderedDict:
        return {}
    emptied = copy.copy(value)
    emptied.clear()
    return emptied


def _entry_of(value: Any, path: Path) -> TensorSource | ObjectSource:
    fqn = ".".join(map(str, path))
    if isinstance(value, Mapping):
        return EmptySource(fqn, path, _saved(_emptied(value)))
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return ObjectSource(fqn, path, _refusal(f"{fqn!r} is a meta tensor, which has no elements", fqn))
        if isinstance(value, DTensor):
            return ObjectSource(fqn, path, _refusal(f"{fqn!r} is what one rank had of a DTensor", fqn))
        if _is_plain(value):
            return _rows_entry(fqn, path, value)
    return ObjectSource(fqn, path, _saved(value))


def _refusal(why: str, fqn: str) -> Callable[[], bytes]:
    """Return what refuses an entry as soon as it is read: who leaves it out never hears of it."""

    def refuse() -> bytes:
        raise CheckpointError(f"{why}: leave it out ({_exclude(fqn)})")

    return refuse


def _rows_entry(fqn: str, path: Path, value: torch.Tensor) -> _Rows:
    rows = value.detach()
    rows = rows.view(-1) if rows.is_contiguous() else rows
    while rows.dim() > 1 and rows.shape[0] == 1:
        rows = rows[0]
    return _Rows(
        fqn,
        path,
        value.dtype,
        value.shape,
        rows=_rows_in(rows),
        num_rows=_first(rows.shape),
        requires_grad=value.requires_grad,
    )


def _rows_in(tensor: torch.Tensor) -> Callable[[int, int], np.ndarray[Any, Any]]:
    """Return what reads rows of a tensor, as `_rows_of`."""
    return lambda first, stop: _bytes_of(tensor[first:stop] if tensor.dim() else tensor)


def _saved(value: Any) -> Callable[[], bytes]:
    def save() -> bytes:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer.getvalue()

    return save


# One file of torch.save.


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


class _Gaps(io.RawIOBase):
    """Writes what torch.save writes, but the bytes of storages, and notes where these belong.

    Args:
        write: Given what is to be written, and where to.
    """

    def __init__(self, write: Callable[[memoryview, int], None]) -> None:
        self._write = write
        self._position = self._end = 0
        self.gaps: list[tuple[int, int]] = []

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        target = offset if whence == io.SEEK_SET else self._position + offset
        if target > self._position:
            self.gaps.append((self._position, target))
        self._position = target
        return target

    def write(self, data: Any, /) -> int:
        view = memoryview(data)
        self._write(view, self._position)
        self._position += view.nbytes
        return view.nbytes


def write_torch_file(
    path: str | os.PathLike[str],
    entries: Sequence[TensorSource | ObjectSource],
    *,
    tree: Mapping[Any, Any] | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
    weights_only: bool = True,
) -> str:
    """Write all of a state as one file of torch.save, without having it in memory.

    Args:
        path: A local file that does not exist.
        entries: What it holds.
        tree: `Source.tree`, whose containers and keys it gets; without, they follow the paths of the entries.
        tell: Told bytes done and in all.
        weights_only: Whether to refuse Python objects whose loading can run code.

    Returns:
        Its absolute path.

    Raises:
        CheckpointError: An object cannot be loaded, or not be written in this way.
        ConfigError: It is no local path.
        WriteError: There is something, or the file system refuses.
    """
    local = _local(path)
    if local is None:
        raise ConfigError(f"{path}: one file of torch.save is written to a local path only")
    text = os.path.abspath(local)
    if os.path.lexists(text):
        raise WriteError(f"not written: there is something at {text}", path=text)
    partial = f"{text}.{os.getpid()}.tmp"
    try:
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            _fill(fd, entries, tree, tell, weights_only=weights_only)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(partial, text)
        folder = os.open(os.path.dirname(text), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise WriteError(f"cannot write {text}: {error}", errno=error.errno, path=text) from error
    finally:
        if os.path.lexists(partial):
            os.unlink(partial)
    return text


class _InMemory(TensorSource):
    """The bytes of a storage that is in memory."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        super().__init__("", (), torch.uint8, (storage.nbytes(),))
        self._bytes = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()

    def read_into(self, low: int, high: int, target: memoryview) -> None:
        np.frombuffer(target, np.uint8)[:] = self._bytes[low:high]


def _recording(seen: list[torch.UntypedStorage]) -> Any:
    """Return what torch.save takes for a pickle module, which notes storages in the order of the file."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, torch.Tensor) and _is_plain(value):
                storage = value.untyped_storage()
                if storage.nbytes():
                    seen.append(storage)
            return NotImplemented

    module = types.ModuleType("pickle")
    module.__dict__.update(vars(pickle), Pickler=Pickler)
    return module


def _save_around(
    value: Any, write: Callable[[memoryview, int], None]
) -> list[tuple[int, torch.UntypedStorage]]:
    """Write what torch.save writes of `value`, but the bytes of storages.

    Returns:
        Where these belong.

    Raises:
        CheckpointError: That cannot be told.
    """
    sink, seen = _Gaps(write), list[torch.UntypedStorage]()
    with skip_data():
        torch.save(value, sink, pickle_module=_recording(seen))  # type: ignore[arg-type]
    # Each once, as it was first seen: so torch.save writes them.
    storages = list({storage._cdata: storage for storage in seen}.values())  # noqa: SLF001
    if [stop - start for start, stop in sink.gaps] != [storage.nbytes() for storage in storages]:
        raise CheckpointError("torch.save has written other storages than it was seen to pickle")
    return [(start, storage) for (start, _), storage in zip(sink.gaps, storages, strict=True)]


def _loaded(entry: ObjectSource, *, weights_only: bool) -> Any:
    """Return a Python object that torch.save can write around the bytes of its tensors.

    Raises:
        CheckpointError: It is none, or loading it could run code.
    """
    data = entry.read()
    try:
        value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{entry.origin!r} is more than tensors and plain values, and loading it can run code: "
            f"leave it out, or say weights_only=False for a checkpoint that you trust"
        ) from error
    except Exception as error:
        raise CheckpointError(
            f"{entry.origin!r} cannot be loaded ({_why(error)}): leave it out ({_exclude(entry.origin)})"
        ) from error
    try:
        _save_around(value, lambda data, offset: None)
    except Exception as error:
        raise CheckpointError(
            f"{entry.origin!r} is a {type(value).__name__} that torch.save cannot write around its data "
            f"({_why(error)}): leave it out ({_exclude(entry.origin)}), or convert to torch_dist"
        ) from error
    return value


_NOTHING = object()


def _filled(tree: Any, values: Mapping[str, Any]) -> Any:
    """Return a tree with values for names; what holds none of them is left out, or `_NOTHING`."""
    if tree is None:
        # A place of a list that `strip` has left empty.
        return _NOTHING
    if isinstance(tree, str):
        return values.get(tree, _NOTHING)
    if isinstance(tree, list):
        items = [_filled(each, values) for each in tree]
        while items and items[-1] is _NOTHING:
            items.pop()
        # So that the others keep their places.
        return [None if each is _NOTHING else each for each in items] or _NOTHING
    filled = _emptied(tree)
    for key, each in tree.items():
        value = _filled(each, values)
        if value is not _NOTHING:
            filled[key] = value
    return filled or _NOTHING


def _number_parameters(value: Any) -> None:
    """Have states of optimizers below numbers again, not below text.

    Metadata has all keys as text. Which were numbers is told by the optimizer's groups, whose lists of
    parameters are objects; it would find no state below text, and say nothing.
    """
    if isinstance(value, list):
        for each in value:
            _number_parameters(each)
    if not isinstance(value, dict):
        return
    groups, states = value.get("param_groups"), value.get("state")
    if isinstance(groups, list) and isinstance(states, dict):
        listed = [group.get("params") for group in groups if isinstance(group, dict)]
        numbers = {
            str(number): number
            for numbers in listed
            if isinstance(numbers, list)
            for number in numbers
            if type(number) is int
        }
        value["state"] = {numbers.get(key, key): state for key, state in states.items()}
    for each in value.values():
        _number_parameters(each)


def _fill(
    fd: int,
    entries: Sequence[TensorSource | ObjectSource],
    tree: Mapping[Any, Any] | None,
    tell: Callable[[int, int], None],
    *,
    weights_only: bool,
) -> None:
    values: dict[str, Any] = {}
    sources: dict[int, TensorSource] = {}
    for entry in entries:
        if isinstance(entry, ObjectSource):
            values[entry.fqn] = _loaded(entry, weights_only=weights_only)
            continue
        # Never touched: address space only.
        storage = torch.UntypedStorage(entry.nbytes, device="cpu")  # type: ignore[no-untyped-call]
        sources[storage._cdata] = entry  # noqa: SLF001
        empty = torch.empty(0, dtype=entry.dtype)
        tensor = empty.set_(storage, 0, entry.shape, contiguous_strides(entry.shape))
        values[entry.fqn] = tensor.requires_grad_(entry.requires_grad)
    if tree is not None:
        state = _filled(tree, values)
    else:
        state = unflatten_state_dict(values, {entry.fqn: tuple(entry.path) for entry in entries})
        _number_parameters(state)
    gaps = _save_around(state, lambda data, offset: _write_all(fd, data, offset))
    total = sum(storage.nbytes() for _, storage in gaps)
    done = 0
    for start, storage in gaps:
        source = sources.get(storage._cdata) or _InMemory(storage)  # noqa: SLF001
        for low in range(0, storage.nbytes(), _PIECE_BYTES):
            high = min(low + _PIECE_BYTES, storage.nbytes())
            data = bytearray(high - low)
            source.read_into(low, high, memoryview(data))
            _write_all(fd, memoryview(data), start + low)
            done += high - low
            tell(done, total)
