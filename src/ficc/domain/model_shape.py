"""The shape of a model: the numbers of its header on which memory and placement depend.

A shape holds what the file declares and nothing that was guessed. How much memory an engine needs for it is
`domain/estimate.py`'s business; how the file is read is `protocol/gguf.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ficc.domain.manifest import Capability

LAYERS_MAX = 1024
"""Above any model that exists (the deepest have some 130 layers)."""

ENCODERS = frozenset(
    [
        *("bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3", "modern-bert", "neo-bert"),
        *("eurobert", "gemma-embedding", "t5encoder"),
    ]
)
"""Architectures that look at a whole input at once, for which the engine makes no cache
(llama.cpp, `llama_model::create_memory`)."""

ATTENTION_FREE = frozenset(["mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"])

WINDOW_PERIODS = {"cohere2": 4, "gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2}
"""Of so many layers in a row the last sees everything and the others a window (llama.cpp,
`llama_model::load_hparams`). An architecture that is not here and declares no pattern of its own is taken to
see everything in every layer: several declare a window that the engine does not use."""


@dataclass(frozen=True, slots=True)
class Recurrent:
    """State-space layers (`ssm.*`): a state of constant size per sequence, whatever the context."""

    conv_kernel: int
    inner_size: int
    state_size: int
    group_count: int = 0

    @property
    def state_values(self) -> int:
        """Numbers in one layer's state of one sequence (llama.cpp, `llama_hparams::n_embd_r`, `n_embd_s`)."""
        mixed = self.inner_size + 2 * self.group_count * self.state_size
        return max(0, self.conv_kernel - 1) * mixed + self.state_size * self.inner_size


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Every count is what the header declares. Per-layer tuples have `block_count` entries."""

    architecture: str
    block_count: int
    embedding_length: int
    head_counts: tuple[int, ...]
    head_counts_kv: tuple[int, ...]
    """0 for a layer without attention."""
    key_length: int
    value_length: int
    context_length: int | None = None
    """Tokens the model was trained for."""
    feed_forward_length: int = 0
    """The widest layer's; 0 when every layer is made of experts."""
    vocabulary_size: int = 0
    merge_count: int = 0
    """Rules of a byte-pair tokenizer; the engine keeps a table of them."""
    key_length_swa: int | None = None
    value_length_swa: int | None = None
    """Of layers with a window, where they differ from the others."""
    kv_lora_rank: int | None = None
    key_length_mla: int | None = None
    value_length_mla: int | None = None
    rope_dimension_count: int | None = None
    sliding_window: int | None = None
    """Tokens."""
    window_pattern: int | tuple[bool, ...] | None = None
    """A period as in WINDOW_PERIODS, or for each layer whether it has the window."""
    shared_kv_layers: int = 0
    """The last so many layers use the cache of earlier ones."""
    full_attention_interval: int | None = None
    """Of so many layers in a row only the last has attention, the others are recurrent."""
    expert_count: int = 0
    expert_used_count: int = 0
    expert_feed_forward_length: int = 0
    pooling: str | None = None
    causal: bool = True
    recurrent: Recurrent | None = None

    @property
    def is_encoder(self) -> bool:
        return self.architecture in ENCODERS

    @property
    def is_mla(self) -> bool:
        """Whether the cache holds the compressed form of keys and values (multi-head latent attention)."""
        return bool(self.kv_lora_rank and self.key_length_mla and self.value_length_mla)

    def has_window(self, layer: int) -> bool:
        if not self.sliding_window:
            return False
        pattern = self.window_pattern
        if pattern is None:
            pattern = WINDOW_PERIODS.get(self.architecture)
        if pattern is None:
            return False
        if isinstance(pattern, tuple):
            return pattern[layer]
        return pattern > 0 and layer % pattern < pattern - 1

    def has_attention(self, layer: int) -> bool:
        """Whether the layer keeps keys and values of its own."""
        if self.is_encoder or self.architecture in ATTENTION_FREE:
            return False
        if layer >= self.block_count - self.shared_kv_layers:
            return False
        if self.full_attention_interval:
            return layer % self.full_attention_interval == self.full_attention_interval - 1
        return self.head_counts_kv[layer] > 0

    @property
    def recurrent_layers(self) -> tuple[bool, ...]:
        """For each layer whether it has a recurrent state: the layers without attention; where every layer has
        attention, the recurrent part stands beside it."""
        attention = [self.has_attention(layer) for layer in range(self.block_count)]
        if self.recurrent is None:
            return (False,) * self.block_count
        return tuple(all(attention) or not attends for attends in attention)

    def capabilities(self, chat_template: bool) -> tuple[Capability, ...]:
        """What the header lets a model be asked for: a ranking of a model that pools to a rank; embeddings of a
        model that declares another pooling (and is an encoder, or has no template to chat by); else chat when
        there is a template."""
        if self.pooling == "rank":
            return ("rerank",)
        pools = self.pooling in ("mean", "cls", "last")
        if pools and (self.is_encoder or not self.causal or not chat_template):
            return ("embeddings",)
        return ("chat",) if chat_template else ()

    def as_json(self) -> dict[str, Any]:
        return {
            "architecture": self.architecture,
            "context_length": self.context_length,
            "block_count": self.block_count,
            "embedding_length": self.embedding_length,
            "feed_forward_length": self.feed_forward_length or None,
            "head_count": _one_or_each(self.head_counts),
            "head_count_kv": _one_or_each(self.head_counts_kv),
            "key_length": self.key_length,
            "value_length": self.value_length,
            "kv_lora_rank": self.kv_lora_rank,
            "sliding_window": self.sliding_window,
            "windowed_layers": sum(map(self.has_window, range(self.block_count))),
            "recurrent_layers": sum(self.recurrent_layers),
            "expert_count": self.expert_count or None,
            "expert_used_count": self.expert_used_count or None,
            "vocabulary_size": self.vocabulary_size or None,
            "pooling": self.pooling,
            "causal": self.causal,
        }


def _one_or_each(counts: tuple[int, ...]) -> int | list[int]:
    return counts[0] if len(set(counts)) == 1 else list(counts)


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Where a model's weights lie: what layers take, and what stands before and after them."""

    blocks: tuple[int, ...] = ()
    input: int = 0
    output: int = 0
    """The output projection has 0 when it is the token embedding once more."""
    other: int = 0

    @property
    def total(self) -> int:
        return sum(self.blocks) + self.input + self.output + self.other


def add_up(parts: Iterable[WeightBytes]) -> WeightBytes:
    """The weights of a set of shards."""
    total = WeightBytes()
    for part in parts:
        longer, shorter = sorted((total.blocks, part.blocks), key=len, reverse=True)
        padded = shorter + (0,) * (len(longer) - len(shorter))
        total = WeightBytes(
            tuple(one + other for one, other in zip(longer, padded, strict=True)),
            total.input + part.input,
            total.output + part.output,
            total.other + part.other,
        )
    return total
