"""The findings of the doctor as text and as JSON."""

import json

from rpcwheel.cli.findings import (
    DoctorFinding,
    Level,
    Problem,
    as_json,
    as_lines,
    distribution,
    healthy,
    summary,
)

FINE = DoctorFinding("tcp", Level.OK, "connected", facts={"ms": 1.5})
BAD = DoctorFinding.failed("tls", Problem("no certificate", "pass one"))


def test_the_advice_of_a_finding_is_on_a_second_line():
    assert as_lines(FINE) == ["ok    tcp        connected"]
    first, second = as_lines(BAD)
    assert first == "FAIL  tls        no certificate"
    assert second.strip() == "-> pass one"
    assert second.index("->") == first.index("no")


def test_a_problem_with_a_step_keeps_it():
    assert DoctorFinding.failed("tcp", Problem("a", "b", "tls")).step == "tls"


def test_json_has_the_text_and_the_facts():
    report = json.loads(as_json("a:1", [FINE, BAD]))
    assert (report["target"], report["healthy"]) == ("a:1", False)
    assert report["findings"][0] == {
        "step": "tcp", "level": "ok", "message": "connected", "advice": "", "ms": 1.5,
    }  # fmt: skip


def test_only_failures_make_a_target_unhealthy():
    for levels, last in [
        ([], "healthy."),
        (["ok", "note"], "healthy."),
        (["warn"], "healthy, with 1 warning."),
        (["warn", "ok", "warn"], "healthy, with 2 warnings."),
        (["FAIL", "warn", "FAIL"], "NOT healthy: step."),
    ]:
        findings = [DoctorFinding("step", Level(level), "") for level in levels]
        assert summary(findings) == last
        assert healthy(findings) is not last.startswith("NOT")


def test_times_are_shown_in_milliseconds():
    text, facts = distribution([0.001, 0.002, 0.009])
    assert text == "2.00 ms (median of 3; 1.00 to 9.00)"
    assert facts == {"ms": {"min": 1.0, "median": 2.0, "max": 9.0}, "samples": 3}
