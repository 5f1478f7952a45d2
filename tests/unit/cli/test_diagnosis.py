"""The findings of the doctor as text and as JSON."""

import json

from rpcwheel.cli.diagnosis import Level, Note, Trouble, as_json, as_lines, healthy, spread, verdict

FINE = Note("tcp", Level.OK, "connected", facts={"ms": 1.5})
BAD = Note.failed("tls", Trouble("no certificate", "pass one"))


def test_a_note_is_one_line_and_its_advice_another():
    assert as_lines(FINE) == ["ok    tcp        connected"]
    first, second = as_lines(BAD)
    assert first == "FAIL  tls        no certificate"
    assert second.strip() == "-> pass one"
    assert second.index("->") == first.index("no")


def test_a_trouble_with_a_step_keeps_it():
    assert Note.failed("tcp", Trouble("a", "b", "tls")).step == "tls"


def test_json_has_the_facts_and_the_words():
    report = json.loads(as_json("a:1", [FINE, BAD]))
    assert (report["target"], report["healthy"]) == ("a:1", False)
    assert report["findings"][0] == {
        "step": "tcp", "level": "ok", "said": "connected", "do": "", "ms": 1.5,
    }  # fmt: skip


def test_only_failures_make_a_target_unhealthy():
    for levels, last in [
        ([], "healthy."),
        (["ok", "note"], "healthy."),
        (["warn"], "healthy, with 1 warning."),
        (["warn", "ok", "warn"], "healthy, with 2 warnings."),
        (["FAIL", "warn", "FAIL"], "NOT healthy: step."),
    ]:
        notes = [Note("step", Level(level), "") for level in levels]
        assert verdict(notes) == last
        assert healthy(notes) is not last.startswith("NOT")


def test_times_are_shown_in_milliseconds():
    said, facts = spread([0.001, 0.002, 0.009])
    assert said == "2.00 ms (median of 3; 1.00 to 9.00)"
    assert facts == {"ms": {"min": 1.0, "median": 2.0, "max": 9.0}, "samples": 3}
