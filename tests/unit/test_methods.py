"""Patterns over method names: which names they match, and which of two is more specific."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcwheel.methods import PatternIndex, matches, overlap, specificity

texts = st.text("ab", max_size=4)
globs = st.text("ab*", max_size=3)


def test_full_names_and_longer_patterns_are_more_specific():
    upwards = ["*", "/*/*", "/*/Get", "/shop.*/*", "/shop.Orders/*", "/shop.Orders/Get*", "/a/b"]
    assert sorted(set(upwards), key=specificity) == upwards
    assert specificity("/a/*b*") == specificity("/a/b*")


@given(globs, texts)
def test_matching_agrees_with_a_regular_expression(glob, text):
    parts = [re.escape(part) for part in glob.split("*")]
    assert matches(glob, text) is bool(re.fullmatch(".*".join(parts), text))


@pytest.mark.parametrize(
    ("first", "second", "common"),
    [
        ("/shop.Orders/*", "/*/Get*", "/shop.Orders/Get*"),
        ("/*/*", "/shop.*/Get", "/shop.*/Get"),
        ("/shop.*/*Order", "/*.Orders/Get*", "/shop.*.Orders/Get*Order"),
        ("/shop.Orders/*", "/shop.Audit/*", None),
        ("/shop*/Get", "/shop.Orders/List", None),
        ("/*/Get", "/shop/*/Get", None),
    ],
)
def test_two_patterns_overlap_in_a_pattern(first, second, common):
    assert overlap(first, second) == common
    assert (overlap(second, first) is None) is (common is None)


@given(globs, globs, texts)
def test_methods_that_match_two_patterns_are_an_overlap(first, second, text):
    common = overlap(first, second)
    if matches(first, text) and matches(second, text):
        assert common is not None
    if common is not None:
        method = common.replace("*", "")
        assert matches(first, method)
        assert matches(second, method)


@given(st.lists(globs | texts, unique=True), texts | globs)
def test_an_index_has_the_patterns_that_match_the_most_specific_last(patterns, name):
    found = PatternIndex(patterns).matching(name)
    assert found == sorted((one for one in patterns if matches(one, name)), key=specificity)
