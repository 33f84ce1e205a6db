"""Models with the shapes of published ones and weights of noise, cut to a few layers: for measurements that need their widths and not their words."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))
import gguf  # as below
import models  # it lies in the folder of the line before
import numpy  # as above
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer

TILE = 1 << 16
"""So many blocks of 256 weights of noise are repeated."""


def next_hybrid(layers=8, width=2048, heads=16, kv_heads=2, size=256, inner=512, count=512, used=10, states=32):
    """Three of four layers keep a state (Qwen3 Next)."""
    linear, key_heads = 128, states // 2
    keys, values = key_heads * linear, states * linear
    both = {**models._norms(width, "attn", "post_attention"), **models._experts(width, inner, count)}
    both |= {**models._shared_expert(width, inner), "ffn_gate_inp_shexp": (width,)}
    attention = {**models._attention(width, heads, kv_heads, size), **models._norms(size, "attn_q", "attn_k")}
    attention["attn_q"] = (width, 2 * heads * size)
    state = {
        "attn_qkv": (width, 2 * keys + values),
        "attn_gate": (width, values),
        "ssm_conv1d": (4, 2 * keys + values),
        "ssm_dt.bias": (states,),
        "ssm_a=": (states,),
        "ssm_ba": (width, 2 * states),
        "ssm_norm": (linear,),
        "ssm_out": (values, width),
    }
    further = models._keys(width, heads, kv_heads, 5120, size, expert_count=count, expert_used_count=used)
    further |= {"expert_feed_forward_length": inner, "expert_shared_feed_forward_length": inner}
    further |= {"ssm.conv_kernel": 4, "ssm.inner_size": values, "ssm.state_size": linear, "ssm.group_count": key_heads}
    further |= {"ssm.time_step_rank": states, "full_attention_interval": 4, "rope.dimension_count": size // 4}
    every = [{**both, **(attention if index % 4 == 3 else state)} for index in range(layers)]
    return "qwen3next", further, every, {"output": (width, models.VOCABULARY)}


def _used(model, count):
    model[1]["expert_used_count"] = count
    return model


def _experts(width, heads, kv_heads, inner, count, layers=4):
    return _used(models.experts(layers, width, heads, kv_heads, 128, inner, count), 8)


def _latent(width, heads, queries, inner, count, used, layers=4):
    return _used(models.latent(layers, width, heads, 512, queries, 64, 128, 4 * inner, count), used)


SHAPES = {
    "Llama 3 8B": models.dense(4, 4096, 32, 8, 128, 14336),
    "Llama 3 70B": models.dense(4, 8192, 64, 8, 128, 28672),
    "Llama 3.2 1B": models.dense(4, 2048, 32, 8, 64, 8192),
    "Llama 2 7B": models.dense(4, 4096, 32, 32, 128, 11008),
    "Qwen3 4B": models.tied(4, 2560, 32, 8, 128, 9728),
    "Qwen3 32B": models.tied(4, 5120, 64, 8, 128, 25600),
    "Qwen3 30B": _experts(2048, 32, 4, 768, 128),
    "Qwen3 235B": _experts(4096, 64, 4, 1536, 128),
    "Qwen3 480B": _experts(6144, 96, 8, 2560, 160),
    "DeepSeek V2 Lite": _latent(2048, 16, 768, 1408, 64, 6),
    "DeepSeek R1": _latent(7168, 128, 1536, 2048, 256, 8),
    "Gemma 3 4B": models.windowed(6, 2560, 8, 4, 256, 10240, 1024),
    "Gemma 3 27B": models.windowed(6, 5376, 32, 16, 128, 21504, 1024),
    "gpt-oss 20B": _used(models.sinks(4, 2880, 64, 8, 64, 2880, 128, 32), 4),
    "gpt-oss 120B": _used(models.sinks(4, 2880, 64, 8, 64, 2880, 128, 128), 4),
    "Qwen3 Next": next_hybrid(),
    "Mamba 2.8B": models.recurrent(4, 2560),
    "LFM2 2.6B": models.mixed((0, 0, 1, 0, 1, 0, 0), 2048, 32, 8, 10752),
    "GLM 4.6": _used(models.further_tokens(4, 5120, 96, 8, 128, 6144, 160), 8),
}


def write(
    path: Path, model, kind: str, filled: bool, vocabulary=models.VOCABULARY, stored_as=models._stored_as
) -> None:
    """Writes one of these shapes.

    :param filled: whether there is noise in it; a file without is a hole of its size.
    :param stored_as: type of a tensor of a name and shape, in a file of a kind.
    """
    architecture, keys, layers, further = model
    if "output" in further:
        further = {**further, "output": (keys["embedding_length"], vocabulary)}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {"context_length": 1 << 18, "block_count": len(layers), **keys}.items():
        add = writer.add_array if isinstance(value, list) else writer.add_uint32
        (writer.add_float32 if isinstance(value, float) else add)(f"{architecture}.{key}", value)
    known = known_answer.CONTROL_TOKENS + known_answer.BYTE_TOKENS
    more = vocabulary - len(known)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*known, *(f"\u2581w{index}" for index in range(more))])
    writer.add_token_scores([0.0] * vocabulary)
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * more)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    width = keys["embedding_length"]
    output_norm = further.get("output_norm=", "output_norm")
    tensors = {"token_embd.weight": (width, vocabulary), f"{output_norm}.weight": (width,)}
    tensors |= {f"{name}.weight": shape for name, shape in further.items() if not name.endswith("=")}
    for index, layer in enumerate(layers):
        tensors |= {f"blk.{index}.{models._full_name(name)}": shape for name, shape in layer.items()}
    sizes = []
    for name, shape in tensors.items():
        stored = stored_as(name, shape, kind)
        elements, size = gguf.GGML_QUANT_SIZES[stored]
        sizes.append((name, stored, shape, numpy.prod(shape, dtype=numpy.int64) // elements * size))
        writer.add_tensor_info(name, shape[::-1], numpy.dtype("float32"), sizes[-1][3], raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        position = file.seek(0, os.SEEK_END)
        for name, stored, _shape, size in sizes:
            position += -position % 32
            if filled:
                file.seek(position)
                _fill(file, name, stored, int(size))
            position += int(size)
        file.truncate(position + -position % 32)


@functools.cache
def _tile(stored: gguf.GGMLQuantizationType) -> bytes:
    values = numpy.random.default_rng(1).standard_normal((TILE, 256)) / 64
    return gguf.quantize(values.astype(numpy.float32), stored).tobytes()


def _fill(file, name: str, stored: gguf.GGMLQuantizationType, size: int) -> None:
    if name.endswith(("norm.weight", "ssm_a")):
        file.write(numpy.full(size // 4, -1 if name.endswith("ssm_a") else 1, numpy.float32).tobytes())
        return
    tile = _tile(stored)
    for start in range(0, size, len(tile)):
        file.write(tile[: size - start])
