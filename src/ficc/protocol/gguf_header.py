"""What a GGUF header says: its metadata by key, what its tensors amount to, and the model's shape.

Source of the keys: the GGUF specification (ggml, docs/gguf.md) and, for the ones it lacks, llama.cpp
(`llama-arch.cpp`). A key of another type than its meaning needs is refused; one that is absent stays unknown.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ficc.domain.errors import Refused
from ficc.domain.manifest import Capability
from ficc.domain.model_shape import LAYERS_MAX, ModelShape, Recurrent, WeightBytes
from ficc.protocol.gguf_types import BOOL, FILE_TYPES, POOLINGS, STRING

NUMBER_MAX = (1 << 31) - 1
"""Of lengths and counts; the engine holds them in 32 bits."""
TEXT_CHARACTERS_MAX = 256
CHAT_TEMPLATE = "tokenizer.chat_template"
_BLOCK = re.compile(r"blk\.(\d{1,4})\.")


def malformed(at: int, place: str, why: str) -> Refused:
    return Refused(
        "model_header_refused",
        f"The GGUF header is malformed at byte {at}, {place}: {why}. Fetch the file again from its publisher, "
        "or convert the model anew.",
        details={"byte": at},
    )


@dataclass(frozen=True, slots=True)
class Scalar:
    """A value at its byte in the file. `value` is None for a text too long to keep."""

    kind: int
    value: int | float | str | bool | None
    at: int


@dataclass(frozen=True, slots=True)
class Items:
    """An array. `values` is None for one that was only counted."""

    kind: int
    count: int
    values: tuple[Any, ...] | None
    at: int


@dataclass(slots=True)
class Tally:
    """The tensors of one file, added up."""

    count: int = 0
    parameters: int = 0
    bytes_by_type: Counter[str] = field(default_factory=Counter)
    end: int = 0
    """Of the last one's data, counted from the beginning of all data."""
    input_bytes: int = 0
    output_bytes: int = 0
    other_bytes: int = 0
    block_bytes: Counter[int] = field(default_factory=Counter)

    def add(self, name: str, type_name: str, items: int, size: int, end: int) -> None:
        self.count += 1
        self.parameters += items
        self.bytes_by_type[type_name] += size
        self.end = end
        block = _BLOCK.match(name)
        if block and int(block[1]) < LAYERS_MAX:
            self.block_bytes[int(block[1])] += size
        elif name == "token_embd.weight":
            self.input_bytes += size
        elif name.startswith("output"):
            self.output_bytes += size
        else:
            self.other_bytes += size

    @property
    def weights(self) -> WeightBytes:
        layers = max(self.block_bytes, default=-1) + 1
        blocks = tuple(self.block_bytes[number] for number in range(layers))
        return WeightBytes(blocks, self.input_bytes, self.output_bytes, self.other_bytes)


@dataclass(frozen=True, slots=True)
class Metadata:
    """Entries by key. Each reading raises Refused for a value of another type, naming key and byte."""

    entries: Mapping[str, Scalar | Items]

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    def text(self, key: str) -> str | None:
        entry = self.entries.get(key)
        if entry is None:
            return None
        if not isinstance(entry, Scalar) or entry.kind != STRING:
            raise self._of_type(key, "a text")
        return None if entry.value is None else str(entry.value)[:TEXT_CHARACTERS_MAX]

    def number(self, key: str, most: int = NUMBER_MAX) -> int | None:
        entry = self.entries.get(key)
        if entry is None:
            return None
        value = entry.value if isinstance(entry, Scalar) else None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
            raise self._of_type(key, f"a number from 0 to {most}")
        return value

    def flag(self, key: str) -> bool | None:
        entry = self.entries.get(key)
        if entry is None:
            return None
        if not isinstance(entry, Scalar) or entry.kind != BOOL:
            raise self._of_type(key, "true or false")
        return bool(entry.value)

    def each(self, key: str, layers: int, default: int) -> tuple[int, ...]:
        """A number for each layer: of an array, or the same for all."""
        entry = self.entries.get(key)
        if not isinstance(entry, Items):
            value = self.number(key)
            return (default if value is None else value,) * layers
        values = entry.values
        if values is None or len(values) < layers or not all(_counts(value) for value in values):
            raise self._of_type(key, f"a number for each of {layers} layers")
        return tuple(int(value) for value in values[:layers])

    def length(self, key: str) -> int:
        """Items of an array that may only have been counted."""
        entry = self.entries.get(key)
        if entry is None:
            return 0
        if not isinstance(entry, Items):
            raise self._of_type(key, "an array")
        return entry.count

    def pattern(self, key: str, layers: int) -> int | tuple[bool, ...] | None:
        """A period, or a flag for each layer."""
        if isinstance(self.entries.get(key), Items):
            return tuple(map(bool, self.each(key, layers, 0)))
        return self.number(key)

    def refused(self, key: str, why: str) -> Refused:
        entry = self.entries.get(key)
        return malformed(entry.at if entry else 0, f"key {key!r}", why)

    def _of_type(self, key: str, what: str) -> Refused:
        return self.refused(key, f"it is not {what}")


def _counts(value: object) -> bool:
    return isinstance(value, int) and 0 <= value <= NUMBER_MAX


@dataclass(frozen=True, slots=True)
class Header:
    """One file's header. `shape` is None for a file that describes no model of its own: a later shard, a
    projector."""

    version: int
    metadata: Metadata
    tensors: Tally
    header_bytes: int
    shape: ModelShape | None

    @property
    def tensor_count(self) -> int:
        return self.tensors.count

    @property
    def parameters(self) -> int:
        return self.tensors.parameters

    @property
    def weights(self) -> WeightBytes:
        return self.tensors.weights

    @property
    def has_chat_template(self) -> bool:
        """A template is a program; it is the engine's to run, and is neither kept nor shown here."""
        return CHAT_TEMPLATE in self.metadata

    @property
    def split(self) -> tuple[int, int] | None:
        """This shard's number from 0, and how many there are."""
        count = self.metadata.number("split.count", 1 << 16)
        number = self.metadata.number("split.no", 1 << 16)
        return None if not count else (number or 0, count)

    @property
    def capabilities(self) -> tuple[Capability, ...]:
        return () if self.shape is None else self.shape.capabilities(self.has_chat_template)

    def as_json(self) -> dict[str, Any]:
        """The `gguf` member of a hub preview."""
        number, text = self.metadata.number, self.metadata.text
        file_type = number("general.file_type")
        split = self.split
        shape = {"architecture": text("general.architecture")} if self.shape is None else self.shape.as_json()
        return {
            **shape,
            "name": text("general.name"),
            "size_label": text("general.size_label"),
            "file_type": None if file_type is None else FILE_TYPES.get(file_type, str(file_type)),
            "parameters": self.parameters,
            "chat_template": self.has_chat_template,
            "capabilities": list(self.capabilities),
            "version": self.version,
            "tensor_count": self.tensor_count,
            "tensor_bytes": dict(sorted(self.tensors.bytes_by_type.items())),
            "header_bytes": self.header_bytes,
            "split": None
            if split is None
            else {"no": split[0], "count": split[1], "tensors": number("split.tensors.count")},
        }


def shape_of(metadata: Metadata) -> ModelShape | None:
    """The model's shape, when the header has one. Raises Refused."""
    architecture = metadata.text("general.architecture")
    if not architecture or f"{architecture}.block_count" not in metadata:
        return None
    return _Keys(metadata, architecture).shape()


@dataclass(frozen=True, slots=True)
class _Keys:
    metadata: Metadata
    architecture: str

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def number(self, name: str, most: int = NUMBER_MAX) -> int | None:
        return self.metadata.number(self.key(name), most)

    def needed(self, name: str, most: int = NUMBER_MAX) -> int:
        value = self.number(name, most)
        if not value:
            raise self.metadata.refused(self.key(name), "it is needed, and above 0")
        return value

    def shape(self) -> ModelShape:
        layers = self.needed("block_count", LAYERS_MAX)
        width = self.needed("embedding_length")
        heads = self.metadata.each(self.key("attention.head_count"), layers, 0)
        heads_kv = self.metadata.each(self.key("attention.head_count_kv"), layers, 0)
        if self.key("attention.head_count_kv") not in self.metadata:
            heads_kv = heads  # what the specification says of a model without the key
        head = width // max(heads) if max(heads) else 0
        key_length, value_length = self.number("attention.key_length"), self.number("attention.value_length")
        return ModelShape(
            architecture=self.architecture,
            block_count=layers,
            embedding_length=width,
            head_counts=heads,
            head_counts_kv=heads_kv,
            key_length=head if key_length is None else key_length,
            value_length=head if value_length is None else value_length,
            context_length=self.number("context_length"),
            feed_forward_length=max(self.metadata.each(self.key("feed_forward_length"), layers, 0)),
            vocabulary_size=self._vocabulary(),
            merge_count=self.metadata.length("tokenizer.ggml.merges"),
            shared_kv_layers=self.number("attention.shared_kv_layers", layers) or 0,
            full_attention_interval=self.number("full_attention_interval"),
            pooling=self._pooling(),
            causal=self.metadata.flag(self.key("attention.causal")) is not False,
            recurrent=self._recurrent(),
            **self._compressed(),
            **self._window(layers),
            **self._experts(),
        )

    def _vocabulary(self) -> int:
        counted = self.metadata.length("tokenizer.ggml.tokens")
        return counted or self.number("vocab_size") or 0

    def _compressed(self) -> dict[str, Any]:
        return {
            "kv_lora_rank": self.number("attention.kv_lora_rank"),
            "key_length_mla": self.number("attention.key_length_mla"),
            "value_length_mla": self.number("attention.value_length_mla"),
            "rope_dimension_count": self.number("rope.dimension_count"),
        }

    def _window(self, layers: int) -> dict[str, Any]:
        return {
            "sliding_window": self.number("attention.sliding_window"),
            "window_pattern": self.metadata.pattern(self.key("attention.sliding_window_pattern"), layers),
            "key_length_swa": self.number("attention.key_length_swa"),
            "value_length_swa": self.number("attention.value_length_swa"),
        }

    def _experts(self) -> dict[str, Any]:
        return {
            "expert_count": self.number("expert_count") or 0,
            "expert_used_count": self.number("expert_used_count") or 0,
            "expert_feed_forward_length": self.number("expert_feed_forward_length") or 0,
        }

    def _pooling(self) -> str | None:
        number = self.number("pooling_type")
        return None if number is None else POOLINGS.get(number, str(number))

    def _recurrent(self) -> Recurrent | None:
        if self.key("ssm.state_size") not in self.metadata:
            return None
        return Recurrent(
            conv_kernel=self.number("ssm.conv_kernel") or 0,
            inner_size=self.number("ssm.inner_size") or 0,
            state_size=self.number("ssm.state_size") or 0,
            group_count=self.number("ssm.group_count") or 0,
        )
