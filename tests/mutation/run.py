"""Apply mutants to the modules that decide, and list those that the tests do not detect.

    .venv/bin/python tests/mutation/run.py --jobs 2          # all mutants of killed.csv
    .venv/bin/python tests/mutation/run.py deadline          # of modules with "deadline" in a path
    .venv/bin/python tests/mutation/run.py --rows tests/mutation/fixed.csv
    .venv/bin/python tests/mutation/run.py pending --tests tests/unit/pending  # with these tests

`killed.csv` has the mutants that `make test` killed when they were recorded. `fixed.csv` has those
that bring back a defect, each with the commit that fixed it. A suite that is made smaller must kill
them too. To add rows: `generate.py > candidates.csv`, then `run.py --rows candidates.csv --add`.

The mutants are made in copies of the tree. The first run records in about 6 minutes which tests
execute which line; the record is kept in the directory for temporary files until code or tests
change. A mutant gets the tests that execute its line: those of its package first, in the order of
their durations, at most `--budget` seconds of them. A mutant that they do not end with within a
further minute is killed: it loops. With `--tests` there is no record, and every mutant gets these
tests, in this order. Exit status 1 if a mutant survives, or its line is gone.

The record lacks lines that run in another process, and wrong arguments, which typer refuses before
a line of the command runs: mutants of `cli` need `--tests tests/unit/cli tests/contract/cli`.
"""

import argparse
import ast
import csv
import hashlib
import math
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import coverage

ROOT = Path(__file__).parents[2]
KILLED = Path(__file__).with_name("killed.csv")
TESTS = ("tests/unit", "tests/contract")
COVERAGE = "[run]\nrelative_files = true\nsource = rpcwheel\n"
RECORDING = "--durations=0 --durations-min=0 -vv --cov --cov-context=test --cov-report="
OPTIONS = ("-q", "-p", "no:cacheprovider", "--hypothesis-profile=mutants")
MORE_S = 60.0


def copied(scratch: str, name: str) -> Path:
    """A copy of the tree."""
    ignored = shutil.ignore_patterns(".venv", ".git", ".*_cache", "__pycache__", "*.so", "build")
    tree = Path(shutil.copytree(ROOT, Path(scratch, name), ignore=ignored))
    Path(tree, ".coveragerc").write_text(COVERAGE)
    return tree


def run_tests(tree: Path, arguments: list[str], limit_s: float | None = None) -> tuple[int, str]:
    """The exit status and the output of tests; -1 if they take too long."""
    Path(tree, "arguments").write_text("\n".join(arguments))
    command = [sys.executable, "-m", "pytest", *OPTIONS, "@arguments"]
    # With bytecode: to rewrite the assertions of the fixtures takes longer than most tests.
    settings = {"RPCWHEEL_PURE": "1", "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": ""}
    env = {**os.environ, **settings}
    with Path(tree, "output").open("w+") as out:
        process = subprocess.Popen(
            command, cwd=tree, env=env, stdout=out, stderr=out, start_new_session=True
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = -1
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and the programs that tests have left
            process.wait()
        out.seek(0)
        return status, out.read()


def failed_tests(report: str) -> list[str]:
    return re.findall(r"^(?:FAILED|ERROR:?) (\S*(?:tests/).*?)(?: - .*)?$", report, re.MULTILINE)


class Record:
    """Which tests execute a line, and how long each test takes."""

    def __init__(self, jobs: int) -> None:
        digest = hashlib.sha256()
        for path in sorted([*ROOT.glob("rpcwheel/**/*.py"), *ROOT.glob("tests/**/*.py")]):
            digest.update(path.read_bytes() if path.parent != KILLED.parent else b"")
        stored = Path(tempfile.gettempdir(), f"rpcwheel-mutation-{digest.hexdigest()[:16]}")
        if not stored.exists():
            with tempfile.TemporaryDirectory() as scratch:
                tree = copied(scratch, "tree")
                report = run_tests(tree, [*RECORDING.split(), f"-n{jobs}", *TESTS])[1]
                Path(tree, "report").write_text(report)
                stored.mkdir()
                for name in (".coverage", "report"):
                    shutil.copy(tree / name, stored)
        report = Path(stored, "report").read_text()
        self.seconds: dict[str, float] = defaultdict(float)
        for took, test in re.findall(r"^(\d+\.\d+)s \w+ +(tests/.*)$", report, re.MULTILINE):
            self.seconds[test] += float(took)
        for test in failed_tests(report):
            print(f"not used, as it fails without a mutant: {test}")
            self.seconds.pop(test, None)
        self._data = coverage.CoverageData(str(stored / ".coverage"))
        self._data.read()

    def tests_of(self, module: str, spans: list[tuple[int, int]]) -> list[str]:
        """The tests of the first of these spans of lines that has any, in the order to run them."""
        lines = self._data.contexts_by_lineno(module)
        tests: set[str] = set()
        while spans and not tests:
            (start, end), *spans = spans
            contexts = {name for line in range(start, end + 1) for name in lines.get(line, [])}
            tests = {name.rpartition("|")[0] for name in contexts} & self.seconds.keys()
        package = f"/{Path(module).parts[1].removeprefix('_')}/"

        def order(test: str) -> tuple[bool, bool, float]:
            is_own = package in test.replace("/_", "/")
            return not is_own, not test.startswith(TESTS[0]), self.seconds[test]

        return sorted(tests, key=order)


class GivenTests:
    """The same tests for each line, as if each path took half a minute."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        self.seconds = dict.fromkeys(paths, 30.0)

    def tests_of(self, module: str, spans: list[tuple[int, int]]) -> list[str]:
        return self.paths


def spans_of(text: str, first: int, last: int) -> list[tuple[int, int]]:
    """The lines whose tests may execute some lines: of their statement, if it is in a function.

    Other lines run at the import: the function whose header they are, or the class, or the module.
    """
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    around = [node for node in nodes if node.lineno <= first and last <= node.end_lineno]
    around.sort(key=lambda node: node.end_lineno - node.lineno)
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    outer = [node for node in around if isinstance(node, functions | ast.ClassDef)]
    spans = [*((node.lineno, node.end_lineno) for node in outer), (1, text.count("\n"))]
    is_inside = any(isinstance(node, functions) for node in around[1:])
    return [(around[0].lineno, last), *spans] if is_inside else spans


def write(path: Path, text: str) -> None:
    """Write a module, and delete its bytecode: Python would use it within the same second."""
    path.write_text(text)
    for bytecode in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        bytecode.unlink()


def outcome(
    row: dict[str, str],
    record: Record | GivenTests,
    trees: queue.Queue[Path],
    budget_s: float,
    killer: str,
) -> tuple[str, str]:
    """What happens to a mutant, and why. The killer is tried first, if it executes the line."""
    path = ROOT / row["module"]
    text = path.read_text() if path.exists() else ""
    line = f"\n{row['before']}\n"
    parts, nth = text.split(line), int(row["nth"]) + 1
    if len(parts) <= nth:
        return "gone", ""
    before, after = line.join(parts[:nth]), line.join(parts[nth:])
    first = before.count("\n") + 2
    spans = spans_of(text, first, first + row["before"].count("\n"))
    tests, seconds = [], 0.0
    candidates = record.tests_of(row["module"], spans)
    for test in sorted(candidates, key=lambda test: test != killer):
        if tests and seconds + record.seconds[test] > budget_s:
            break
        tests.append(test)
        seconds += record.seconds[test]
    if not tests:
        return "survived", "no tests"
    tree = trees.get()
    try:
        write(tree / row["module"], f"{before}\n{row['after']}\n{after}")
        status, report = run_tests(tree, ["-x", *tests], MORE_S + 4 * seconds)
    finally:
        write(tree / row["module"], text)
        trees.put(tree)
    if status == 0:
        return "survived", f"{len(tests)} tests"
    return "killed", "time" if status == -1 else " ".join(failed_tests(report)[:1])


def killers_in(output: str) -> dict[str, str]:
    """The test that killed a mutant, in the output of a run, by the text that describes it."""
    return dict(re.findall(r"^killed: (.*) \((\S*tests/.*)\)$", output, re.MULTILINE))


def described(row: dict[str, str]) -> str:
    change = f"{row['before']} -> {row['after']}"
    return f"{row['module']}: {' '.join(change.split())}"


def main() -> int:
    """Try the mutants of the modules whose path contains a text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", nargs="?", default="", help="a part of the path of modules")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tests of a mutant")
    parser.add_argument("--rows", type=Path, default=KILLED)
    parser.add_argument("--tests", nargs="+", help="paths of tests, in place of the record")
    parser.add_argument(
        "--killers", type=Path, help="output of an earlier run: what killed a mutant is tried first"
    )
    parser.add_argument("--add", action="store_true", help="add those killed to killed.csv")
    options = parser.parse_args()
    missing = [path for path in options.tests or () if not Path(ROOT, path.split("::")[0]).exists()]
    if missing:  # without tests, pytest fails, and each mutant would seem to be killed
        parser.error(f"there is no {', '.join(missing)}")
    with options.rows.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if options.module in row["module"]]
    counts: Counter[str] = Counter()
    record: Record | GivenTests
    if options.tests:
        record, options.budget = GivenTests(options.tests), math.inf
    else:
        record = Record(options.jobs)
    killers = killers_in(options.killers.read_text()) if options.killers else {}
    trees: queue.Queue[Path] = queue.Queue()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as workers:
        for number in range(options.jobs):
            trees.put(copied(scratch, f"tree{number}"))
        futures = [
            workers.submit(
                outcome, row, record, trees, options.budget, killers.get(described(row), "")
            )
            for row in rows
        ]
        for row, future in zip(rows, futures, strict=True):
            result, why = future.result()
            counts[result] += 1
            print(f"{result}: {described(row)} ({why})", flush=True)
            if result == "killed" and options.add:
                with KILLED.open("a", newline="") as file:
                    csv.writer(file, lineterminator="\n").writerow([*row.values()][:4])
    print(f"{len(rows)} mutants:", ", ".join(f"{count} {name}" for name, count in counts.items()))
    return 0 if counts["killed"] == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
