"""Bodies that their publishers have compressed."""

from __future__ import annotations

import zlib

import pyarrow as pa

# Zlib's own format and that of gzip, told by their first bytes.
_EITHER = 32 + zlib.MAX_WBITS
# A body of a megabyte may be a gigabyte of zeros.
_MOST = 16 << 20


def decompressed(bodies: pa.BinaryArray) -> pa.BinaryArray:
    """Decompress bodies.

    :param bodies: some of which may not be compressed
    :return: them decompressed, or as they are where they aren't whole streams of zlib, or larger than 16 MiB
    """
    return pa.array([_decompressed(body) for body in bodies.to_pylist()], pa.binary())


def _decompressed(body: bytes) -> bytes:
    stream = zlib.decompressobj(_EITHER)
    try:
        content = stream.decompress(body, _MOST)
    except zlib.error:
        return body
    return content if stream.eof and not stream.unused_data else body
