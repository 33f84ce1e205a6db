"""The head's downloaded model is complete, recorded and served."""

import json
from pathlib import PurePath

from conftest import PLAN, WORK, connect


def test_the_head_serves_the_downloaded_model():
    [file] = PLAN["model"]["files"]
    head = connect(PLAN["head"]["host"])
    model = head.file(file["path"])
    assert (model.user, model.group, model.mode, model.size) == ("root", "root", 0o644, file["bytes"])
    assert model.sha256sum == file["sha256"]
    [recorded] = json.loads(head.file(str(PurePath(file["path"]).with_name(".source.json"))).content_string)["files"]
    assert all(recorded[key] == file[key] for key in ("name", "bytes", "sha256", "revision"))
    assert PLAN["model"]["source"] == f"huggingface:llamacpp/known-answer@{file['revision']}"
    assert file["path"] in PLAN["head"]["argv"]


def test_the_known_answer_model_needs_no_proof_and_answers():
    checks = json.loads((WORK / "verify.json").read_text())["checks"]
    assert not [check for check in checks if check["name"] in ("computes", "speaks")]
    assert [check["status"] for check in checks if check["name"] == "known answer"] == ["passed"]


def test_the_account_has_the_group_that_its_owner_created():
    assert connect(PLAN["head"]["host"]).user("llamacpp").group == "llamacpp"
