"""Sources of models: requests for them as variables make them, a hub on this machine, and a host that is this process."""

import gguf_files
import hub as play
import pytest
from ansible_collections.llamacpp.cluster.plugins.action import model_info as action_plugin
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_inputs
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models import lookup, resolver
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models.lookup import Query

REPO = "unsloth/some-model-GGUF"
PREFIX = "/opt/llamacpp"
TOKEN = "hf_abcdefgh"


@pytest.fixture
def server(tmp_path, monkeypatch):
    served = play.Hub(tmp_path / "hub").start()
    (tmp_path / "hub" / REPO).mkdir(parents=True)
    monkeypatch.setenv("HF_ENDPOINT", served.url)
    yield served
    served.stop()


@pytest.fixture
def repo(server):
    """A repository as people make them: quantisations in folders and in names, parts, a projector, and what is none of these."""
    folder = server.folder / REPO
    for name in ("some-model-Q4_K_M.gguf", "some-model-UD-Q4_K_M.gguf", "mmproj-F16.gguf", "some-model.imatrix.gguf"):
        (folder / name).write_bytes(gguf_files.model())
    for folder_name, count in (("UD-Q2_K_XL", 3), ("Q8_0", 2)):
        (folder / folder_name).mkdir()
        for part in gguf_files.write_parts(folder / folder_name, count):
            index, whole = part.name.split("-")[-3], part.name.split("-")[-1]
            part.rename(folder / folder_name / f"some-model-{folder_name}-{index}-of-{whole}")
    (folder / "README.md").write_text("a model")
    return folder


def variables(**given):
    spec = inventory.specification()
    return {**{name: option.get("default") for name, option in spec.items()}, **given}


def request_of(**given):
    return model_inputs.request_of(variables(**given))


def on_huggingface(**keys):
    return request_of(llama_model_huggingface={"repo": REPO, **keys})


def looked_up(request, token=None, base="", seconds=20):
    return lookup.look_up(Query(request.sources()[0], token, base), seconds)


def names(found):
    return [file.name for file in found.files]


def refusal(call, *arguments, **keywords):
    with pytest.raises(Refusal) as refused:
        call(*arguments, **keywords)
    return str(refused.value)


class Action:
    """Runs modules in this process, as the host that they would run on."""

    host = "h"

    def __init__(self, call, given):
        self.call, self.ran = call, []
        self.variables = {"inventory_hostname": "h", "hostvars": {"h": given}, "inventory_dir": "/"}

    def run_module(self, name, /, **arguments):
        self.ran.append(name)
        return self.call(**arguments)


def run(call, given, prefix=None, account=None, **options):
    """The result of the module ``model_info``, and the action."""
    action = Action(call, given)
    return action_plugin.ActionModule.perform(action, resolver.LookupOptions(prefix, account, **options)), action
