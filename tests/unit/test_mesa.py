"""What Mesa's configuration says of the memory that graphics share with the host, and what a plan makes of that."""

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import mesa
from support.clusters import strix_halo_head

NAME = "radv_enable_unified_heap_on_apu"


def option(value="true", name=NAME):
    return f'<option name="{name}" value="{value}" />'


def drirc(*sections):
    return f'<driconf><device driver="radv">{"".join(sections)}</device></driconf>'


def application(content, attributes='name="Default"'):
    return f"<application {attributes}>\n{content}\n</application>"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", False),
        (drirc(application(option())), True),
        (drirc(application(option("false"))), False),
        (drirc(application(option("1"))), False),
        (drirc(application(option(name="radv_zero_vram"))), False),
        (drirc(application(option(), 'name="a game" executable="game.exe"')), False),
        (drirc(application(option(), 'name="ours" executable="ggml-rpc-server"')), True),
        (drirc(application(option(), "name='games' executable_regexp='.*'")), False),
        (drirc(application(option()), application(option("false"))), False),
        (f"<!-- {drirc(application(option()))} -->", False),
        (drirc(application(f"<!-- no --> {option()}")), True),
        ("<application " * 1000, False),
    ],
)
def test_the_option_counts_where_it_is_for_our_programs(tmp_path, text, expected):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/drirc").write_text(text)
    assert mesa.unified_heap(tmp_path) is expected


def test_the_file_of_the_host_is_read_last(tmp_path):
    (tmp_path / "usr/share/drirc.d").mkdir(parents=True)
    (tmp_path / "usr/share/drirc.d/00-mesa.conf").write_text(drirc(application(option())))
    assert mesa.unified_heap(tmp_path)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/drirc").write_text(drirc(application(option("false"))))
    assert not mesa.unified_heap(tmp_path)


def test_a_worker_lends_all_of_it_where_the_host_says_so():
    cluster = strix_halo_head(86, "worker")
    assert cluster.plan()["refused"]
    cluster.hosts["head"]["facts"]["unified_heap"] = True
    plan = cluster.accepted()
    (worker,) = plan["hosts"]["head"]["workers"]
    assert worker["environment"][NAME] == "true"
    endpoint = {"environment": {NAME: "false"}}
    cluster.hosts["head"]["variables"]["llama_worker_endpoints"] = [endpoint]
    assert cluster.plan()["refused"]
