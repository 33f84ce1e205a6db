"""Measures which mutants of the planner and the launcher the unit tests kill, and which tests kill each.

    .venv/bin/python tests/benchmarks/mutation_score.py --output mutants.jsonl

Also needs coverage and pytest-cov. Each mutant is tested in a copy of the tree with the tests that cover its statement.
Mutants of the launcher are also tested with the tests that start launchers. Tests that fail without a mutant are left out. 300 mutants take four core hours.
"""

import argparse
import ast
import collections
import concurrent.futures
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT, TREE = Path(__file__).resolve().parents[2], "ansible_collections/llamacpp/cluster"
PLANNER, LAUNCHER = "plugins/module_utils/planner", "plugins/module_utils/launcher"
PAIRS = "Lt LtE, Gt GtE, Eq NotEq, In NotIn, Is IsNot, Add Sub, Mult FloorDiv, And Or, BitAnd BitOr, min max, any all"
SWAP = dict(way for one, two in map(str.split, PAIRS.split(", ")) for way in ((one, two), (two, one)))
SWAP |= {"Div": "Mult", "Mod": "Mult", "Break": "Continue", "Continue": "Break"}
UNCHANGED = {"annotation", "returns", "decorator_list"}


def changed(node, test):
    """What stands in place of a node, none where nothing does; ``test`` is the condition of its statement."""
    operator = SWAP.get(type(getattr(node, "ops", [getattr(node, "op", None)])[0]).__name__)
    if isinstance(node, ast.Compare) and operator:
        return ast.Compare(node.left, [getattr(ast, operator)(), *node.ops[1:]], node.comparators)
    if any(isinstance(getattr(node, side, None), ast.JoinedStr) for side in ("left", "right", "value")):
        return None
    if isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and operator:
        return type(node)(**{**dict(ast.iter_fields(node)), "op": getattr(ast, operator)()})
    if isinstance(node, (ast.Break, ast.Continue)):
        return getattr(ast, SWAP[type(node).__name__])()
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        return ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    if isinstance(node, ast.Name) and node.id in SWAP:
        return ast.Name(SWAP[node.id])
    if isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return ast.Pass()
    plain = node is test and isinstance(node, (ast.Name, ast.Attribute, ast.Call))
    return ast.UnaryOp(ast.Not(), node) if plain else None


def mutants(path):
    """Each mutant of what the functions of a file do: first and last line of the statement, text before and after, the whole text."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def walk(node, statement, inside):
        statement = node if isinstance(node, ast.stmt) else statement
        new = changed(node, getattr(statement, "test", None)) if inside else None
        if new is not None:
            start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            text = ast.unparse(ast.fix_missing_locations(new))
            after = f"({text})" if isinstance(new, ast.expr) else text
            whole = source[:start] + after.encode() + source[end:]
            lines, file = [statement.lineno, node.end_lineno], str(path.relative_to(ROOT))
            before = source[start:end].decode()
            yield {"file": file, "lines": lines, "before": before, "after": after, "source": whole.decode()}
        # Where the parts of an f-string begin depends on the version of Python.
        for field, value in () if isinstance(node, ast.JoinedStr) else ast.iter_fields(node):
            within = inside or (isinstance(node, (ast.FunctionDef, ast.Lambda)) and field == "body")
            for part in value if isinstance(value, list) else [value]:
                if field not in UNCHANGED and isinstance(part, ast.AST):
                    yield from walk(part, statement, within)

    return walk(ast.parse(source), None, False)


def pytest_collection_modifyitems(items):
    """Runs the tests that a mutant has; without one those that start no program, and those that start launchers."""
    chosen = set(json.loads(Path("tests.json").read_text()))
    for item in [*items]:
        long = item.get_closest_marker("programs") and "launche" not in item.path.read_text()
        if item.nodeid not in chosen if chosen else long:
            items.remove(item)


def pytest_runtest_setup(item):
    """What another test had planned would count as covered by that one alone."""
    getattr(item.module, "PLANS", {}).clear()
    for name, module in list(sys.modules.items()):
        for function in vars(module).values() if ".module_utils.planner." in name else ():
            getattr(function, "cache_clear", int)()


def pytest_runtest_logreport(report):
    if report.failed or report.when == "call":
        with open("results", "a") as stream:
            stream.write(json.dumps([report.nodeid, report.failed, "programs" in report.keywords]) + "\n")


def run(tree, tests, seconds, *options):
    """Runs tests in a copy of the tree; those that passed, failed, and start programs, and whether they came to an end."""
    (tree / "results").write_text("")
    (tree / "tests.json").write_text(json.dumps(tests))
    path = os.pathsep.join([str(tree.parents[2]), str(ROOT / "tests/benchmarks"), os.environ.get("PYTHONPATH", "")])
    argv = [
        sys.executable,
        *["-m", "pytest", "-q", "-p", "mutation_score", "-p", "no:cacheprovider", "-p", "no:anyio"],
        *options,
    ]
    process = subprocess.Popen(
        [*argv, *(sorted({test.split("::")[0] for test in tests}) or ["tests/unit"])],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        ended = process.wait(seconds) < 2
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        ended = False
    rows = [json.loads(line) for line in (tree / "results").read_text().splitlines()]
    failed = {test for test, fails, _programs in rows if fails}
    return {test for test, *_ in rows} - failed, failed, {test for test, _fails, programs in rows if programs}, ended


def covered(tree):
    """File → line → the tests that run it."""
    import coverage  # Not where this is a plugin of pytest.

    data = coverage.CoverageData(str(tree / ".coverage"))
    data.read()
    found = {str(Path(file).relative_to(tree)): data.contexts_by_lineno(file) for file in data.measured_files()}
    return {
        file: {line: {context.rpartition("|")[0] for context in tests} - {""} for line, tests in lines.items()}
        for file, lines in found.items()
    }


def score(chosen, folder, jobs, output, end):
    """Writes of each mutant which tests ran, which killed it, and whether they came to an end, until the end comes; returns what is covered."""
    trees = [folder / str(number) / TREE for number in range(jobs + 1)]
    shutil.copytree(ROOT, trees[0], ignore=shutil.ignore_patterns(".git", ".venv", "output", "__pycache__"))
    measured = [f"--cov={PLANNER}", f"--cov={LAUNCHER}", "--cov-context=test", "--cov-report="]
    passed, failed, programs, _ended = run(trees[0], [], 3600, "-n", str(jobs), "--dist", "worksteal", *measured)
    print(f"{len(passed)} tests. Excluded because they fail: {sorted(failed)}", flush=True)
    lines = covered(trees[0])
    free = queue.SimpleQueue()
    for tree in trees[1:]:
        shutil.copytree(trees[0], tree)
        free.put(tree)
    os.environ["PYTHONDONTWRITEBYTECODE"] = (
        "1"  # Else a mutant of the same second and size is taken for the one before.
    )
    for mutant in chosen:
        first, last = mutant["lines"]
        tests = set().union(*(lines.get(mutant["file"], {}).get(line, ()) for line in range(first, last + 1)))
        mutant["ran"] = sorted((tests | (programs if mutant["file"].startswith(LAUNCHER) else set())) & passed)

    def kill(mutant):
        left = end - time.monotonic()
        if left < 1:
            return
        tree = free.get()
        source = (tree / mutant["file"]).read_text()
        (tree / mutant["file"]).write_text(mutant.pop("source"))
        ran = run(tree, mutant["ran"], min(240, left)) if mutant["ran"] else ((), (), (), True)
        (tree / mutant["file"]).write_text(source)
        free.put(tree)
        if time.monotonic() > end:
            return
        mutant.update(killed_by=sorted(ran[1]), ended=ran[3])
        with output.open("a") as stream:
            stream.write(json.dumps(mutant) + "\n")

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(kill, sorted(chosen, key=lambda mutant: -len(mutant["ran"]))))
    return lines


def functions(tests):
    return {test.partition("[")[0] for test in tests}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=int, default=6 * 3600, help="time limit; unfinished mutants are left out")
    parser.add_argument("--output", type=Path, required=True, help="results file: a line of JSON for each mutant")
    options = parser.parse_args()
    files = [path for package in (PLANNER, LAUNCHER) for path in sorted((ROOT / package).rglob("*.py"))]
    every = [mutant for path in files for mutant in mutants(path)]
    chosen = random.Random(44).sample(every, options.mutants)
    with tempfile.TemporaryDirectory() as folder:
        end = time.monotonic() + options.seconds
        lines = score(chosen, Path(folder).resolve(), options.jobs, options.output, end)
    chosen = [mutant for mutant in chosen if "ended" in mutant]
    survivors = [mutant for mutant in chosen if mutant["ended"] and not mutant["killed_by"]]
    print(f"killed: {len(chosen) - len(survivors)} of {len(chosen)} mutants, chosen from {len(every)}. Survivors:")
    for mutant in sorted(survivors, key=lambda mutant: (mutant["file"], mutant["lines"])):
        print(
            f"  {mutant['file']}:{mutant['lines'][1]} ({len(mutant['ran'])} tests) {mutant['before']} → {mutant['after']}"
        )
    alone = [functions(tests) for file in lines.values() for tests in file.values() if len(functions(tests)) == 1]
    kills = collections.Counter(test for mutant in chosen for test in functions(mutant["killed_by"]))
    print("Tests that kill no mutant although they run mutated lines, and cover no line that other tests miss:")
    for test in sorted(
        set().union(*(functions(mutant["ran"]) for mutant in chosen)) - set(kills) - set().union(*alone)
    ):
        print(f"  {test}")


if __name__ == "__main__":
    main()
