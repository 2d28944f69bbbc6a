"""The GGUF reader: what it reads, the same in any pieces; and what it refuses, at little cost."""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ficc.domain.errors import Refused
from ficc.domain.model_shape import add_up
from ficc.protocol.gguf import Header, Limits, Reader
from ficc.protocol.gguf_types import ARRAY, STRING, UINT32
from support import gguf_files as files
from support.gguf_files import Tensor, Typed

REFUSAL_SECONDS_MAX = 0.1
PATIENCE = 10
"""How many times as long a refusal may take here: the machine may be busy with other things."""
MEMORY_BYTES_MAX = 64 << 20
PIECE_BYTES = 64 << 10
LLAMA = files.tiny_llama()
SMALL = files.encode({"general.architecture": "llama", "llama.block_count": 1, "llama.embedding_length": 8})


def read(data: bytes, piece: int = PIECE_BYTES, *, file_bytes: int | None = None, **limits: int) -> Header:
    reader = Reader(Limits(**limits), file_bytes=file_bytes)
    for at in range(0, len(data), piece):
        reader.feed(data[at : at + piece])
    return reader.end()


def refusal(data: bytes, **more: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        read(data, **more)
    assert caught.value.code == "model_header_refused"
    return caught.value


# What it reads.


def test_the_real_model(model_file: Path) -> None:
    reader = Reader(file_bytes=model_file.stat().st_size)
    with model_file.open("rb") as file:
        while not reader.done:
            reader.feed(file.read(max(reader.need, PIECE_BYTES)))
    header = reader.end()
    shown = header.as_json()
    assert {name: shown[name] for name in EXPECTED} == EXPECTED
    assert header.weights.total == sum(header.tensors.bytes_by_type.values())
    assert len(header.weights.blocks) == 30
    assert header.tensors.end + header.header_bytes <= model_file.stat().st_size
    assert reader.bytes_read < header.header_bytes + 2 * PIECE_BYTES, "nothing of a weight but a piece's rest"
    assert reader.need == 0
    assert header.shape is not None
    assert header.shape.merge_count == 48900
    template = header.metadata.entries["tokenizer.chat_template"]
    assert "im_start" not in str(shown)
    assert template.at > 0


EXPECTED = {
    "architecture": "llama",
    "context_length": 8192,
    "block_count": 30,
    "embedding_length": 576,
    "head_count": 9,
    "head_count_kv": 3,
    "key_length": 64,
    "value_length": 64,
    "parameters": 134_515_008,
    "file_type": "q4_1",
    "chat_template": True,
    "capabilities": ["chat"],
    "vocabulary_size": 49152,
    "version": 3,
    "tensor_count": 272,
    "size_label": "135M",
    "split": None,
}


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 256])
def test_versions_and_alignments(version: int, alignment: int) -> None:
    metadata, tensors = LLAMA
    data = files.encode({**metadata, "general.alignment": alignment}, tensors, version=version)
    header = read(data, file_bytes=len(data))
    assert (header.version, header.tensor_count) == (version, len(tensors))
    assert header.parameters == sum(tensor.items for tensor in tensors)
    assert header.weights.total == sum(tensor.size for tensor in tensors)


def test_every_value_type_is_read() -> None:
    values = {
        "a": Typed(0, 200),
        "b": Typed(1, -5),
        "c": Typed(2, 60_000),
        "d": Typed(3, -9),
        "e": 7,
        "f": Typed(5, -8),
        "g": 0.5,
        "h": True,
        "i": "text",
        "j": Typed(10, 1 << 63),
        "k": Typed(11, -(1 << 62)),
        "l": Typed(12, 0.1),
        "m": [1, 2, 3],
        "n": ["x", "y"],
        "o": [[1, 2], [3]],
        "p": [True, False],
        "q": [],
    }
    entries = read(files.encode(values)).metadata.entries
    plain = {
        key: getattr(entry, "value", None) for key, entry in entries.items() if not hasattr(entry, "values")
    }
    assert plain == {
        key: value.value if isinstance(value, Typed) else value
        for key, value in values.items()
        if not isinstance(value, list)
    }
    assert entries["m"].values == (1, 2, 3)  # type: ignore[union-attr]
    assert entries["p"].values == (True, False)  # type: ignore[union-attr]
    assert [entries[key].count for key in "mnopq"] == [3, 2, 2, 2, 0]  # type: ignore[union-attr]


def test_a_set_of_shards_adds_up(tmp_path: Path) -> None:
    metadata, tensors = LLAMA
    paths = files.write_shards(tmp_path, "tiny", metadata, tensors, 3)
    headers = [read(path.read_bytes(), file_bytes=path.stat().st_size) for path in paths]
    assert [header.split for header in headers] == [(0, 3), (1, 3), (2, 3)]
    assert [header.shape is not None for header in headers] == [True, False, False]
    assert headers[1].as_json()["split"] == {"no": 1, "count": 3, "tensors": len(tensors)}
    whole = read(files.encode(metadata, tensors))
    assert add_up(header.weights for header in headers) == whole.weights
    assert sum(header.parameters for header in headers) == whole.parameters
    assert paths[0].name == "tiny-00001-of-00003.gguf"


@pytest.mark.parametrize(
    ("made", "capabilities"),
    [
        (files.tiny_llama(), ("chat",)),
        (files.tiny_llama(**{"llama.pooling_type": 3}), ("chat",)),
        (files.tiny_llama(**{"llama.pooling_type": 4}), ("rerank",)),
        (files.tiny_llama(**{"llama.pooling_type": 3, "llama.attention.causal": False}), ("embeddings",)),
        (files.tiny_bert(), ("embeddings",)),
        (files.tiny_gemma3(), ("chat",)),
    ],
)
def test_what_a_model_can_be_asked_for(made: tuple[dict[str, Any], list[Tensor]], capabilities: Any) -> None:
    assert read(files.encode(*made)).capabilities == capabilities


def test_without_a_template_a_model_that_pools_embeds_and_another_offers_nothing() -> None:
    metadata, tensors = LLAMA
    bare = {key: value for key, value in metadata.items() if key != "tokenizer.chat_template"}
    assert read(files.encode(bare, tensors)).capabilities == ()
    assert read(files.encode({**bare, "llama.pooling_type": 3}, tensors)).capabilities == ("embeddings",)


def test_keys_that_placement_needs() -> None:
    metadata, _ = files.tiny_llama(
        layers=4,
        **{
            "llama.attention.head_count_kv": [2, 1, 0, 2],
            "llama.attention.key_length": 24,
            "llama.attention.value_length": 20,
            "llama.attention.sliding_window": 1024,
            "llama.attention.sliding_window_pattern": [True, False, True, False],
            "llama.expert_count": 8,
            "llama.expert_used_count": 2,
            "llama.ssm.state_size": 16,
            "llama.ssm.inner_size": 128,
            "llama.ssm.conv_kernel": 4,
        },
    )
    shape = read(files.encode(metadata)).shape
    assert shape is not None
    assert shape.head_counts_kv == (2, 1, 0, 2)
    assert (shape.key_length, shape.value_length) == (24, 20)
    assert [shape.has_window(layer) for layer in range(4)] == [True, False, True, False]
    assert shape.recurrent_layers == (False, False, True, False)
    shown = shape.as_json()
    assert (shown["head_count_kv"], shown["expert_used_count"], shown["windowed_layers"]) == (
        [2, 1, 0, 2],
        2,
        2,
    )
    compressed = read(files.encode(*files.tiny_deepseek2())).shape
    assert compressed is not None
    assert compressed.is_mla
    assert (compressed.kv_lora_rank, compressed.rope_dimension_count) == (32, 16)


def test_a_projector_describes_no_model() -> None:
    header = read(files.encode({"general.architecture": "clip"}))
    assert header.shape is None
    assert (header.capabilities, header.as_json()["architecture"]) == ((), "clip")


def test_long_texts_and_vocabularies_are_walked_but_not_held() -> None:
    words = [f"word{number}" for number in range(200_000)]
    data = files.encode({"a.text": "x" * (1 << 20), "tokenizer.ggml.tokens": words, "after": 5})
    reader = Reader()
    tracemalloc.start()
    for at in range(0, len(data), PIECE_BYTES):
        reader.feed(data[at : at + PIECE_BYTES])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    entries = reader.end().metadata.entries
    assert peak < 1 << 20
    assert entries["a.text"].value is None  # type: ignore[union-attr]
    assert entries["tokenizer.ggml.tokens"].count == len(words)  # type: ignore[union-attr]
    assert entries["after"].value == 5  # type: ignore[union-attr]


# Pieces.


@given(st.lists(st.integers(1, 4000), max_size=200))
def test_any_pieces_give_the_same_header(sizes: list[int]) -> None:
    reader, at = Reader(), 0
    for size in [*sizes, len(PIECED)]:
        reader.feed(PIECED[at : at + size])
        at += size
    assert reader.end() == PIECED_HEADER


def test_byte_by_byte_and_at_once() -> None:
    assert read(PIECED, 1) == read(PIECED, len(PIECED)) == PIECED_HEADER


def test_what_is_needed_never_reads_past_the_header() -> None:
    """A caller that fetches exactly `need` each time gets there, and reads not a byte too much."""
    reader, steps = Reader(), 0
    while not reader.done:
        needed = reader.need
        assert needed > 0
        reader.feed(PIECED[reader.bytes_read : reader.bytes_read + needed])
        steps += 1
    padding = -reader.bytes_read % 32
    assert reader.bytes_read + padding == len(files.header(*LLAMA))
    assert steps < 2000
    reader.feed(b"more")
    assert reader.bytes_read + padding == len(files.header(*LLAMA)), "done is done"


PIECED = files.encode(*LLAMA)
PIECED_HEADER = read(PIECED)


# A24: what it refuses.


def key(name: str, kind: int, body: bytes) -> bytes:
    """A file of one key, whose value is these bytes."""
    return files.preamble(0, 1) + files.string(name) + struct.pack("<I", kind) + body


def tensor(dimensions: list[int], *, kind: int = 0, offset: int = 0, count: int | None = None) -> bytes:
    lengths = struct.pack(f"<{len(dimensions)}Q", *dimensions)
    head = struct.pack("<I", len(dimensions) if count is None else count)
    return files.preamble(1, 0) + files.string("w") + head + lengths + struct.pack("<IQ", kind, offset)


def nested(depth: int) -> bytes:
    inner = struct.pack("<IQ", UINT32, 0)
    for _ in range(depth):
        inner = struct.pack("<IQ", ARRAY, 1) + inner
    return inner


U64_MAX = (1 << 64) - 1
REFUSED: dict[str, tuple[bytes, str]] = {
    "no GGUF": (b"\x7fELF" + bytes(40), "no GGUF file"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big endian"),
    "version 1": (files.preamble(0, 0, version=1), "version 1"),
    "version 4": (files.preamble(0, 0, version=4), "version 4"),
    "2^63 items": (key("a", ARRAY, struct.pack("<IQ", UINT32, 1 << 63)), "'a': an array of 9223372036854775808"),
    "2^63 strings": (key("a", ARRAY, struct.pack("<IQ", STRING, 1 << 63)), "'a': an array of"),
    "2^63 bytes": (key("a", ARRAY, struct.pack("<IQ", 0, 1 << 63)), "'a': an array of"),
    "a 1 GiB string": (key("a", STRING, struct.pack("<Q", 1 << 30)), "'a': a string of 1073741824 bytes"),
    "a 2^64 string": (key("a", STRING, struct.pack("<Q", U64_MAX)), "'a': a string of"),
    "a 1 GiB string in an array": (key("a", ARRAY, struct.pack("<IQQ", STRING, 1, 1 << 30)), "'a': a string of"),
    "a 1 GiB key": (files.preamble(0, 1) + struct.pack("<Q", 1 << 30), "key 0: its name has"),
    "an empty key": (files.preamble(0, 1) + files.string("") + bytes(40), "key 0: its name has 0"),
    "a key that is no text": (files.preamble(0, 1) + files.string(b"\xff\xfe") + bytes(40), "not UTF-8"),
    "2^64 keys": (files.preamble(0, U64_MAX), "keys"),
    "2^64 tensors": (files.preamble(U64_MAX, 0), "tensors"),
    "a key twice": (files.preamble(0, 2) + files.entry("a", 1) * 2, "key 'a': it is there twice"),
    "value type 13": (key("a", 13, bytes(8)), "'a': there is no value type 13"),
    "item type 99": (key("a", ARRAY, struct.pack("<IQ", 99, 1)), "'a': there is no value type 99"),
    "a boolean of 2": (key("a", 7, b"\x02"), "'a': a boolean is 0 or 1"),
    "a boolean of 2 in an array": (key("a", ARRAY, struct.pack("<IQ", 7, 1) + b"\x02"), "'a': a boolean"),
    "arrays in arrays": (key("a", ARRAY, nested(9)), "'a': arrays lie more than 3 deep"),
    "alignment 0": (files.header({"general.alignment": 8}).replace(
        struct.pack("<II", 4, 8), struct.pack("<II", 4, 0)), "'general.alignment': 0 is no power of two"),
    "alignment 48": (key("general.alignment", 4, struct.pack("<I", 48)), "48 is no power of two"),
    "alignment 4": (key("general.alignment", 4, struct.pack("<I", 4)), "4 is no power of two"),
    "alignment 2^31": (key("general.alignment", 4, struct.pack("<I", 1 << 31)), "is no power of two from 8"),
    "an alignment in words": (key("general.alignment", STRING, files.string("32")), "no 32-bit number"),
    "no dimensions": (tensor([]), "tensor 'w': it has 0 dimensions"),
    "five dimensions": (tensor([1] * 5), "tensor 'w': it has 5 dimensions"),
    "2^32 dimensions": (tensor([1], count=(1 << 32) - 1), "tensor 'w': it has 4294967295 dimensions"),
    "a dimension of 0": (tensor([4, 0]), "tensor 'w': dimension 1 is 0"),
    "an overflow": (tensor([1 << 32, 1 << 32]), "tensor 'w': its dimensions multiply to 2^63"),
    "tensor type 99": (tensor([4], kind=99), "tensor 'w': there is no tensor type 99"),
    "a type that was taken away": (tensor([32], kind=4), "there is no tensor type 4"),
    "half a block": (tensor([33], kind=2), "tensor 'w': a row of 33 numbers"),
    "an offset of its own": (tensor([4], offset=32), "tensor 'w': its data is at 32"),
    "a tensor twice": (files.header({}, [Tensor("w", (8,)), Tensor("w", (8,))]), "tensor 'w': it is there twice"),
    "no layers": (files.encode({"general.architecture": "x", "x.block_count": 0}), "'x.block_count'"),
    "2^31 layers": (files.encode({"general.architecture": "x", "x.block_count": 1 << 31}), "'x.block_count'"),
    "layers in words": (files.encode({"general.architecture": "x", "x.block_count": "4"}), "'x.block_count'"),
    "no width": (files.encode({"general.architecture": "x", "x.block_count": 1}), "'x.embedding_length'"),
    "too few heads": (files.encode({"general.architecture": "x", "x.block_count": 3, "x.embedding_length": 8,
        "x.attention.head_count": [1, 2]}), "'x.attention.head_count': it is not a number for each of 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a24_a_malformed_header_is_refused_at_once(name: str) -> None:
    data, says = REFUSED[name]
    tracemalloc.start()
    started = time.process_time()
    refused = refusal(data)
    seconds = time.process_time() - started
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert says in refused.message
    assert 0 <= refused.details["byte"] <= len(data)
    assert f"at byte {refused.details['byte']}" in refused.message
    assert peak < MEMORY_BYTES_MAX / 64
    assert seconds < REFUSAL_SECONDS_MAX * PATIENCE


def test_a24_more_keys_than_bytes() -> None:
    assert (
        "5000 keys and 0 tensors would reach past the end"
        in refusal(files.preamble(0, 5000), file_bytes=24).message
    )
    assert "0 keys and 5000 tensors would reach" in refusal(files.preamble(5000, 0), file_bytes=24).message
    assert "the file ends inside its header" in refusal(files.preamble(0, 5000)).message


def test_a24_a_tensor_past_the_end() -> None:
    data = files.encode({}, [Tensor("first", (8,)), Tensor("last", (64,))])
    assert read(data, file_bytes=len(data)).tensors.end == 32 + 256
    assert "their data ends past the end of the file" in refusal(data, file_bytes=len(data) - 1).message
    huge = files.preamble(1, 0) + files.info(Tensor("huge", (1 << 40,)), 0)
    assert "tensor 'huge': its data ends past the end" in refusal(huge, file_bytes=1 << 20).message


def test_a_refusal_comes_before_the_bytes_it_is_about() -> None:
    """Whoever sends an endless file is read no further than the number that gives it away."""
    reader = Reader()
    with pytest.raises(Refused):
        reader.feed(key("a", ARRAY, struct.pack("<IQ", UINT32, 1 << 63)) + bytes(PIECE_BYTES))
    read_until_then = reader.bytes_read
    reader.feed(bytes(PIECE_BYTES))
    assert (reader.bytes_read, reader.need, reader.done) == (read_until_then, 0, False)


def feed_all(reader: Reader, pieces: Iterator[bytes]) -> None:
    for piece in pieces:
        reader.feed(piece)


def endless(first: bytes, rest: bytes) -> Iterator[bytes]:
    yield first
    while True:
        yield rest


@pytest.mark.parametrize(
    ("first", "rest", "limits"),
    [
        (key("a", ARRAY, struct.pack("<IQ", STRING, 2_000_000)), struct.pack("<Q", 40) * PIECE_BYTES, {}),
        (key("a", ARRAY, struct.pack("<IQ", ARRAY, 2_000_000)), struct.pack("<IQ", 0, 0) * 5000, {}),
        (files.preamble(0, 8192), b"".join(files.entry(f"{n:0900}", "y" * 3000) for n in range(60)), {}),
        (key("a", STRING, struct.pack("<Q", 9 << 20)), bytes(PIECE_BYTES), {"header_bytes_max": 8 << 20}),
        (key("a", ARRAY, struct.pack("<IQ", STRING, 3_000_000)), bytes(PIECE_BYTES), {}),
    ],
    ids=["strings", "arrays", "keys", "a long header", "empty strings"],
)
def test_a24_what_never_ends_is_given_up(first: bytes, rest: bytes, limits: dict[str, int]) -> None:
    reader = Reader(Limits(**limits))
    tracemalloc.start()
    with pytest.raises(Refused) as caught:
        feed_all(reader, endless(first, rest))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.code == "model_header_refused"
    assert peak < 16 << 20
    assert reader.bytes_read <= reader.limits.header_bytes_max + len(rest) + len(first)


# Anything at all.


def is_read_or_refused(data: bytes, file_bytes: int | None = None) -> None:
    try:
        reader = Reader(file_bytes=file_bytes)
        reader.feed(data)
        header = reader.end()
    except Refused as refused:
        header, code = None, refused.code
    assert header is not None or code == "model_header_refused"
    if header is not None:
        assert header.header_bytes <= len(data)
        header.as_json()


@given(st.binary(max_size=300))
def test_arbitrary_bytes(data: bytes) -> None:
    is_read_or_refused(data)
    is_read_or_refused(b"GGUF" + struct.pack("<IQQ", 3, 1, 2) + data)


@given(st.data())
def test_headers_with_flaws(data: st.DataObject) -> None:
    """Bytes replaced, taken out and put in, in headers that were valid."""
    made = bytearray(data.draw(st.sampled_from([SMALL, *CORPUS])))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(made) - 1))
        end = at + data.draw(st.sampled_from([0, 1, 4, 8, 40]))
        made[at:end] = data.draw(st.binary(max_size=16) | NUMBERS.map(lambda n: struct.pack("<Q", n)))
        if not made:
            break
    is_read_or_refused(bytes(made), data.draw(st.none() | st.integers(0, 1 << 20)))


NUMBERS = st.sampled_from([0, 1, 2, 255, 1 << 16, 1 << 31, 1 << 32, 1 << 62, 1 << 63, U64_MAX]) | st.integers(
    0, U64_MAX
)
CORPUS = [
    files.encode(
        {
            "general.architecture": "x",
            "general.alignment": 16,
            "x.block_count": 2,
            "x.embedding_length": 8,
            "x.attention.head_count": [2, 2],
            "x.attention.sliding_window_pattern": [True, False],
            "x.ssm.state_size": 3,
            "split.count": Typed(2, 2),
            "tokenizer.ggml.tokens": ["a", "bc", ""],
            "nested": [[1], [2, 3]],
        },
        [Tensor("blk.0.w", (32, 2), kind=2), Tensor("output.weight", (4,))],
    ),
]  # fmt: skip
