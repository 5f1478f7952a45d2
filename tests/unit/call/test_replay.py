"""The buffer of a request stream."""

import sys

from google.protobuf.wrappers_pb2 import StringValue
from hypothesis import given
from hypothesis import strategies as st

from rpcwheel.call.replay import OVERHEAD, ReplayBuffer, size_of


def recording(*messages, limit=1000):
    made = ReplayBuffer(limit)
    for message in messages:
        made.add(message)
    return made


@given(st.lists(st.binary(max_size=9)), st.integers(-2, 2) | st.integers(-900, 900))
def test_a_buffer_has_all_messages_or_none(messages, left):
    limit = sum(len(message) + OVERHEAD for message in messages) + left
    made = recording(*messages, limit=limit)
    assert made.whole is (left >= 0 or not messages)
    assert made.messages == (messages if made.whole else [])
    assert made.complete is False


def test_a_message_object_that_is_reused_is_stored_as_it_was_each_time():
    message, made = StringValue(), ReplayBuffer(1000)
    for value in ("first", "second", "third"):
        message.value = value
        made.add(message)
    message.value = "spoilt"
    assert [one.value for one in made.messages] == ["first", "second", "third"]
    assert type(made.messages[0]) is StringValue


def test_other_objects_are_copied_too():
    order, made = {"items": [1]}, ReplayBuffer(10_000)
    made.add(order)
    order["items"].append(2)
    assert made.messages == [{"items": [1]}]


def test_bytes_are_not_copied():
    message = b"x" * 50
    assert recording(message).messages[0] is message


class NoCopy:
    def __deepcopy__(self, _):
        raise TypeError("cannot be copied")


class NoSize:
    def ByteSize(self):  # noqa: N802 - protobuf's name
        raise ValueError("not initialized")


def test_a_message_that_can_not_be_copied_empties_the_buffer():
    for odd in (NoCopy(), NoSize(), (n for n in [1])):
        made = recording(b"a", odd, b"b", limit=10_000)
        assert (made.whole, made.messages) == (False, [])


def test_the_size_of_a_message_is_its_serialized_size_or_its_size_in_memory():
    message, order = StringValue(value="order"), ["order"]
    assert size_of(message) == len(message.SerializeToString())
    assert size_of(b"order") == size_of(bytearray(b"order")) == 5
    assert size_of(order) == sys.getsizeof(order)
