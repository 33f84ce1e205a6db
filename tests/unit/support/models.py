"""Summaries of models, as planning has them."""

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import header_summary, known_answer


def known_answer_model(layers=16, width=128, kind="f32"):
    return header_summary.parse(known_answer.summary(layers, width, kind))


def nameless(model):
    """A summary that says sizes of layers alone."""
    return model._replace(tensors=None)


def tensor(name, kind, shape, size, layers):
    """A row of a summary: a tensor that each of so many layers has."""
    return {"name": name, "type": kind, "shape": shape, "bytes": size, "layers": list(range(layers))}


def model(architecture, layers=6, keys=(), **fields):
    """One with four KV heads of 64 in each layer: 256 elements for keys and as many for values.

    :param keys: name → value, of those that say the size of its cache; ``__`` stands for a dot.
    """
    shape = {"width": 512, "heads": 8, "kv_heads": 4, "key_dimension": 64, "value_dimension": 64, "context": 131072}
    sizes = {"layer_bytes": [1] * layers, "input_bytes": 1, "output_bytes": 1, "vocabulary": 32000}
    named = {name.replace("__", "."): value for name, value in dict(keys).items()}
    if "moe" in architecture:
        named.setdefault("expert_count", 8)
    data = {"architecture": architecture, "name": architecture, "layers": layers, **shape, **sizes, **fields}
    return header_summary.parse({**data, "keys": named})


def as_json(model):
    """The summary as model_info reports it."""
    data = {key: value for key, value in model._asdict().items() if value is not None}
    return {
        **data,
        "keys": {name: list(value) if isinstance(value, tuple) else value for name, value in model.keys},
        "layer_bytes": list(model.layer_bytes),
        "expert_bytes": list(model.expert_bytes),
        "tensors": [
            {**row._asdict(), "shape": list(row.shape), "layers": None if row.layers is None else list(row.layers)}
            for row in model.tensor_groups
        ],
        "files": [{"name": name, "bytes": size} for name, size in model.files],
    }
