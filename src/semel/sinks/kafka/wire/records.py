"""Rows as Kafka stores them: record batches, made from whole Arrow columns without a Python call per row.

Kafka's format (version 2, "Record Batch" in its protocol guide) keeps most numbers of a record as zigzag varints, so
records have no fixed layout. They are put together column by column: Arrow joins the pieces of all rows at once.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from semel.checksum import crc32c

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

#: Kafka's name of a codec -> its attribute bits. The names are Arrow's, too; snappy may come without frames.
CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
#: Kafka's LZ4 is the frame format, with blocks that do not refer to each other (KafkaLZ4BlockInputStream). liblz4, and
#: so Arrow, links the blocks of more than 64 KB. So frames are made here, as a Java producer makes them: magic, flags
#: for independent blocks, blocks of up to 64 KB, checksum of that; then each block with its size; then a zero.
_LZ4_HEAD, _LZ4_END = bytes.fromhex("04224d18 60 40 82"), bytes(4)
_LZ4_BLOCK_BYTES, _LZ4_STORED = 64 * 1024, 1 << 31
TRANSACTIONAL = 0x10
MAGIC = 2
NO_LEADER_EPOCH = -1
#: A batch's header in two parts: before the checksum, and what the checksum covers with the records.
_HEAD, _REST = struct.Struct(">qiibI"), struct.Struct(">hiqqqhii")
#: The length counts from after itself.
_COUNTED_OF_HEAD = 4 + 1 + 4
#: What a record and a batch take beside key and value, at most.
RECORD_BYTES, BATCH_BYTES = 32, _HEAD.size + _REST.size
_TABLE_SIZE = 1 << 14

#: Bytes that follow each other.
Pieces = Sequence[bytes | memoryview]

_MURMUR_SEED, _MURMUR_M = 0x9747B28C, 0x5BD1E995


def record_batch(
    pieces: Pieces,
    rows: int,
    *,
    producer_id: int,
    epoch: int,
    sequence: int,
    now_ms: int,
    transactional: bool,
    compression: str = "none",
) -> Pieces:
    """One batch of what `encode` made, in pieces that follow each other: nothing is copied unless it is compressed.

    The sequence number of its first row tells the broker which rows it has already.
    """
    records: Pieces = (memoryview(pieces[0])[1:], *pieces[1:], b"\0")
    body = records if compression == "none" else _compressed(b"".join(records), compression)
    bits = CODECS[compression] | (TRANSACTIONAL if transactional else 0)
    rest = _REST.pack(bits, rows - 1, now_ms, now_ms, producer_id, epoch, sequence, rows)
    counted = (rest, *body)
    checksum = functools.reduce(lambda sum_, piece: crc32c()(piece, sum_), counted, 0)
    head = _HEAD.pack(0, _COUNTED_OF_HEAD + sum(map(len, counted)), NO_LEADER_EPOCH, MAGIC, checksum)
    return head, *counted


def _compressed(records: bytes, compression: str) -> Pieces:
    import pyarrow as pa

    if compression != "lz4":
        return (pa.compress(records, codec=compression, asbytes=True),)
    found = [_LZ4_HEAD]
    for start in range(0, len(records), _LZ4_BLOCK_BYTES):
        plain = records[start : start + _LZ4_BLOCK_BYTES]
        small = pa.compress(plain, codec="lz4_raw", asbytes=True)
        # A block that compression does not make smaller is stored as it is, and its size says so.
        stored = len(small) >= len(plain)
        size, block = (len(plain) | _LZ4_STORED, plain) if stored else (len(small), small)
        found += [size.to_bytes(4, "little"), block]
    return (*found, _LZ4_END)


def encode(key: pa.Array | None, value: pa.Array, places: np.ndarray[Any, Any]) -> pa.Array:
    """A record for each row, at its place in the batch that it will travel in: no headers, the batch's time.

    The last byte of every record is 0, for no headers. It is taken for the first byte of the next one, so that there is
    less to join: the records of a batch begin after the first byte, and end with a 0 that is not in here.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    keys, key_sizes = _filled(key if key is not None else pa.nulls(len(value), pa.binary()))
    values, value_sizes = _filled(value)
    # Each record has: its size, 0 for attributes, +0 for the time, its place, the key, the value, 0 for no headers.
    place, key_size, value_size = varints(places), varints(key_sizes), varints(value_sizes)
    sizes: Any = 3 + sum(_sizes(array) for array in (place, key_size, keys, value_size, values))
    return pc.binary_join_element_wise(
        _framed(sizes), place, key_size, keys, value_size, values, pa.scalar(b"", pa.binary())
    )


def cut(records: pa.Array, ends: Iterable[int]) -> Iterator[memoryview]:
    """The bytes of the records up to each of the ends. Nothing is copied."""
    data, offsets = memoryview(records.buffers()[2]), _offsets(records)
    start = int(offsets[0])
    for end in offsets[list(ends)].tolist():
        yield data[start:end]
        start = end


def decode(pieces: Pieces) -> list[tuple[bytes | None, bytes | None]]:
    """The keys and values that `encode` was given, for the rare batch that must be made again: it goes row by row."""
    data, at, rows = b"".join(pieces), 0, []
    while at < len(data):
        _, at = _number(data, at + 1)
        _, at = _number(data, at + 2)
        key, at = _blob(data, at)
        value, at = _blob(data, at)
        rows.append((key, value))
    return rows


def _blob(data: bytes, at: int) -> tuple[bytes | None, int]:
    size, at = _number(data, at)
    return (None, at) if size < 0 else (data[at : at + size], at + size)


def _number(data: bytes, at: int) -> tuple[int, int]:
    """The varint that begins there, and where it ends."""
    found = shift = 0
    while data[at] > 0x7F:
        found |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    found |= data[at] << shift
    return (found >> 1) ^ -(found & 1), at + 1


def _framed(sizes: np.ndarray[Any, Any]) -> pa.Array:
    """The sizes of records with what stands around them: the end of the record before, attributes and time."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if sizes.max() < _TABLE_SIZE - 1:
        return _framed_table().take(pa.array(sizes))
    return pc.binary_join_element_wise(b"\0", _computed(sizes), b"\0\0", pa.scalar(b"", pa.binary()))


@functools.cache
def _framed_table() -> pa.Array:
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    sizes = _computed(np.arange(_TABLE_SIZE))
    return pc.binary_join_element_wise(b"\0", sizes, b"\0\0", pa.scalar(b"", pa.binary()))


def _filled(array: pa.Array) -> tuple[pa.Array, np.ndarray[Any, Any]]:
    """The bytes of each row, and how many; -1 is Kafka's null."""
    array = _binary(array)
    sizes = _sizes(array)
    if not array.null_count:
        return array, sizes
    absent = array.is_null().to_numpy(zero_copy_only=False)
    sizes = sizes.copy()
    sizes[absent] = -1
    return array.fill_null(b""), sizes


def _binary(array: pa.Array) -> pa.Array:
    import pyarrow as pa

    try:
        return array.cast(pa.binary())
    except pa.ArrowInvalid:  # it begins beyond the first 2 GB of a larger array; a copy does not
        return pa.concat_arrays([array]).cast(pa.binary())


def _offsets(array: pa.Array) -> np.ndarray[Any, Any]:
    """Where each row's bytes begin in Arrow's memory, and where the last ones end. Nothing is copied."""
    import numpy as np

    offsets: np.ndarray[Any, Any] = np.frombuffer(array.buffers()[1], np.int32)
    return offsets[array.offset : array.offset + len(array) + 1]


def _sizes(array: pa.Array | pa.Scalar) -> Any:
    import numpy as np
    import pyarrow as pa

    if isinstance(array, pa.Scalar):
        return len(array.as_py())
    sizes: np.ndarray[Any, Any] = np.diff(_offsets(array)).astype(np.int64)
    return sizes


# Varints ------------------------------------------------------------------------------------------------------------


def varints(numbers: np.ndarray[Any, Any]) -> pa.Array | pa.Scalar:
    """Zigzag varints: bytes for each number, or once where all are the same. Most come out of a table."""
    import pyarrow as pa

    least, most = int(numbers.min(initial=_TABLE_SIZE)), int(numbers.max(initial=-1))
    if least >= -1 and most < _TABLE_SIZE - 1:
        return _table()[least + 1] if least == most else _table().take(pa.array(numbers + 1))
    return _computed(numbers)


@functools.cache
def _table() -> pa.Array:
    import numpy as np

    return _computed(np.arange(-1, _TABLE_SIZE - 1))


def _computed(numbers: np.ndarray[Any, Any]) -> pa.Array:
    import numpy as np
    import pyarrow as pa

    signed = numbers.astype(np.int64)
    left = ((signed << 1) ^ (signed >> 63)).view(np.uint64)
    digits = np.zeros((len(left), 10), np.uint8)
    sizes = np.ones(len(left), np.int64)
    for place in range(10):
        digits[:, place] = left & np.uint64(0x7F)
        left = left >> np.uint64(7)
        more = left > 0
        digits[more, place] |= 0x80
        sizes += more
    used = np.arange(10) < sizes[:, None]
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    return pa.Array.from_buffers(
        pa.binary(), len(sizes), [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(digits[used]))]
    )


# Where rows go ------------------------------------------------------------------------------------------------------


def partitions_by_key(keys: pa.Array, partitions: int) -> np.ndarray[Any, Any]:
    """The partitions that a Java producer would choose: murmur2 of the key. Rows without a key get some number."""
    import numpy as np

    array = _binary(keys)
    offsets = _offsets(array)
    data: Any = np.frombuffer(array.buffers()[2] or b"", np.uint8)
    sizes = np.diff(offsets)
    if len(sizes) and sizes.min() == sizes.max():
        return _chosen(_murmur2(data[offsets[0] : offsets[-1]].reshape(len(sizes), sizes[0])), partitions)
    hashes = np.empty(len(array), np.uint32)
    for size in np.unique(sizes):
        same = np.nonzero(sizes == size)[0]
        hashes[same] = _murmur2(data[offsets[same][:, None] + np.arange(size)])
    return _chosen(hashes, partitions)


def _chosen(hashes: np.ndarray[Any, Any], partitions: int) -> np.ndarray[Any, Any]:
    import numpy as np

    return ((hashes & np.uint32(0x7FFFFFFF)) % np.uint32(partitions)).astype(np.int32)


def _murmur2(keys: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Keys of one size: a row of bytes each."""
    import numpy as np

    rows, size = keys.shape
    m, words = np.uint32(_MURMUR_M), size // 4
    found = np.full(rows, _MURMUR_SEED ^ size, np.uint32)
    read = np.ascontiguousarray(keys[:, : words * 4]).view("<u4") if words else keys
    for word in range(words):
        mixed = read[:, word] * m
        mixed = (mixed ^ (mixed >> np.uint32(24))) * m
        found = (found * m) ^ mixed
    tail = keys[:, words * 4 :].astype(np.uint32)
    for place in reversed(range(tail.shape[1])):
        found ^= tail[:, place] << np.uint32(8 * place)
    if tail.shape[1]:
        found *= m
    found = (found ^ (found >> np.uint32(13))) * m
    mixed_up: np.ndarray[Any, Any] = found ^ (found >> np.uint32(15))
    return mixed_up
