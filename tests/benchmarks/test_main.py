"""What all benchmarks have in common: their options, and a place for the page."""

import json
import sys

from fixtures.benches import ROOT

sys.path.append(str(ROOT))  # behind the installed rpcwheel: the benchmarks are not installed

from benchmarks._main import DOCS, Program, main
from benchmarks.calls.scale import Row
from benchmarks.calls.subjects import Skipped


def test_steps_that_are_unknown_are_refused_and_only_a_whole_run_has_a_place(capsys, tmp_path):
    program = Program("registries", "about", "long", ("calls", "picks"))
    parse = program.parser().parse_args
    assert program.asked(parse(["--only", "calls,none"])) is None
    assert "--only takes calls, picks; not none" in capsys.readouterr().err
    some = program.asked(parse(["--only", "calls"]))
    assert some == {"calls"}
    assert program.place(parse([]), some) is None
    assert program.place(parse(["--quick"]), frozenset(program.steps)) is None
    assert program.place(parse(["--out", str(tmp_path / "new")]), some) == tmp_path / "new"


def test_the_readme_leads_to_each_page():
    pages = [path.name for path in DOCS.glob("*.md")]
    readme = (ROOT / "README.md").read_text()
    assert pages
    assert [name for name in pages if f"(docs/benchmarks/{name})" not in readme] == []


def test_a_run_is_measured_printed_and_written(capsys, tmp_path, monkeypatch):
    row = Row("client", "sync", "unary", "one", {"cpu_us": 1.0})
    asked = []

    def run(only, scale):
        asked.append((only, scale))
        return [row, Skipped("other", "not installed")]

    def page(results, scale, *, facts, skipped, command):
        return f"{results.rows == (row,)} {scale} {facts} {skipped[0].what} {command}"

    rows = tmp_path / "rows.json"
    given = ["--quick", "--only", "calls", "--json", str(rows), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["it", *given])
    program = Program("registries", "about", "long", ("calls", "picks"))
    told = {"scales": {"quick": "less"}, "facts": lambda _: {"Python": "any"}}
    assert main(program, run, page, **told) == 0
    assert asked == [(frozenset({"calls"}), "quick")]
    written = (tmp_path / "registries.md").read_text()
    command = "python -m benchmarks.registries --quick --only calls"
    assert written == f"True less {{'Python': 'any'}} other {command}"
    assert written in capsys.readouterr().out
    assert json.loads(rows.read_text()) == [row.as_dict()]
