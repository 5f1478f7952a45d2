"""Writes the states of a call into architecture.md: `python docs/transitions.py`.

The table is `TRANSITIONS` of `rpcwheel.call.attempts`. tests/unit/call/test_attempts_model.py fails
if architecture.md is out of date.
"""

from pathlib import Path

from rpcwheel.call.attempts import TRANSITIONS, Fact

PAGE = Path(__file__).with_name("architecture.md")
BEGIN = "<!-- docs/transitions.py writes this table -->\n"
END = "<!-- end of the table -->\n"


def table() -> str:
    """Return the table in Markdown: a row for each state, a column for each fact."""
    head = ["state", *(f"`{fact.name}`: {fact.value}" for fact in Fact)]
    rows = [head, ["---"] * len(head)]
    for state, facts in TRANSITIONS.items():
        following = [f"`{facts[fact].name}`" if fact in facts else "" for fact in Fact]
        rows.append([f"`{state.name}`: {state.value}", *following])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def page() -> str:
    """Return architecture.md with the current table."""
    before, rest = PAGE.read_text("utf-8").split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
