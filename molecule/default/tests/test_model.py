"""The model that the head has fetched: whole, recorded, and served."""

import json

from conftest import PLAN, on


def test_the_head_serves_what_it_fetched():
    [file] = PLAN["model"]["files"]
    [record] = PLAN["model"]["records"]
    head = on(PLAN["head"]["host"])
    model = head.file(file["path"])
    assert (model.user, model.group, model.mode, model.size) == ("root", "root", 0o644, file["bytes"])
    assert model.sha256sum == file["sha256"]
    said = json.loads(head.file(record["path"]).content_string)
    assert said["source"] == PLAN["model"]["source"]
    assert said["source"].startswith("huggingface:llamacpp/known-answer@")
    assert said["checked"][file["path"]]["sha256"] == file["sha256"]
    assert file["path"] in PLAN["head"]["argv"]
