"""Small models of several architectures, to load, not to talk to: their weights are noise, as large as keeps states and logits at their size.

Names and shapes of tensors are those that llama.cpp asks for when it loads a model of the architecture (src/models/*.cpp, load_arch_tensors).
"""

import math

import gguf
import numpy
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer

VOCABULARY = 2048
CONTEXT = 32768
Q4_K_SCALES = {0: 258.3, 2: 34.44}
"""Place of a scale in a block of 144 bytes → standard deviation of random weights for a scale of one; their mean is zero."""


def _attention(width, heads, kv_heads, size, value=None):
    return {
        "attn_q": (width, heads * size),
        "attn_k": (width, kv_heads * size),
        "attn_v": (width, kv_heads * (value or size)),
        "attn_output": (heads * (value or size), width),
    }


def _feed(width, inner):
    return {"ffn_gate": (width, inner), "ffn_up": (width, inner), "ffn_down": (inner, width)}


def _experts(width, inner, count):
    return {
        "ffn_gate_inp": (width, count),
        "ffn_gate_exps": (width, inner, count),
        "ffn_up_exps": (width, inner, count),
        "ffn_down_exps": (inner, width, count),
    }


def _shared_expert(width, inner):
    return {"ffn_gate_shexp": (width, inner), "ffn_up_shexp": (width, inner), "ffn_down_shexp": (inner, width)}


def _norms(width, *names):
    return {f"{name}_norm": (width,) for name in names}


def _keys(width, heads, kv_heads, inner, size, **further):
    return {
        "embedding_length": width,
        "feed_forward_length": inner,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": 1e-6,
        **further,
    }


def dense(layers=6, width=256, heads=8, kv_heads=2, size=32, inner=768, architecture="llama", **further):
    """Grouped queries, and factors of the rotation that each device gets a copy of."""
    layer = {**_norms(width, "attn", "ffn"), **_attention(width, heads, kv_heads, size), **_feed(width, inner)}
    keys = _keys(width, heads, kv_heads, inner, size, **{"rope.dimension_count": size}, **further)
    return architecture, keys, [layer] * layers, {"rope_freqs": (size // 2,), "output": (width, VOCABULARY)}


def tied(layers=7, width=192, heads=6, kv_heads=3, size=32, inner=512, architecture="qwen3"):
    """The output is the token embedding."""
    layer = {**_norms(width, "attn", "ffn"), **_attention(width, heads, kv_heads, size), **_feed(width, inner)}
    layer |= _norms(size, "attn_q", "attn_k")
    return architecture, _keys(width, heads, kv_heads, inner, size), [layer] * layers, {}


def experts(layers=5, width=256, heads=8, kv_heads=4, size=64, inner=128, count=8):
    layer = {**_norms(width, "attn", "ffn"), **_norms(size, "attn_q", "attn_k")}
    layer |= {**_attention(width, heads, kv_heads, size), **_experts(width, inner, count)}
    keys = _keys(width, heads, kv_heads, 4 * inner, size, expert_count=count, expert_used_count=2)
    keys["expert_feed_forward_length"] = inner
    return "qwen3moe", keys, [layer] * layers, {"output": (width, VOCABULARY)}


def latent(
    layers=6, width=256, heads=8, latent_size=64, queries=96, rope=32, head=32, inner=512, count=4, dense_layers=1
):
    """MLA: one compressed vector a token is cached."""
    attention = {
        **_norms(width, "attn", "ffn"),
        "attn_kv_a_norm": (latent_size,),
        "attn_q_a_norm": (queries,),
        "attn_q_a": (width, queries),
        "attn_q_b": (queries, heads * (head + rope)),
        "attn_kv_a_mqa": (width, latent_size + rope),
        "attn_k_b": (head, latent_size, heads),
        "attn_v_b": (latent_size, head, heads),
        "attn_output": (heads * head, width),
    }
    moe = {**attention, **_experts(width, inner // 4, count), **_shared_expert(width, inner // 4)}
    keys = _keys(width, heads, 1, inner, latent_size + rope)
    keys |= {
        "attention.value_length": latent_size,
        "attention.key_length_mla": head + rope,
        "attention.value_length_mla": head,
        "attention.kv_lora_rank": latent_size,
        "attention.q_lora_rank": queries,
        "rope.dimension_count": rope,
        "leading_dense_block_count": dense_layers,
        "expert_count": count,
        "expert_used_count": 2,
        "expert_shared_count": 1,
        "expert_feed_forward_length": inner // 4,
        "expert_weights_scale": 1.0,
    }
    dense_layer = {**attention, **_feed(width, inner)}
    return (
        "deepseek2",
        keys,
        [dense_layer] * dense_layers + [moe] * (layers - dense_layers),
        {"output": (width, VOCABULARY)},
    )


def windowed(layers=8, width=256, heads=4, kv_heads=2, size=64, inner=512, window=512, architecture="gemma3"):
    """A sliding window in five of six layers, and a tied output."""
    layer = {**_norms(width, "attn", "post_attention", "ffn", "post_ffw"), **_attention(width, heads, kv_heads, size)}
    layer |= {**_feed(width, inner), **(_norms(size, "attn_q", "attn_k") if architecture == "gemma3" else {})}
    keys = _keys(width, heads, kv_heads, inner, size, **{"attention.sliding_window": window})
    return architecture, keys, [layer] * layers, {}


def sinks(layers=6, width=256, heads=8, kv_heads=2, size=32, inner=256, window=128, count=4):
    """A sliding window in every other layer, and experts with biases."""
    layer = {
        **_norms(width, "attn", "post_attention"),
        **_attention(width, heads, kv_heads, size),
        "attn_sinks": (heads,),
        **_experts(width, inner, count),
        **{"attn_q.bias": (heads * size,), "attn_k.bias": (kv_heads * size,), "attn_v.bias": (kv_heads * size,)},
        **{"attn_output.bias": (width,), "ffn_gate_inp.bias": (count,), "ffn_down_exps.bias": (width, count)},
        **{"ffn_gate_exps.bias": (inner, count), "ffn_up_exps.bias": (inner, count)},
    }
    keys = _keys(width, heads, kv_heads, inner, size, expert_count=count, expert_used_count=2)
    keys |= {"expert_feed_forward_length": inner, "attention.sliding_window": window, "rope.dimension_count": size}
    return "gpt-oss", keys, [layer] * layers, {"output": (width, VOCABULARY)}


def recurrent(layers=6, width=256, state=16, convolution=4):
    inner, rank = 2 * width, width // 16
    layer = {
        "attn_norm": (width,),
        "ssm_in": (width, 2 * inner),
        "ssm_conv1d": (convolution, inner),
        "ssm_conv1d.bias": (inner,),
        "ssm_x": (inner, rank + 2 * state),
        "ssm_dt": (rank, inner),
        "ssm_dt.bias": (inner,),
        "ssm_a=": (state, inner),
        "ssm_d=": (inner,),
        "ssm_out": (inner, width),
    }
    keys = {
        **{"embedding_length": width, "feed_forward_length": 0, "attention.head_count": 0},
        **{
            "ssm.conv_kernel": convolution,
            "ssm.inner_size": inner,
            "ssm.state_size": state,
            "ssm.time_step_rank": rank,
        },
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    return "mamba", keys, [layer] * layers, {}


def mixed(attends=(0, 0, 1, 0, 1, 0, 0), width=256, heads=4, kv_heads=2, inner=512, convolution=3):
    """Attention in some layers, a short convolution in the others."""
    size = width // heads
    both = {**_norms(width, "attn", "ffn"), **_feed(width, inner)}
    attention = {**_attention(width, heads, kv_heads, size), **_norms(size, "attn_q", "attn_k")}
    short = {
        "shortconv.conv": (convolution, width),
        "shortconv.in_proj": (width, 3 * width),
        "shortconv.out_proj": (width, width),
    }
    keys = _keys(width, heads, [kv_heads * one for one in attends], inner, size, **{"shortconv.l_cache": convolution})
    return (
        "lfm2",
        keys,
        [{**both, **(attention if one else short)} for one in attends],
        {"output_norm=": "token_embd_norm"},
    )


def further_tokens(layers=6, width=256, heads=8, kv_heads=2, size=32, inner=512, count=4):
    """The last layer predicts further tokens, and is not loaded."""
    layer = {
        **_norms(width, "attn", "post_attention"),
        **_attention(width, heads, kv_heads, size),
        **_experts(width, inner // 4, count),
        "exp_probs_b.bias": (count,),
        **_shared_expert(width, inner // 4),
    }
    last = {**layer, "nextn.eh_proj": (2 * width, width), "nextn.enorm": (width,), "nextn.hnorm": (width,)}
    keys = _keys(width, heads, kv_heads, inner, size, expert_count=count, expert_used_count=2, expert_shared_count=1)
    keys |= {"expert_feed_forward_length": inner // 4, "nextn_predict_layers": 1, "leading_dense_block_count": 0}
    keys["rope.dimension_count"] = size // 2
    return "glm4moe", keys, [layer] * (layers - 1) + [last], {"output": (width, VOCABULARY)}


def _full_name(name):
    if name.endswith("="):
        return name[:-1]
    return name if name.endswith(".bias") else f"{name}.weight"


def _stored_as(name, shape, kind):
    plain = len(shape) == 1 or name.endswith(
        (".bias", "ssm_a", "ssm_conv1d.weight", "shortconv.conv.weight", "ffn_gate_inp.weight")
    )
    stored = gguf.GGMLQuantizationType["F32" if plain else kind.upper()]
    return stored if shape[0] % gguf.GGML_QUANT_SIZES[stored][0] == 0 else gguf.GGMLQuantizationType.F16


def _weights(random, name, shape, stored):
    if stored == gguf.GGMLQuantizationType.Q4_K:  # gguf cannot quantise to it
        blocks = numpy.frombuffer(random.bytes(math.prod(shape) // 256 * 144), numpy.uint8).reshape(-1, 144).copy()
        for place, factor in Q4_K_SCALES.items():
            blocks[:, place : place + 2] = numpy.array([shape[0] ** -0.5 / factor], "<f2").view(numpy.uint8)
        return blocks.reshape(*shape[:0:-1], -1)
    values = random.standard_normal(shape[::-1]) * shape[0] ** -0.5
    if name.endswith("norm.weight"):
        values += 1
    elif name.endswith("ssm_a"):
        values = -abs(values)  # a state that decays
    return gguf.quantize(values.astype(numpy.float32), stored)


def write(path, model, kind="f16", vocabulary=VOCABULARY, seed=1):
    """Writes one of the models above.

    :param kind: type of the matrices.
    """
    architecture, keys, layers, further = model
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {"context_length": CONTEXT, "block_count": len(layers), **keys}.items():
        name = f"{architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    known = known_answer.CONTROL_TOKENS + known_answer.BYTE_TOKENS
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*known, *(f"\u2581w{index}" for index in range(vocabulary - len(known)))])
    writer.add_token_scores([0.0] * vocabulary)
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (vocabulary - len(known)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    width = keys["embedding_length"]
    tensors = {
        "token_embd.weight": (width, vocabulary),
        further.get("output_norm=", "output_norm") + ".weight": (width,),
    }
    tensors |= {f"{name}.weight": shape for name, shape in further.items() if not name.endswith("=")}
    for index, layer in enumerate(layers):
        tensors |= {f"blk.{index}.{_full_name(name)}": shape for name, shape in layer.items()}
    random = numpy.random.default_rng(seed)
    for name, shape in tensors.items():
        stored = _stored_as(name, shape, kind)
        writer.add_tensor(name, _weights(random, name, shape, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
