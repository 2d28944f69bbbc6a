"""How much memory a replica needs: weights, cache, compute buffers and the engine itself.

Three sources, from the weakest to the strongest, and each term names its own: `file_size` (only the files'
sizes are known: a floor, with the terms that depend on the header absent, never guessed), `metadata` (the
header's numbers, put through the arithmetic by which llama.cpp sizes its buffers), `measured` (an attempt of
this model under these settings ran, and this was its peak).

The arithmetic was compared with the engine's own accounts of its buffers; the constants of the engine itself
were measured. docs/memory-estimate.md has the terms in words and the table of predicted against measured.
Amounts are bytes; `context` is tokens per request and `concurrency` requests at once, as in a specification.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ficc.domain.errors import invalid
from ficc.domain.manifest import Capability
from ficc.domain.model_shape import ModelShape, WeightBytes

ENGINE_OVERHEAD_BYTES = 64 << 20
"""The engine with a model of no size, when the header is unknown: rounded up."""

PROCESS_BYTES = 48 << 20
"""Launcher and engine without any model: their code, libraries and interpreter."""
SLOT_BYTES = 1 << 20
"""What one more request at once takes besides its cache."""
WORD_BYTES = 200
"""A word of the vocabulary in the engine's tables."""
MERGE_BYTES = 320
"""A merge rule of a byte-pair tokenizer in the engine's tables."""

CELL_GROUP_TOKENS = 256
"""The cache of a slot is rounded up to a multiple of this."""
BATCH_TOKENS = 512
"""The engine's physical batch where the adapter sets none."""
EMBEDDING_BATCH_TOKENS_MAX = 8192
"""The adapter's physical batch of an embeddings model: its context, and no more than this."""
SNAPSHOT_SPACING_TOKENS = 8192
SNAPSHOTS_MAX = 32
"""Layers with a window or a recurrent state forget; of these the engine keeps a copy of their state every so
many tokens, at most so many in a slot, to go back to (`n_ctx_checkpoints`, `checkpoint_min_step`)."""
INDEX_BYTES = 64
"""Positions and places of one token of a batch."""

CACHE_TYPES: Mapping[str, tuple[int, int]] = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q8_0": (32, 34),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "iq4_nl": (32, 18),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
}
"""What the cache may be made of: numbers in a block, and its bytes."""

MARGIN_METADATA = 0.10
MARGIN_COMPUTE = 0.25
MARGIN_RECURRENT = 0.50
"""Of the compute buffers of recurrent layers: bounded by arithmetic, compared with one small model only."""
MARGIN_MEASURED = 0.05

Basis = Literal["measured", "metadata", "file_size"]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One device's part. `device` is `host`, or `gpu0`, `gpu1` … in the order of the placement's devices.
    What a GPU's driver takes for itself is not in it."""

    device: str
    weights_bytes: int
    kv_cache_bytes: int
    compute_bytes: int
    overhead_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_cache_bytes + self.compute_bytes + self.overhead_bytes

    def as_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "weights_bytes": self.weights_bytes,
            "kv_cache_bytes": self.kv_cache_bytes,
            "compute_bytes": self.compute_bytes,
            "overhead_bytes": self.overhead_bytes,
            "total_bytes": self.total_bytes,
        }


@dataclass(frozen=True, slots=True)
class Estimate:
    """Terms that add up to the total, over all devices together. `bases` has the basis of a term where it
    differs from `basis`. `margin_bytes` is how much more it may come to; it is not in the total."""

    weights_bytes: int
    overhead_bytes: int
    kv_cache_bytes: int | None = None
    compute_bytes: int | None = None
    basis: Basis = "file_size"
    bases: Mapping[str, Basis] = field(default_factory=dict)
    margin_bytes: int = 0
    devices: tuple[DeviceMemory, ...] = ()
    """Empty when nothing is known of how the model is divided."""
    measured_peak_bytes: int | None = None
    """The most that an attempt under the same settings took of the host's memory, once one ran."""

    @property
    def total_bytes(self) -> int:
        return (
            self.weights_bytes + self.overhead_bytes + (self.kv_cache_bytes or 0) + (self.compute_bytes or 0)
        )

    @property
    def host_bytes(self) -> int:
        """What the sandbox's own memory limit has to hold."""
        return next((part.total_bytes for part in self.devices if part.device == "host"), self.total_bytes)

    def as_json(self) -> dict[str, Any]:
        """The six members that every preview has."""
        return {
            "weights_bytes": self.weights_bytes,
            "kv_cache_bytes": self.kv_cache_bytes,
            "compute_bytes": self.compute_bytes,
            "overhead_bytes": self.overhead_bytes,
            "total_bytes": self.total_bytes,
            "basis": self.basis,
        }

    def in_full(self) -> dict[str, Any]:
        """The same with the margin, what was measured, each term's basis and each device's part."""
        known = {
            name: amount for name, amount in self.as_json().items() if name in TERMS and amount is not None
        }
        return {
            **self.as_json(),
            "margin_bytes": self.margin_bytes,
            "measured_peak_bytes": self.measured_peak_bytes,
            "bases": {name: self.bases.get(name, self.basis) for name in known},
            "devices": [part.as_json() for part in self.devices],
        }


TERMS = ("weights_bytes", "kv_cache_bytes", "compute_bytes", "overhead_bytes")


@dataclass(frozen=True, slots=True)
class Split:
    """Layers on GPUs, as the engine's `--n-gpu-layers` and `--tensor-split` have it. `layers` None is all of
    them; `weights` None divides them evenly. `bytes` says where the weights lie."""

    gpus: int
    bytes: WeightBytes
    layers: int | None = None
    weights: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.gpus < 1 or (self.weights is not None and len(self.weights) != self.gpus):
            raise invalid("tensor_split has one weight per GPU.", "tensor_split")
        if self.weights is not None and not any(self.weights):
            raise invalid("At least one weight of tensor_split is above 0.", "tensor_split")

    def device_of(self, block_count: int) -> list[int]:
        """For each layer, and for the output after them, the number of its GPU; -1 is the host.

        llama.cpp moves the last layers first, counts the output as one more, and cuts the moved ones at the
        summed shares (`llama_model::load_tensors`)."""
        moved = block_count + 1 if self.layers is None else min(self.layers, block_count + 1)
        first = block_count + 1 - moved
        shares = list(self.weights or [1] * self.gpus)
        total, bounds, summed = sum(shares), [], 0
        for share in shares:
            summed += share
            bounds.append(summed)
        found = [-1] * first
        for number in range(moved):
            found.append(next(gpu for gpu, bound in enumerate(bounds) if number * total < bound * moved))
        return found


def from_file_sizes(weights_bytes: int) -> Estimate:
    """A floor, for a model whose header was not read."""
    return Estimate(weights_bytes=weights_bytes, overhead_bytes=ENGINE_OVERHEAD_BYTES)


def from_shape(
    shape: ModelShape,
    weights_bytes: int,
    *,
    context: int,
    concurrency: int,
    capabilities: Sequence[Capability] = ("chat",),
    cache_type_k: str = "f16",
    cache_type_v: str = "f16",
    split: Split | None = None,
) -> Estimate:
    """What llama.cpp needs for this model, started as the llama_cpp adapter starts it.

    `weights_bytes` is the size of all the model's files: the engine maps them, and every page is touched.
    Raises Refused `invalid_request` for a cache type that the engine does not have."""
    types = (_cache_type(cache_type_k), _cache_type(cache_type_v))
    batch, pooled = _batch(capabilities, context)
    run = _Run(shape, context, concurrency, batch, pooled, types)
    cache, snapshots, compute = run.cache_bytes(), run.snapshot_bytes(), run.compute_bytes()
    overhead = (
        PROCESS_BYTES
        + concurrency * SLOT_BYTES
        + shape.vocabulary_size * WORD_BYTES
        + shape.merge_count * MERGE_BYTES
    )
    host = DeviceMemory("host", weights_bytes, sum(cache) + snapshots, compute, overhead)
    devices = (host,) if split is None else _divide(host, cache, split)
    return Estimate(
        weights_bytes=sum(part.weights_bytes for part in devices),
        overhead_bytes=overhead,
        kv_cache_bytes=sum(part.kv_cache_bytes for part in devices),
        compute_bytes=sum(part.compute_bytes for part in devices),
        basis="metadata",
        bases={"weights_bytes": "file_size", "overhead_bytes": "measured"},
        margin_bytes=run.margin(sum(cache) + snapshots, compute, overhead),
        devices=devices,
    )


def with_measured(estimate: Estimate, peak_bytes: int) -> Estimate:
    """Corrected by the highest peak, in the host's memory, of attempts with the same model, runtime, context and
    concurrency.

    A peak is a floor: an attempt that never filled its context did not touch all of its buffers. So one above the
    estimate raises the overhead by what is missing, and one below it lowers nothing, and is shown beside."""
    missing = peak_bytes - estimate.host_bytes
    if missing <= 0:
        return replace(estimate, measured_peak_bytes=peak_bytes)
    return replace(
        estimate,
        overhead_bytes=estimate.overhead_bytes + missing,
        basis="measured",
        bases={
            **{term: estimate.bases.get(term, estimate.basis) for term in TERMS},
            "overhead_bytes": "measured",
        },
        margin_bytes=int(peak_bytes * MARGIN_MEASURED),
        devices=tuple(
            replace(part, overhead_bytes=part.overhead_bytes + missing) if part.device == "host" else part
            for part in estimate.devices
        ),
        measured_peak_bytes=peak_bytes,
    )


def _cache_type(name: str) -> tuple[int, int]:
    if name not in CACHE_TYPES:
        raise invalid(f"A cache is one of {', '.join(sorted(CACHE_TYPES))}; not {name!r}.", "cache_type")
    return CACHE_TYPES[name]


def _batch(capabilities: Sequence[Capability], context: int) -> tuple[int, bool]:
    """The physical batch, and whether each of its tokens has an output: as the llama_cpp adapter sets them."""
    if not {"embeddings", "rerank"} & set(capabilities):
        return BATCH_TOKENS, False
    generates = bool({"chat", "completions"} & set(capabilities))
    return BATCH_TOKENS if generates else min(context, EMBEDDING_BATCH_TOKENS_MAX), True


def _up_to(multiple: int, count: int) -> int:
    return -(-count // multiple) * multiple


@dataclass(frozen=True, slots=True)
class _Run:
    """A model under settings: the sizes of the engine's buffers."""

    shape: ModelShape
    context: int
    slots: int
    batch: int
    pooled: bool
    types: tuple[tuple[int, int], tuple[int, int]]

    @property
    def tokens(self) -> int:
        """In one physical batch: never more than all slots hold."""
        return min(self.batch, self.context * self.slots)

    @property
    def cells(self) -> int:
        """Of one slot, in a layer that sees everything."""
        return _up_to(CELL_GROUP_TOKENS, self.context)

    @property
    def window_cells(self) -> int:
        wanted = (self.shape.sliding_window or 0) + self.batch
        return min(self.cells, _up_to(CELL_GROUP_TOKENS, wanted))

    def cache_bytes(self) -> list[int]:
        """By layer, over all slots: keys and values, and recurrent state."""
        states = self._state_bytes()
        return [self._attention_bytes(layer) + state for layer, state in enumerate(states)]

    def snapshot_bytes(self) -> int:
        """Copies of what forgets, in the host's memory."""
        windows = [layer for layer in range(self.shape.block_count) if self.shape.has_window(layer)]
        copied = sum(map(self._attention_bytes, windows)) + sum(self._state_bytes())
        return min(SNAPSHOTS_MAX, -(-self.context // SNAPSHOT_SPACING_TOKENS)) * copied

    def _attention_bytes(self, layer: int) -> int:
        if not self.shape.has_attention(layer):
            return 0
        windowed = self.shape.has_window(layer)
        cells = self.window_cells if windowed else self.cells
        return self.slots * cells * self._row_bytes(layer, windowed)

    def _state_bytes(self) -> list[int]:
        state = 4 * self.shape.recurrent.state_values if self.shape.recurrent else 0
        return [self.slots * state * recurrent for recurrent in self.shape.recurrent_layers]

    def _row_bytes(self, layer: int, windowed: bool) -> int:
        """Keys and values of one token in one layer. With latent attention the compressed form is both."""
        shape = self.shape
        if shape.is_mla:
            return _blocks((shape.kv_lora_rank or 0) + (shape.rope_dimension_count or 0), self.types[0])
        key = (shape.key_length_swa if windowed else None) or shape.key_length
        value = (shape.value_length_swa if windowed else None) or shape.value_length
        heads = shape.head_counts_kv[layer]
        return _blocks(heads * key, self.types[0]) + _blocks(heads * value, self.types[1])

    def compute_bytes(self) -> int:
        """The widest moment of one physical batch, its masks and its outputs.

        With flash attention, which the engine uses by itself, no score of attention is stored."""
        shape, tokens = self.shape, self.tokens
        outputs = tokens if self.pooled else min(tokens, self.slots)
        words = 0 if shape.is_encoder else shape.vocabulary_size
        residual = 5 * shape.embedding_length
        widest = max(4 * tokens * self._numbers_per_token(), 4 * (outputs * words + tokens * residual))
        kept = 4 * outputs * (words + (shape.embedding_length if self.pooled else 0))
        return widest + self._mask_bytes() + tokens * INDEX_BYTES + kept

    def _numbers_per_token(self) -> int:
        """The most of a layer that exists at once: the residual stream beside the feed-forward part, its
        experts, attention, or a recurrent mixer."""
        shape = self.shape
        width = shape.embedding_length
        heads, heads_kv = max(shape.head_counts), max(shape.head_counts_kv)
        attention = (
            3 * width + 3 * heads * shape.key_length + heads_kv * (shape.key_length + shape.value_length)
        )
        experts = shape.expert_used_count * (3 * shape.expert_feed_forward_length + 2 * width)
        recurrent = 8 * shape.recurrent.inner_size if shape.recurrent else 0
        return max(5 * width + max(3 * shape.feed_forward_length, experts, recurrent), attention)

    def _mask_bytes(self) -> int:
        """Which token may look at which, in 16 bits each; one mask for each kind of attention layer."""
        shape = self.shape
        if shape.is_encoder:
            return 2 * self.tokens * self.tokens
        attending = filter(shape.has_attention, range(shape.block_count))
        kinds = {shape.has_window(layer) for layer in attending}
        return sum(2 * self.tokens * (self.window_cells if windowed else self.cells) for windowed in kinds)

    def margin(self, cache: int, compute: int, overhead: int) -> int:
        uncertain = MARGIN_RECURRENT if self.shape.recurrent else MARGIN_COMPUTE
        return int(MARGIN_METADATA * (cache + overhead) + uncertain * compute)


def _blocks(numbers: int, form: tuple[int, int]) -> int:
    block_numbers, block_bytes = form
    return -(-numbers // block_numbers) * block_bytes


def _divide(whole: DeviceMemory, cache: Sequence[int], split: Split) -> tuple[DeviceMemory, ...]:
    """Each device's part: a layer's cache lies with its weights, and whoever computes has buffers. An output
    that is the token embedding once more is copied to its GPU, and stays on the host too."""
    places = split.device_of(len(cache))
    weights, caches = [0] * split.gpus, [0] * split.gpus
    blocks = split.bytes.blocks + (0,) * (len(cache) - len(split.bytes.blocks))
    for place, size, kept in zip(places, blocks, cache, strict=False):  # the output's place is the last
        if place >= 0:
            weights[place] += size
            caches[place] += kept
    left = whole.weights_bytes - sum(weights)
    if places[-1] >= 0:
        weights[places[-1]] += split.bytes.output or split.bytes.input
        left -= split.bytes.output
    host = replace(whole, weights_bytes=left, kv_cache_bytes=whole.kv_cache_bytes - sum(caches))
    return (
        host,
        *(
            DeviceMemory(
                f"gpu{number}", weights[number], caches[number], whole.compute_bytes if weights[number] else 0
            )
            for number in range(split.gpus)
        ),
    )
