"""Which methods a pattern names, which of two says more, and whether two can meet."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from rpcwheel.methods import MethodPattern, matches, specificity

PATTERN = TypeAdapter(MethodPattern)

SIGNS = ["/shop.Orders/(Get|List)", "/shop.Orders/{Get,List}", "/a/b+", "/a/b.c", "/a-b/c", "/ä/b"]

texts = st.text("ab", max_size=4)
globs = st.text("ab*", max_size=3)


def test_a_pattern_names_methods_in_full_and_a_star_any_characters():
    for pattern, method, named in [
        ("/shop.Orders/Get", "/shop.Orders/Get", True),
        ("/shop.Orders/Get", "/shop.Orders/GetAll", False),
        ("/shop.Orders/Get*", "/shop.Orders/GetAll", True),
        ("/shop.Orders/Get*", "/shop.Orders/Get", True),
        ("/shop.Orders/Get*", "/shop.Orders/get", False),
        ("/shop.*/Get*", "/shop.Orders/GetAll", True),
        ("/shop.*/*", "/stock.Orders/GetAll", False),
        ("/*/Get", "/shop.Orders/Get", True),
        ("*", "/any.Thing/AtAll", True),
    ]:
        assert PATTERN.validate_python(pattern) == pattern
        assert matches(pattern, method) is named


def test_a_pattern_that_is_nearly_one_is_refused_with_the_one_that_was_meant():
    for pattern, meant in [
        ("shop.Orders/*", "/shop.Orders/*"),
        ("shop.Orders/Get", "/shop.Orders/Get"),
        ("shop.Orders", "/shop.Orders/*"),
        ("/shop.Orders", "/shop.Orders/*"),
        ("/shop.Orders/", "/shop.Orders/*"),
    ]:
        with pytest.raises(ValidationError, match=re.escape(f"did you mean {meant!r}?")):
            PATTERN.validate_python(pattern)


def test_what_is_no_pattern_is_refused_with_what_is_one():
    for pattern in ["", "/", "//", "/a b/c", "/shop.Orders/Get?", "/a/[bc]", "?", *SIGNS]:
        with pytest.raises(ValidationError, match=r"names no methods; .*'/shop\.Orders/Get\*'"):
            PATTERN.validate_python(pattern)


def test_a_name_says_more_than_any_pattern_and_a_longer_one_more_than_a_shorter():
    upwards = ["*", "/*/*", "/*/Get", "/shop.*/*", "/shop.Orders/*", "/shop.Orders/Get*", "/a/b"]
    assert sorted(set(upwards), key=specificity) == upwards
    assert specificity("/a/*b*") == specificity("/a/b*")


@given(globs, texts)
def test_a_glob_matches_what_its_plain_parts_and_anything_between_make(glob, text):
    parts = [re.escape(part) for part in glob.split("*")]
    assert matches(glob, text) is bool(re.fullmatch(".*".join(parts), text))
