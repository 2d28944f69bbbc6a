"""Atheris over the GGUF reader: whatever the bytes, a header or a refusal, within the reader's bounds.

    python tests/fuzz/gguf.py CORPUS_DIRECTORY -max_total_time=600

The directory gets a few valid headers to start from and keeps what widened the coverage. Atheris is installed
for this run only. An input begins with one byte that says in which pieces the rest arrives, and whether its
size is known.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ficc.protocol", "ficc.domain"]):
    from ficc.domain.errors import Refused
    from ficc.protocol.gguf import Reader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support import gguf_files

PIECES_BYTES = (1, 7, 64, 1 << 20)


def read(data: bytes, piece: int, file_bytes: int | None) -> str:
    """The header in words, since one that holds a NaN equals no other; or the words of the refusal."""
    reader = Reader(file_bytes=file_bytes)
    try:
        for at in range(0, len(data), piece):
            reader.feed(data[at : at + piece])
            assert (
                len(reader._buffer)
                <= piece + reader.limits.string_bytes_kept + 8 * reader.limits.array_items_kept
            )
        header = reader.end()
        json.dumps(header.as_json(), allow_nan=False)
    except Refused as refused:
        if refused.code != "model_header_refused":
            raise
        return refused.message
    if file_bytes is not None and header.tensors.count:
        assert header.header_bytes + header.tensors.end <= file_bytes
    return repr(header)


def one_input(data: bytes) -> None:
    if data:
        piece, rest = PIECES_BYTES[data[0] % len(PIECES_BYTES)], data[1:]
        file_bytes = len(rest) if data[0] & len(PIECES_BYTES) else None
        assert read(rest, piece, file_bytes) == read(rest, len(data), file_bytes), "pieces change nothing"


def seed(corpus: Path) -> None:
    corpus.mkdir(parents=True, exist_ok=True)
    made = (
        gguf_files.tiny_llama(),
        gguf_files.tiny_bert(),
        gguf_files.tiny_deepseek2(),
        gguf_files.tiny_mamba(),
    )
    for number, (metadata, tensors) in enumerate(made):
        short = {key: value[:3] if isinstance(value, list) else value for key, value in metadata.items()}
        short["no.number"], short["no.numbers"] = math.nan, [math.nan, math.inf]
        (corpus / f"seed-{number}").write_bytes(b"\x01" + gguf_files.header(short, tensors[:4]))


if __name__ == "__main__":
    seed(Path(sys.argv[1]))
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
