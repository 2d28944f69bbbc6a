"""Small GGUF files, made to measure: a writer, sets of shards, and tiny models that the real engine loads.

Numbers in metadata become u32 (i64 below 0 or above 2^32), floats f32, lists arrays of what their first item
is; `Typed` says another type.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ficc.protocol.gguf_types import ARRAY, BOOL, STRING, STRUCTS, TENSOR_TYPES, UINT32

FLOAT32, INT64, INT32 = 6, 11, 5
F32, F16 = 0, 1
SEED = 7


@dataclass(frozen=True)
class Typed:
    """A scalar of this value type; or, with a list, an array of such items."""

    kind: int
    value: Any


@dataclass(frozen=True)
class Tensor:
    """Without `data` its bytes are zeros; with `scale` normal numbers of that deviation."""

    name: str
    dimensions: tuple[int, ...]
    kind: int = F32
    data: bytes | None = None
    scale: float = 0.0
    one: bool = False

    @property
    def items(self) -> int:
        product = 1
        for length in self.dimensions:
            product *= length
        return product

    @property
    def size(self) -> int:
        form = TENSOR_TYPES[self.kind]
        return self.items // form.block_items * form.block_bytes

    def payload(self) -> bytes:
        if self.data is not None:
            return self.data
        if self.one:
            return struct.pack("<f", 1.0) * self.items
        if self.scale:
            draw = random.Random(f"{SEED} {self.name}").gauss
            return struct.pack(f"<{self.items}f", *(draw(0, self.scale) for _ in range(self.items)))
        return bytes(self.size)


def string(text: str | bytes) -> bytes:
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def kind_of(value: Any) -> int:
    if isinstance(value, Typed):
        return ARRAY if isinstance(value.value, list) else value.kind
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        return UINT32 if 0 <= value < 1 << 32 else INT64
    if isinstance(value, float):
        return FLOAT32
    return STRING if isinstance(value, str | bytes) else ARRAY


def encode_value(value: Any) -> bytes:
    """A value without its type."""
    kind = kind_of(value)
    if kind == ARRAY:
        items = value.value if isinstance(value, Typed) else list(value)
        item = value.kind if isinstance(value, Typed) else kind_of(items[0]) if items else UINT32
        body = b"".join(encode_value(one if item == ARRAY else Typed(item, one)) for one in items)
        return struct.pack("<IQ", item, len(items)) + body
    plain = value.value if isinstance(value, Typed) else value
    return string(plain) if kind == STRING else STRUCTS[kind].pack(plain)


def entry(key: str | bytes, value: Any) -> bytes:
    return string(key) + struct.pack("<I", kind_of(value)) + encode_value(value)


def preamble(tensors: int, keys: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def info(tensor: Tensor, offset: int) -> bytes:
    dimensions = struct.pack(f"<{len(tensor.dimensions)}Q", *tensor.dimensions)
    count, rest = struct.pack("<I", len(tensor.dimensions)), struct.pack("<IQ", tensor.kind, offset)
    return string(tensor.name) + count + dimensions + rest


def padded(data: bytes, alignment: int) -> bytes:
    return data + bytes(-len(data) % alignment)


def header(metadata: Mapping[str, Any], tensors: Sequence[Tensor] = (), *, version: int = 3) -> bytes:
    """All before the data, padded."""
    alignment = int(metadata.get("general.alignment", 32))
    parts = [preamble(len(tensors), len(metadata), version)]
    parts += [entry(key, value) for key, value in metadata.items()]
    offset = 0
    for tensor in tensors:
        parts.append(info(tensor, offset))
        offset += tensor.size + -tensor.size % alignment
    return padded(b"".join(parts), alignment)


def encode(metadata: Mapping[str, Any], tensors: Sequence[Tensor] = (), *, version: int = 3) -> bytes:
    """A whole file."""
    alignment = int(metadata.get("general.alignment", 32))
    data = b"".join(padded(tensor.payload(), alignment) for tensor in tensors)
    return header(metadata, tensors, version=version) + data


def write(
    path: Path, metadata: Mapping[str, Any], tensors: Sequence[Tensor] = (), *, version: int = 3
) -> Path:
    path.write_bytes(encode(metadata, tensors, version=version))
    return path


def write_shards(
    folder: Path, stem: str, metadata: Mapping[str, Any], tensors: Sequence[Tensor], count: int
) -> list[Path]:
    """A complete set, as llama.cpp's splitter makes it: all metadata in shard 1, split keys in each."""
    paths = []
    for number in range(count):
        split = {
            "split.no": Typed(2, number),
            "split.count": Typed(2, count),
            "split.tensors.count": Typed(INT32, len(tensors)),
        }
        path = folder / f"{stem}-{number + 1:05d}-of-{count:05d}.gguf"
        part = tensors[number * len(tensors) // count : (number + 1) * len(tensors) // count]
        paths.append(write(path, {**(metadata if number == 0 else {}), **split}, part))
    return paths


# Tiny models.

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_vocabulary(filler: int = 0) -> dict[str, Any]:
    """A tokenizer of every byte, and so many unused words."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    kinds = [2, 3, 3, *[6] * 256, 1]
    words += [f"<pad{number}>" for number in range(filler)]
    kinds += [5] * filler
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.scores": [0.0] * len(words),
        "tokenizer.ggml.token_type": Typed(INT32, kinds),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def tiny_llama(
    layers: int = 2, width: int = 64, heads: int = 4, heads_kv: int = 2, forward: int = 192, **more: Any
) -> tuple[dict[str, Any], list[Tensor]]:
    """Metadata and tensors of a model with random weights that the engine runs. `more` replaces metadata."""
    vocabulary = byte_vocabulary()
    words, head = len(vocabulary["tokenizer.ggml.tokens"]), width // heads
    metadata = {
        "general.architecture": "llama",
        "general.name": "tiny random",
        "llama.context_length": 4096,
        "llama.embedding_length": width,
        "llama.block_count": layers,
        "llama.feed_forward_length": forward,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": heads_kv,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": head,
        **vocabulary,
        "tokenizer.chat_template": CHAT_TEMPLATE,
        **more,
    }
    scale = width**-0.5
    tensors = [Tensor("token_embd.weight", (width, words), scale=1.0)]
    for layer in range(layers):
        tensors += [
            Tensor(f"blk.{layer}.attn_norm.weight", (width,), one=True),
            Tensor(f"blk.{layer}.attn_q.weight", (width, heads * head), scale=scale),
            Tensor(f"blk.{layer}.attn_k.weight", (width, heads_kv * head), scale=scale),
            Tensor(f"blk.{layer}.attn_v.weight", (width, heads_kv * head), scale=scale),
            Tensor(f"blk.{layer}.attn_output.weight", (heads * head, width), scale=scale),
            Tensor(f"blk.{layer}.ffn_norm.weight", (width,), one=True),
            Tensor(f"blk.{layer}.ffn_gate.weight", (width, forward), scale=scale),
            Tensor(f"blk.{layer}.ffn_up.weight", (width, forward), scale=scale),
            Tensor(f"blk.{layer}.ffn_down.weight", (forward, width), scale=forward**-0.5),
        ]
    tensors += [Tensor("output_norm.weight", (width,), one=True), Tensor("output.weight", (width, words))]
    return metadata, tensors


def _common(
    architecture: str, layers: int, width: int, heads: int, heads_kv: int | list[int]
) -> dict[str, Any]:
    return {
        "general.architecture": architecture,
        f"{architecture}.context_length": 8192,
        f"{architecture}.embedding_length": width,
        f"{architecture}.block_count": layers,
        f"{architecture}.feed_forward_length": 128,
        f"{architecture}.attention.head_count": heads,
        f"{architecture}.attention.head_count_kv": heads_kv,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        **byte_vocabulary(),
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def tiny_gemma3(layers: int = 12) -> tuple[dict[str, Any], list[Tensor]]:
    """Five layers with a window of 512 tokens, then one without, and so on. Its weights are zeros."""
    width, heads, head = 64, 4, 32
    metadata = {
        **_common("gemma3", layers, width, heads, 1),
        "gemma3.attention.key_length": head,
        "gemma3.attention.value_length": head,
        "gemma3.attention.sliding_window": 512,
    }
    words = len(metadata["tokenizer.ggml.tokens"])
    tensors = [Tensor("token_embd.weight", (width, words)), Tensor("output_norm.weight", (width,), one=True)]
    for layer in range(layers):
        shapes = {
            "attn_q": (width, heads * head),
            "attn_k": (width, head),
            "attn_v": (width, head),
            "attn_output": (heads * head, width),
            "ffn_gate": (width, 128),
            "ffn_up": (width, 128),
            "ffn_down": (128, width),
            "attn_norm": (width,),
            "post_attention_norm": (width,),
            "attn_q_norm": (head,),
            "attn_k_norm": (head,),
            "ffn_norm": (width,),
            "post_ffw_norm": (width,),
        }
        tensors += [Tensor(f"blk.{layer}.{name}.weight", shape) for name, shape in shapes.items()]
    return metadata, tensors


def tiny_deepseek2(layers: int = 3) -> tuple[dict[str, Any], list[Tensor]]:
    """Multi-head latent attention: the cache holds a compressed form. Dense layers only; weights are zeros."""
    width, heads, rank, rope, nope, value = 64, 4, 32, 16, 32, 32
    a = "deepseek2"
    metadata = {
        **_common(a, layers, width, heads, 1),
        f"{a}.attention.q_lora_rank": 48,
        f"{a}.attention.kv_lora_rank": rank,
        f"{a}.attention.key_length": rank + rope,
        f"{a}.attention.value_length": rank,
        f"{a}.attention.key_length_mla": nope + rope,
        f"{a}.attention.value_length_mla": value,
        f"{a}.rope.dimension_count": rope,
        f"{a}.leading_dense_block_count": layers,
        f"{a}.expert_count": 2,
        f"{a}.expert_used_count": 1,
        f"{a}.expert_shared_count": 1,
        f"{a}.expert_feed_forward_length": 32,
        f"{a}.vocab_size": 260,
    }
    words = len(metadata["tokenizer.ggml.tokens"])
    tensors = [
        Tensor("token_embd.weight", (width, words)),
        Tensor("output_norm.weight", (width,), one=True),
        Tensor("output.weight", (width, words)),
    ]
    for layer in range(layers):
        shapes: dict[str, tuple[int, ...]] = {
            "attn_norm": (width,),
            "attn_q_a_norm": (48,),
            "attn_kv_a_norm": (rank,),
            "attn_q_a": (width, 48),
            "attn_q_b": (48, heads * (nope + rope)),
            "attn_kv_a_mqa": (width, rank + rope),
            "attn_k_b": (nope, rank, heads),
            "attn_v_b": (rank, value, heads),
            "attn_output": (heads * value, width),
            "ffn_norm": (width,),
            "ffn_gate": (width, 128),
            "ffn_down": (128, width),
            "ffn_up": (width, 128),
        }
        tensors += [Tensor(f"blk.{layer}.{name}.weight", shape) for name, shape in shapes.items()]
    return metadata, tensors


def tiny_mamba(layers: int = 4) -> tuple[dict[str, Any], list[Tensor]]:
    """State-space layers only: no cache, but a state per sequence. Its weights are zeros."""
    width, inner, kernel, state, rank = 64, 128, 4, 16, 4
    metadata = {
        **_common("mamba", layers, width, 0, 0),
        "mamba.feed_forward_length": 0,
        "mamba.ssm.conv_kernel": kernel,
        "mamba.ssm.inner_size": inner,
        "mamba.ssm.state_size": state,
        "mamba.ssm.time_step_rank": rank,
    }
    words = len(metadata["tokenizer.ggml.tokens"])
    tensors = [Tensor("token_embd.weight", (width, words)), Tensor("output_norm.weight", (width,), one=True)]
    for layer in range(layers):
        shapes = {
            "attn_norm.weight": (width,),
            "ssm_in.weight": (width, 2 * inner),
            "ssm_conv1d.weight": (kernel, inner),
            "ssm_conv1d.bias": (inner,),
            "ssm_x.weight": (inner, rank + 2 * state),
            "ssm_dt.weight": (rank, inner),
            "ssm_dt.bias": (inner,),
            "ssm_a": (state, inner),
            "ssm_d": (inner,),
            "ssm_out.weight": (inner, width),
        }
        tensors += [Tensor(f"blk.{layer}.{name}", shape) for name, shape in shapes.items()]
    return metadata, tensors


def tiny_bert(layers: int = 2) -> tuple[dict[str, Any], list[Tensor]]:
    """An encoder with mean pooling and a word-piece tokenizer: embeddings, no cache, no template."""
    width, forward, context = 64, 128, 2048
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,?!"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *("\u2581" + c for c in letters), *letters]
    metadata = {
        "general.architecture": "bert",
        "general.name": "tiny bert",
        "bert.block_count": layers,
        "bert.context_length": context,
        "bert.embedding_length": width,
        "bert.feed_forward_length": forward,
        "bert.attention.head_count": 4,
        "bert.attention.layer_norm_epsilon": 1e-12,
        "bert.attention.causal": False,
        "bert.pooling_type": 1,
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.scores": [-1000.0] * len(words),
        "tokenizer.ggml.token_type": Typed(INT32, [3] * 5 + [1] * (len(words) - 5)),
        "tokenizer.ggml.token_type_count": 2,
        **{f"tokenizer.ggml.{name}_token_id": number for name, number in _BERT_SPECIALS.items()},
    }
    tensors = [
        Tensor("token_embd.weight", (width, len(words)), scale=0.1),
        Tensor("position_embd.weight", (width, context), scale=0.1),
        Tensor("token_types.weight", (width, 2), scale=0.1),
        *_norm("token_embd_norm", width),
    ]
    for layer in range(layers):
        for name, (inward, outward) in {
            **{f"attn_{part}": (width, width) for part in ("q", "k", "v", "output")},
            "ffn_up": (width, forward),
            "ffn_down": (forward, width),
        }.items():
            tensors.append(Tensor(f"blk.{layer}.{name}.weight", (inward, outward), scale=0.1))
            tensors.append(Tensor(f"blk.{layer}.{name}.bias", (outward,)))
        tensors += [
            *_norm(f"blk.{layer}.attn_output_norm", width),
            *_norm(f"blk.{layer}.layer_output_norm", width),
        ]
    return metadata, tensors


_BERT_SPECIALS = {"padding": 0, "unknown": 1, "bos": 2, "seperator": 3, "eos": 3, "mask": 4}


def _norm(name: str, width: int) -> list[Tensor]:
    return [Tensor(f"{name}.weight", (width,), one=True), Tensor(f"{name}.bias", (width,))]
