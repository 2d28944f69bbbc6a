"""Estimates of memory: what is known adds up, what is not known is said to be unknown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ficc.domain.errors import Refused
from ficc.domain.estimate import (
    CACHE_TYPES,
    PROCESS_BYTES,
    SLOT_BYTES,
    WORD_BYTES,
    Estimate,
    Split,
    from_file_sizes,
    from_shape,
    with_measured,
)
from ficc.domain.manifest import Capability
from ficc.domain.model_shape import ModelShape, Recurrent, WeightBytes
from ficc.images import llama_server
from ficc.inference.adapters.llama_cpp import LlamaCpp
from ficc.inference.contract import input_references
from ficc.protocol.gguf_types import TENSOR_TYPES
from support.specifications import gguf, record, specification

MIB = 1 << 20
SHAPE = ModelShape("llama", 4, 64, (4,) * 4, (2,) * 4, 16, 16, feed_forward_length=192)
ROW_BYTES = 2 * (2 * 16 + 2 * 16)  # keys and values of one token in one layer, in 16 bits each


def cache(shape: ModelShape, context: int = 1024, concurrency: int = 1, **more: str) -> int:
    estimate = from_shape(shape, 0, context=context, concurrency=concurrency, **more)  # type: ignore[arg-type]
    assert estimate.kv_cache_bytes is not None
    return estimate.kv_cache_bytes


def compute(shape: ModelShape, *capabilities: Capability, context: int = 1024, concurrency: int = 1) -> int:
    estimate = from_shape(
        shape, 0, context=context, concurrency=concurrency, capabilities=capabilities or ("chat",)
    )
    assert estimate.compute_bytes is not None
    return estimate.compute_bytes


# Without a header.


def test_an_estimate_from_file_sizes_guesses_nothing() -> None:
    estimate = from_file_sizes(1000)
    assert estimate.as_json() == {
        "weights_bytes": 1000,
        "kv_cache_bytes": None,
        "compute_bytes": None,
        "overhead_bytes": 64 << 20,
        "total_bytes": 1000 + (64 << 20),
        "basis": "file_size",
    }
    assert estimate.in_full()["bases"] == {"weights_bytes": "file_size", "overhead_bytes": "file_size"}
    assert estimate.host_bytes == estimate.total_bytes


def test_an_estimate_adds_what_it_knows() -> None:
    assert Estimate(1, 2, kv_cache_bytes=4, compute_bytes=8).total_bytes == 15


# The cache.


def test_the_cache_is_layers_times_cells_times_rows() -> None:
    assert cache(SHAPE) == 4 * 1024 * ROW_BYTES
    assert cache(SHAPE, context=2048, concurrency=3) == 3 * 2 * cache(SHAPE)
    assert cache(SHAPE, context=1025) == 4 * 1280 * ROW_BYTES, "a slot's cells come in groups of 256"
    assert cache(SHAPE, context=1, concurrency=2) == 2 * 4 * 256 * ROW_BYTES


def test_each_layer_counts_with_its_own_heads() -> None:
    assert cache(replace(SHAPE, head_counts_kv=(4, 2, 1, 0))) == 7 * cache(SHAPE) // 8


def test_layers_that_use_the_cache_of_others_count_nothing() -> None:
    assert cache(replace(SHAPE, shared_kv_layers=3)) == cache(SHAPE) // 4


@pytest.mark.parametrize(("name", "of_f16"), [("f32", 2), ("q8_0", 34 / 64), ("q4_0", 18 / 64), ("bf16", 1)])
def test_quantised_caches(name: str, of_f16: float) -> None:
    assert cache(SHAPE, cache_type_k=name, cache_type_v=name) == of_f16 * cache(SHAPE)
    assert cache(SHAPE, cache_type_k=name) == (1 + of_f16) / 2 * cache(SHAPE)


def test_a_cache_type_that_the_engine_lacks_is_refused() -> None:
    with pytest.raises(Refused, match="q2_k"):
        cache(SHAPE, cache_type_k="q2_k")


def test_cache_types_are_those_of_the_launcher_and_of_the_format() -> None:
    assert set(CACHE_TYPES) == set(llama_server.CACHE_TYPES)
    by_name = {entry.name: (entry.block_items, entry.block_bytes) for entry in TENSOR_TYPES.values()}
    assert all(by_name[name] == form for name, form in CACHE_TYPES.items())


def test_a_window_bounds_the_cache_of_its_layers() -> None:
    windowed = replace(SHAPE, sliding_window=512, window_pattern=(True, True, True, False))
    kept, whole = 1024 * ROW_BYTES, 4096 * ROW_BYTES  # the window and a batch of 512
    snapshot = kept
    assert cache(windowed, context=4096) == 3 * (kept + snapshot) + whole
    assert cache(windowed, context=16384) == 3 * (kept + 2 * snapshot) + 4 * whole
    assert cache(replace(windowed, window_pattern=2), context=4096) == 2 * (kept + snapshot) + 2 * whole
    assert cache(replace(windowed, architecture="gemma2", window_pattern=None), context=4096) == cache(
        replace(windowed, window_pattern=2), context=4096
    )


def test_a_window_that_the_engine_does_not_use_changes_nothing() -> None:
    assert cache(replace(SHAPE, sliding_window=512), context=4096) == cache(SHAPE, context=4096)


def test_latent_attention_keeps_the_compressed_form() -> None:
    latent = replace(SHAPE, kv_lora_rank=32, key_length_mla=48, value_length_mla=32, rope_dimension_count=16)
    assert cache(latent) == 4 * 1024 * 2 * (32 + 16)


def test_encoders_have_no_cache() -> None:
    encoder = replace(SHAPE, architecture="bert", causal=False)
    assert cache(encoder, context=8192, concurrency=8) == 0


def test_recurrent_layers_have_a_state_of_constant_size() -> None:
    state = Recurrent(conv_kernel=4, inner_size=128, state_size=16)
    recurrent = replace(SHAPE, architecture="mamba", head_counts_kv=(0,) * 4, recurrent=state)
    one = 4 * 4 * (3 * 128 + 16 * 128)
    assert cache(recurrent) == cache(recurrent, context=8192) == 2 * one, "the state and a snapshot"
    assert cache(recurrent, concurrency=3) == 3 * 2 * one
    mixed = replace(recurrent, architecture="hybrid", head_counts_kv=(0, 0, 0, 2))
    assert cache(mixed) == 2 * one * 3 // 4 + 1024 * ROW_BYTES
    interval = replace(mixed, head_counts_kv=(2,) * 4, full_attention_interval=4)
    assert cache(interval) == cache(mixed)
    both = replace(mixed, head_counts_kv=(2,) * 4)
    assert cache(both) == 2 * one + cache(SHAPE)


# Compute buffers and the engine.


def test_masks_grow_with_the_context_of_a_slot() -> None:
    assert compute(SHAPE, context=4096) - compute(SHAPE, context=1024) == 2 * 512 * 3072
    assert compute(SHAPE, context=4096, concurrency=4) == pytest.approx(
        compute(SHAPE, context=4096), rel=0.01
    )


def test_a_batch_is_never_more_than_all_slots_hold() -> None:
    assert compute(SHAPE, context=64) < compute(SHAPE, context=512) / 4


def test_embeddings_of_a_chat_model_have_an_output_for_each_token() -> None:
    wordy = replace(SHAPE, vocabulary_size=100_000)
    dear, cheap = compute(wordy, "chat", "embeddings"), compute(wordy)
    assert dear - cheap == pytest.approx(2 * 512 * 100_000 * 4, rel=0.02)


def test_an_encoder_takes_its_context_in_one_batch_and_has_no_words_for_output() -> None:
    encoder = replace(SHAPE, architecture="bert", causal=False, vocabulary_size=100_000)
    assert compute(encoder, "embeddings", context=4096) >= 2 * 4096 * 4096
    assert compute(encoder, "embeddings", context=4096) < 2 * 4096 * 4096 + 64 * MIB
    assert compute(encoder, "embeddings", context=1 << 20) == compute(encoder, "embeddings", context=8192)


def test_experts_count_with_those_that_are_used() -> None:
    dense = replace(SHAPE, feed_forward_length=0, expert_feed_forward_length=512, expert_count=64)
    assert compute(replace(dense, expert_used_count=8)) > 3 * compute(replace(dense, expert_used_count=1))


def test_the_engine_counts_slots_and_words() -> None:
    wordy = replace(SHAPE, vocabulary_size=1000)
    assert from_shape(wordy, 0, context=1, concurrency=5).overhead_bytes == (
        PROCESS_BYTES + 5 * SLOT_BYTES + 1000 * WORD_BYTES
    )


def test_bases_and_margin() -> None:
    full = from_shape(SHAPE, 5000, context=1024, concurrency=2).in_full()
    assert full["basis"] == "metadata"
    assert full["bases"] == {
        "weights_bytes": "file_size",
        "kv_cache_bytes": "metadata",
        "compute_bytes": "metadata",
        "overhead_bytes": "measured",
    }
    assert 0 < full["margin_bytes"] < full["total_bytes"]
    assert full["total_bytes"] == sum(full[name] for name in full["bases"])
    assert [part["device"] for part in full["devices"]] == ["host"]
    assert full["devices"][0]["total_bytes"] == full["total_bytes"]


@pytest.mark.parametrize("capabilities", [("chat",), ("embeddings",), ("chat", "embeddings")])
@pytest.mark.parametrize(("context", "concurrency"), [(512, 1), (4096, 4), (20_000, 2)])
def test_the_settings_are_those_of_the_adapters_command_line(
    capabilities: list[Capability], context: int, concurrency: int
) -> None:
    """What the estimate takes for granted is what the launcher gets."""
    manifest = gguf(list(capabilities))
    made = specification(0, context=context, concurrency=concurrency)
    job = LlamaCpp().job(made, record(manifest), made.placements[0], input_references(manifest))
    options = llama_server.parser().parse_args(job.argv[1:])
    assert (options.ctx_size, options.parallel) == (context * concurrency, concurrency)
    assert (options.cache_type_k, options.cache_type_v) == ("f16", "f16")
    encoder = replace(SHAPE, architecture="bert", causal=False, embedding_length=1, feed_forward_length=0)
    batch = options.ubatch_size
    assert options.batch_size >= batch
    tokens = min(batch, context * concurrency)
    predicted = compute(encoder, *capabilities, context=context, concurrency=concurrency)
    assert 0 <= predicted - 2 * tokens * tokens < 2 * tokens * tokens + 1024 * tokens
    assert options.embeddings == ("embeddings" in capabilities)


# Measured.


def test_a_measured_peak_raises_the_estimate() -> None:
    estimate = from_shape(SHAPE, 50 * MIB, context=1024, concurrency=1)
    higher = with_measured(estimate, estimate.total_bytes + 7 * MIB)
    assert higher.total_bytes == estimate.total_bytes + 7 * MIB == higher.host_bytes
    assert higher.overhead_bytes == estimate.overhead_bytes + 7 * MIB
    assert higher.basis == "measured"
    assert higher.in_full()["bases"]["kv_cache_bytes"] == "metadata"
    assert higher.in_full()["measured_peak_bytes"] == higher.total_bytes
    assert with_measured(from_file_sizes(1000), 500 * MIB).total_bytes == 500 * MIB


@pytest.mark.parametrize("below", [0, 1, 7 * MIB])
def test_an_attempt_that_did_not_fill_its_context_lowers_nothing(below: int) -> None:
    estimate = from_shape(SHAPE, 50 * MIB, context=1024, concurrency=1)
    idle = with_measured(estimate, estimate.total_bytes - below)
    assert idle.as_json() == estimate.as_json()
    assert idle.in_full()["measured_peak_bytes"] == estimate.total_bytes - below
    assert estimate.in_full()["measured_peak_bytes"] is None


def test_a_measured_peak_is_of_the_host_alone() -> None:
    split = Split(1, WeightBytes(blocks=(10, 20), input=100, output=200, other=5))
    estimate = from_shape(SHAPE, 50 * MIB, context=1024, concurrency=1, split=split)
    corrected = with_measured(estimate, estimate.host_bytes + MIB)
    assert corrected.host_bytes == estimate.host_bytes + MIB
    assert corrected.total_bytes == estimate.total_bytes + MIB
    assert corrected.devices[1:] == estimate.devices[1:]


# Devices.

WEIGHTS = WeightBytes(blocks=(10, 20, 30, 40), input=100, output=200, other=5)


def devices(split: Split) -> dict[str, tuple[int, int]]:
    estimate = from_shape(SHAPE, WEIGHTS.total, context=1024, concurrency=1, split=split)
    assert sum(part.total_bytes for part in estimate.devices) == estimate.total_bytes
    layer = cache(SHAPE) // 4
    return {part.device: (part.weights_bytes, part.kv_cache_bytes // layer) for part in estimate.devices}


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (Split(1, WEIGHTS), {"host": (105, 0), "gpu0": (300, 4)}),
        (Split(1, WEIGHTS, layers=99), {"host": (105, 0), "gpu0": (300, 4)}),
        (Split(1, WEIGHTS, layers=0), {"host": (405, 4), "gpu0": (0, 0)}),
        (Split(1, WEIGHTS, layers=1), {"host": (205, 4), "gpu0": (200, 0)}),
        (Split(1, WEIGHTS, layers=3), {"host": (135, 2), "gpu0": (270, 2)}),
        (Split(2, WEIGHTS), {"host": (105, 0), "gpu0": (60, 3), "gpu1": (240, 1)}),
        (Split(2, WEIGHTS, weights=[1, 4]), {"host": (105, 0), "gpu0": (10, 1), "gpu1": (290, 3)}),
        (Split(2, WEIGHTS, weights=[0, 1]), {"host": (105, 0), "gpu0": (0, 0), "gpu1": (300, 4)}),
    ],
)
def test_layers_lie_where_the_engine_puts_them(split: Split, expected: dict[str, tuple[int, int]]) -> None:
    assert devices(split) == expected


def test_an_output_that_is_the_embedding_is_copied() -> None:
    tied = replace(WEIGHTS, output=0)
    estimate = from_shape(SHAPE, tied.total, context=1024, concurrency=1, split=Split(1, tied))
    assert [part.weights_bytes for part in estimate.devices] == [105, 200]
    assert estimate.weights_bytes == tied.total + 100
    assert estimate.host_bytes == estimate.devices[0].total_bytes < estimate.total_bytes


def test_a_device_without_layers_has_no_buffers() -> None:
    estimate = from_shape(
        SHAPE, WEIGHTS.total, context=1024, concurrency=1, split=Split(2, WEIGHTS, weights=[0, 1])
    )
    assert [part.compute_bytes > 0 for part in estimate.devices] == [True, False, True]


@pytest.mark.parametrize("weights", [[1], [0, 0], [1, 2, 3]])
def test_a_split_has_a_weight_per_gpu(weights: list[int]) -> None:
    with pytest.raises(Refused):
        Split(2, WEIGHTS, weights=weights)
