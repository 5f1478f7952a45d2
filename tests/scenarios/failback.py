"""How a server answers the attempts of a call, and what follows: for `grpc` and `grpc.aio`."""

from dataclasses import dataclass, field

from rpcwheel.failback import FailbackStats

ORDER = b"order"
DEFAULT = "for the time being"


@dataclass(frozen=True)
class Scenario:
    """One call and all its attempts, 5 s apart."""

    name: str
    statuses: tuple[str, ...]
    """The statuses of the first attempts; later attempts succeed."""
    result: str
    """What the caller gets: "response", "default", or the name of the status code."""
    attempts: int
    """How many requests the server receives."""
    end: str | None = None
    """The counter for the end of the queued call; None if it is not queued."""
    settings: dict[str, object] = field(default_factory=dict)

    def check(self, result: object, received: list[bytes], stats: FailbackStats) -> None:
        """Compare with the result of the caller, the requests at the server, and the counts."""
        expected = {"response": ORDER, "default": DEFAULT}.get(self.result, self.result)
        assert (result, received) == (expected, [ORDER] * self.attempts), self.name
        assert (stats.calls, stats.queued_total) == (1, self.end is not None), self.name
        if self.end is not None:
            assert getattr(stats, self.end) == 1, self.name
            assert stats.attempts == self.attempts - 1, self.name


SCENARIOS = [
    Scenario("a call that succeeds is not queued", (), "response", 1),
    Scenario(
        "a call is delivered at its second attempt", ("UNAVAILABLE",), "default", 2, "redelivered"
    ),
    Scenario(
        "a call is delivered at its last attempt", ("UNAVAILABLE",) * 3, "default", 4, "redelivered"
    ),
    Scenario(
        "a call is given up after its last attempt", ("UNAVAILABLE",) * 9, "default", 4, "gave_up"
    ),
    Scenario(
        "an error that is not named is the caller's", ("INVALID_ARGUMENT",), "INVALID_ARGUMENT", 1
    ),
    Scenario(
        "an error that is not named gives up the call",
        ("UNAVAILABLE", "INVALID_ARGUMENT"),
        "default",
        2,
        "gave_up",
    ),
    Scenario(
        "with one attempt the error is the caller's",
        ("UNAVAILABLE",),
        "UNAVAILABLE",
        1,
        settings={"max_attempts": 1},
    ),
    Scenario(
        "without a limit there are any number of attempts",
        ("UNAVAILABLE",) * 12,
        "default",
        13,
        "redelivered",
        settings={"max_attempts": None},
    ),
]
