"""What the far side does with a call, and what must come of it: one table, for every runner."""

from dataclasses import dataclass, field

from rpcwheel.failback import FailbackStats

ORDER = b"order"
DEFAULT = "for the time being"


@dataclass(frozen=True)
class Scenario:
    """One call, and its retries until nothing is pending. Waits are 5 s each."""

    name: str
    far_side: tuple[str, ...]
    """The status of each try in turn; once they are used up, the server answers well."""
    caller: str
    """What the caller gets: "answer", "default", or the name of the code that is raised."""
    tries: int
    """How many requests the server sees in all."""
    end: str | None = None
    """Which of the later figures counts the call in the end; None if it was never queued."""
    settings: dict[str, object] = field(default_factory=dict)

    def check(self, answer: object, received: list[bytes], stats: FailbackStats) -> None:
        """See that all came as it must: to the caller, to the server, in the figures."""
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
