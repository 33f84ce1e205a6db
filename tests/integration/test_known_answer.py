"""The known-answer model on a host: written with its sha256 beside it, and again only where either differs."""

import hashlib
import json
import os
import subprocess
import sys

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer, known_answer_file
from conftest import ROOT, TREE

SIZE = (2, 64, "f32")


@pytest.fixture
def put(tmp_path):
    """Runs the module; returns whether it changed anything."""
    path = tmp_path / "model.gguf"

    def run():
        size = dict(zip(("layers", "width", "type"), SIZE, strict=True))
        arguments = json.dumps({"path": str(path), "known_answer": size})
        command = ["ansible", "localhost", "-m", "llamacpp.cluster.model", "-a", arguments]
        result = subprocess.run(
            [*command, "-e", f"ansible_python_interpreter={sys.executable}"],
            env={
                **os.environ,
                "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
                "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                "ANSIBLE_COLLECTIONS_PATH": str(TREE),
                "ANSIBLE_NOCOLOR": "1",
                "XDG_CACHE_HOME": str(tmp_path / "cache"),
            },
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return "CHANGED" in result.stdout

    return run


def test_model_and_record_are_written_once_and_again_where_they_differ(put, tmp_path):
    model = tmp_path / "model.gguf"
    record = tmp_path / known_answer.record_of(model.name)
    assert put()
    assert model.stat().st_size == known_answer_file.file_bytes(*SIZE)
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    assert record.read_text().strip() == digest
    assert not put()
    record.unlink()
    assert put()
    assert record.exists()
    model.write_bytes(b"x" * known_answer_file.file_bytes(*SIZE))
    assert put()
    assert hashlib.sha256(model.read_bytes()).hexdigest() == digest
