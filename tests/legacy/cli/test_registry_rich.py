"""The table of instances on a terminal."""

import io

from rpcwheel.cli.registry_rich import show


def test_a_long_word_is_folded_and_never_cut(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    stream = io.StringIO()
    show(["service", "metadata"], [["shop.Orders", "k=" + "v" * 100]], stream)
    assert stream.getvalue().count("v") == 100 + "service".count("v")


def test_markup_of_others_is_shown_as_it_is() -> None:
    stream = io.StringIO()
    show(["service", "metadata"], [["shop.Orders", "[bold]k=v[/bold]"]], stream)
    assert "[bold]k=v[/bold]" in stream.getvalue()
