"""The benchmark that the tests of reports start from."""

import json
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import types
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json

PATH = Path(__file__).parent / "data" / "benchmark.json"


def example():
    """The example of docs/benchmark.schema.json."""
    return json.loads(PATH.read_text())


def read(data):
    return typed_json.parse(types.Benchmark, data)
