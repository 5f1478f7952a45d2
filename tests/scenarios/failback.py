"""A table of failback: what the server does with a call, and the expected results."""

from dataclasses import dataclass, field

from rpcwheel.failback import FailbackStats

ORDER = b"order"
DEFAULT = "for the time being"


@dataclass(frozen=True)
class Scenario:
    """One call and its retries until nothing is pending. Each wait is 5 s."""

    name: str
    far_side: tuple[str, ...]
    """The status of each attempt in turn; further attempts succeed."""
    caller: str
    """The result for the caller: "answer", "default", or the name of the raised code."""
    tries: int
    """The number of requests that the server gets."""
    end: str | None = None
    """The counter that finally counts the call; None if it was not queued."""
    settings: dict[str, object] = field(default_factory=dict)

    def check(self, answer: object, received: list[bytes], stats: FailbackStats) -> None:
        """Check the result of the caller, the requests of the server, and the counters."""
        expected = {"answer": ORDER, "default": DEFAULT}.get(self.caller, self.caller)
        assert (answer, received) == (expected, [ORDER] * self.tries), self.name
        assert (stats.calls, stats.queued_total) == (1, self.end is not None), self.name
        if self.end is not None:
            assert getattr(stats, self.end) == 1, self.name
            assert stats.attempts == self.tries - 1, self.name


SCENARIOS = [
    Scenario("a good call is answered", (), "answer", 1),
    Scenario(
        "a failed call arrives at its first retry",
        ("UNAVAILABLE",),
        "default",
        2,
        "redelivered",
    ),
    Scenario("a call arrives at its last retry", ("UNAVAILABLE",) * 3, "default", 4, "redelivered"),
    Scenario(
        "a call is given up after its last retry", ("UNAVAILABLE",) * 9, "default", 4, "gave_up"
    ),
    Scenario("another error is the callers", ("INVALID_ARGUMENT",), "INVALID_ARGUMENT", 1),
    Scenario(
        "another error ends the retries",
        ("UNAVAILABLE", "INVALID_ARGUMENT"),
        "default",
        2,
        "gave_up",
    ),
    Scenario(
        "without retries the error is the callers",
        ("UNAVAILABLE",),
        "UNAVAILABLE",
        1,
        settings={"max_attempts": 1},
    ),
    Scenario(
        "with one retry there is one",
        ("UNAVAILABLE",) * 9,
        "default",
        2,
        "gave_up",
        settings={"max_attempts": 2},
    ),
    Scenario(
        "without a limit it goes on",
        ("UNAVAILABLE",) * 12,
        "default",
        13,
        "redelivered",
        settings={"max_attempts": None},
    ),
    Scenario(
        "any of several codes is tried again",
        ("UNAVAILABLE", "RESOURCE_EXHAUSTED"),
        "default",
        3,
        "redelivered",
        settings={"retry_on": {"UNAVAILABLE", "RESOURCE_EXHAUSTED"}},
    ),
]
