"""Which subchannels the calls with a tag may use (Dubbo `TagStateRouter`). No I/O.

Only channels with servers of Dubbo, or of a registry of Dubbo's, have tags. The tag of a call is in
its metadata (`dubbo.tag`), else that of the channel. Its servers are those with the same tag; if
there are none, those without a tag, unless the metadata forbid it (`dubbo.force.tag`). Calls
without a tag use servers without one only. The picker then chooses among these, so zones, health
and connections do not matter for the tag.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic

from rpcwheel.registry.backends.dubbo_url import INTERFACE, TAG

from .subchannel import S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rpcwheel.instance import ServiceInstance

    from .dubbo import DubboClient
    from .picking import Picking

FORCE: Final = "dubbo.force.tag"
"""The key in the metadata of a call that only servers with its tag may get: `true`."""


class TagRouter(Generic[S]):
    """The `Picking` of each tag. The caller holds the lock of the pool in `route`."""

    def __init__(self, new_picking: Callable[[], Picking[S]]) -> None:
        """Begin without subchannels and without tags; `new_picking` makes the pickings."""
        self.client: DubboClient | None = None
        """The client of a registry of Dubbo's; None: there is no such registry."""
        self.untagged = new_picking()
        """For calls without a tag; all calls if there are no tags."""
        self.has_tags = False
        """Whether calls may have tags."""
        self._new_picking = new_picking
        self._by_tag: dict[str, Picking[S]] = {}
        self._without_servers = new_picking()

    def __iter__(self) -> Iterator[Picking[S]]:
        """Yield all pickings that have subchannels, and that of calls without a tag."""
        yield self.untagged
        yield from self._by_tag.values()

    def route(self, subchannels: Iterable[S]) -> None:
        """Set the subchannels."""
        by_tag: dict[str, list[S]] = {"": []}
        has_tags = self.client is not None
        for subchannel in subchannels:
            has_tags = has_tags or subchannel.conventions.is_dubbo
            by_tag.setdefault(self.tag_of_server(subchannel.instance), []).append(subchannel)
        self.untagged.subchannels = tuple(by_tag.pop(""))
        pickings = {tag: self._by_tag.get(tag) or self._new_picking() for tag in by_tag}
        for tag, picking in pickings.items():
            picking.subchannels = tuple(by_tag[tag])
        self._by_tag, self.has_tags = pickings, has_tags

    def picking_for(self, metadata: Any) -> Picking[S]:
        """Return the picking for a call with this metadata."""
        if not self.has_tags:
            return self.untagged
        tag, is_forced = self._tag_of(metadata)
        if not tag:
            return self.untagged
        return self._by_tag.get(tag, self._without_servers if is_forced else self.untagged)

    def picking_with(self, subchannel: S) -> Picking[S]:
        """Return the picking that has a subchannel."""
        return self._by_tag.get(self.tag_of_server(subchannel.instance), self.untagged)

    def empty_reason(self, name: str, count: int, metadata: Any) -> str:
        """Return why a call may use none of the `count` instances of the service `name`."""
        tag, is_forced = self._tag_of(metadata)
        has = f"{name} has {count} {'instance' if count == 1 else 'instances'}, but"
        if tag and is_forced:
            return f"{has} none with the tag {tag!r}, which {FORCE} demands"
        if tag:
            return f"{has} only with another tag than {tag!r}"
        return f"{has} only with a tag; {TAG} in the metadata of a call, or ?tag=, selects it"

    def tag_of_server(self, instance: ServiceInstance) -> str:
        """Return the tag of an instance; "" if it has none, or its tags are not Dubbo's."""
        has_tag = self.client is not None or INTERFACE in instance.metadata
        return instance.metadata.get(TAG, "") if has_tag else ""

    def _tag_of(self, metadata: Any) -> tuple[str, bool]:
        """Return the tag of a call, and whether only servers that have it may get the call."""
        tag, is_forced = "", False
        for pair in metadata or ():
            if pair[0] == TAG:
                tag = _text(pair[1])
            elif pair[0] == FORCE:
                is_forced = _text(pair[1]).lower() == "true"
        return tag or (self.client.tag if self.client else ""), is_forced


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")
