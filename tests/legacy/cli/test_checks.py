"""Each claim of the demo's table fails when what it claims was not seen."""

from collections.abc import Callable
from dataclasses import replace

from rpcwheel.cli.checks import Answer, Call, Check, Counts, Observed, Outage, When, judge, summary

DOWN = "callers answered within 250 ms"
IN_FLIGHT = "those in flight within 250 ms"
NO_ERROR = "no caller saw an error"
KILLED = "server killed, twice"
GREW = "queue grew with each such call"
DRAINED = "queue drained to 0, twice"
ARRIVED = "every event arrived"
EXACT = "byte for byte, as when called"
TWICE = "twice only if killed in flight"
COUNTED = "failback counts the same"
REST = "nothing else went wrong"

Change = Callable[[Observed], object]


def seen() -> Observed:
    """A good telling: events 1 and 4 with a server, 2 and 3 without, 5 and 6 in flight, 7 after."""
    when = [When.UP, When.DOWN, When.DOWN, When.UP, When.KILLED, When.KILLED, When.DOWN]
    calls = [
        Call(
            event=event,
            request=b"event %d" % event,
            altered=b"altered %d" % event,
            when=moment,
            answer=Answer.SERVER if moment is When.UP else Answer.QUEUED,
            began=100.0,
            ended=100.002,
        )
        for event, moment in enumerate(when, start=1)
    ]
    outages = [
        Outage(-9, port_refuses=True, sizes=[1, 2], left=0, drain_seconds=0.3),
        Outage(-9, port_refuses=True, sizes=[3], left=0, drain_seconds=0.2),
    ]
    arrived = [call.request for call in calls]
    return Observed(
        7, 0.25, calls, outages, arrived, counts=Counts(queued=5, delivered=5, retries=9)
    )


def change_call(number: int, **fields: object) -> Change:
    def change(observed: Observed) -> None:
        observed.calls[number] = replace(observed.calls[number], **fields)

    return change


def change_outage(number: int, **fields: object) -> Change:
    return lambda observed: [
        setattr(observed.outages[number], name, value) for name, value in fields.items()
    ]


def failed(observed: Observed) -> set[str]:
    return {check.claim for check in judge(observed) if not check.passed}


def test_a_good_telling_passes_every_check() -> None:
    assert failed(seen()) == set()
    assert len(judge(seen())) == 11


def test_a_flaw_fails_just_the_claims_that_it_belies() -> None:
    rows = [
        (change_outage(0, exit_status=0), {KILLED}, "the server left by itself"),
        (change_outage(1, port_refuses=False), {KILLED}, "somebody still listens"),
        (change_call(1, ended=100.3), {DOWN}, "a caller waited too long"),
        (change_call(5, ended=101.0), {IN_FLIGHT}, "one in flight waited too long"),
        (
            change_call(2, answer=Answer.ERROR, error="event 3: refused"),
            {DOWN, NO_ERROR, GREW, COUNTED},
            "a caller got an error",
        ),
        (
            change_call(2, answer=Answer.SERVER),
            {DOWN, GREW, COUNTED},
            "somebody answered meanwhile",
        ),
        (
            lambda observed: [change_call(n, answer=Answer.QUEUED)(observed) for n in (0, 3)],
            {NO_ERROR, GREW, COUNTED},
            "the server never answered at all",
        ),
        (change_outage(0, sizes=[2, 2]), {GREW}, "a call was not queued"),
        (change_outage(0, sizes=[1, 2, 3]), {GREW}, "something else was queued"),
        (change_outage(0, sizes=[]), {GREW}, "nothing was queued"),
        (change_outage(1, left=1), {DRAINED}, "one call still waits"),
        (change_outage(1, left=None), {DRAINED}, "nobody looked"),
        (
            lambda observed: setattr(observed, "counts", Counts(5, delivered=4, retries=9)),
            {COUNTED},
            "failback knows of one that it did not deliver",
        ),
        (lambda observed: observed.arrived.pop(2), {ARRIVED, EXACT}, "one lost"),
        (lambda observed: observed.arrived.append(b"stranger"), {EXACT}, "one never sent"),
        (
            lambda observed: observed.arrived.__setitem__(2, b"event 3!"),
            {ARRIVED, EXACT},
            "one byte too many",
        ),
        (
            lambda observed: observed.arrived.__setitem__(2, b"altered 3"),
            {ARRIVED, EXACT},
            "not a snapshot",
        ),
        (change_call(1, altered=b"event 2"), {EXACT}, "the caller altered nothing: no proof"),
        (lambda observed: observed.arrived.append(b"event 2"), {TWICE}, "twice for no reason"),
        (lambda observed: observed.arrived.extend([b"event 6"] * 2), {TWICE}, "thrice"),
        (
            lambda observed: observed.calls.pop(),
            {NO_ERROR, GREW, COUNTED, ARRIVED, EXACT},
            "one not made",
        ),
        (lambda observed: observed.problems.append("gave up on push"), {REST}, "a problem"),
    ]
    wrong = {}
    for change, claims, flaw in rows:
        observed = seen()
        change(observed)
        if failed(observed) != claims:
            wrong[flaw] = failed(observed)
    assert wrong == {}


def test_a_call_killed_in_flight_may_arrive_twice_and_is_named() -> None:
    observed = seen()
    observed.arrived.append(b"event 6")
    assert failed(observed) == set()
    assert "twice: event 6" in [check.seen for check in judge(observed)]


def test_nothing_seen_proves_nothing() -> None:
    assert failed(Observed(7, answer_within=0.25)) == {
        KILLED, DOWN, IN_FLIGHT, NO_ERROR, GREW, DRAINED, COUNTED, ARRIVED, EXACT, TWICE
    }  # fmt: skip


def test_a_row_says_what_was_wrong() -> None:
    observed = seen()
    observed.arrived[2] = b"altered 3"
    change_call(1, answer=Answer.ERROR, error="event 2: DEADLINE_EXCEEDED")(observed)
    change_outage(0, left=5)(observed)
    rows = {check.claim: check.seen for check in judge(observed)}
    assert rows[EXACT] == "1 never sent, of which 1 as the caller changed them later"
    assert rows[ARRIVED] == "6 of 7"
    assert rows[NO_ERROR].endswith("1 errors, the first: event 2: DEADLINE_EXCEEDED")
    assert rows[DRAINED] == "5 still wait"


def test_the_summary_names_what_failed() -> None:
    good = Check("every event arrived", "60 of 60", passed=True)
    bad = Check("queue drained to 0", "24 still wait", passed=False)
    assert summary([good, good]) == "All 2 checks passed."
    assert summary([good, bad]) == "FAILED, 1 of 2 checks: queue drained to 0."
