"""A placement book written for reading: plain lists and dictionaries, every verb as slow as it likes.

The real one must do exactly what this one does; the property tests drive both through the same moves.
"""

from dataclasses import dataclass


@dataclass
class NaivePlace:
    """One place that is not free."""

    state: str
    parent: int | None
    seen: bool = False
    pins: int = 0


class NaiveBook:
    """Which places are in which state, and stored ones from first to last to go."""

    def __init__(self, num_places: int, protected_max: int, scan_places: int) -> None:
        self.num_places = num_places
        self.protected_max = protected_max
        self.scan_places = scan_places
        self.places: dict[int, NaivePlace] = {}
        self.probation: list[int] = []
        self.protected: list[int] = []

    def children(self, place: int) -> list[int]:
        return [child for child, held in self.places.items() if held.parent == place]

    def ancestors(self, place: int) -> list[int]:
        """From the head of the fragment to the place itself."""
        chain = [place]
        while (parent := self.places[chain[0]].parent) is not None:
            chain.insert(0, parent)
        return chain

    def reserve(self, parent: int | None, count: int, num_seen: int, given: list[int]) -> tuple[list[int], str | None]:
        """Reserve as the real book should. `given` are the places it gave: which free one it takes is its own affair."""
        if parent is not None and (parent not in self.places or self.places[parent].state not in ("reserved", "stored")):
            return [], "parent_gone"
        evicted: list[int] = []
        scan = [*self.probation, *self.protected]
        passed_over = 0
        tail = parent
        for index in range(count):
            if len(self.places) < self.num_places:
                assert given[index] not in self.places
            else:
                victim = None
                while scan and victim is None:
                    candidate = scan.pop(0)
                    if candidate == parent or self.children(candidate) or self.places[candidate].pins:
                        passed_over += 1
                        if passed_over > self.scan_places:
                            return evicted, "capacity"
                    else:
                        victim = candidate
                if victim is None:
                    return evicted, "capacity"
                if victim in self.protected and index >= num_seen:
                    return evicted, "admission"
                self._unlink(victim)
                del self.places[victim]
                evicted.append(victim)
                assert given[index] == victim
            self.places[given[index]] = NaivePlace("reserved", tail, index < num_seen)
            tail = given[index]
        return evicted, None

    def commit(self, place: int) -> bool:
        held = self.places[place]
        if held.state == "cancelled" or (held.parent is not None and self.places[held.parent].state != "stored"):
            self.abort(place)
            return False
        held.state = "stored"
        protected = held.seen and (held.parent is None or held.parent in self.protected)
        order = self.protected if protected else self.probation
        order.insert(order.index(held.parent) if held.parent in order else len(order), place)
        self._demote()
        return True

    def abort(self, place: int) -> None:
        self.places[place].parent, parent = None, self.places[place].parent
        if self.children(place):
            self.places[place].state = "withdrawn"
        else:
            del self.places[place]
        self._free_if_unheld(parent)

    def touch(self, prefix: list[int], reused: bool) -> None:
        for place in reversed(prefix):
            protected = reused or place in self.protected
            self._unlink(place)
            (self.protected if protected else self.probation).append(place)
        self._demote()

    def unpin(self, place: int) -> None:
        self.places[place].pins -= 1
        self._free_if_unheld(place)

    def clear(self) -> int:
        used = sum(held.state in ("stored", "withdrawn") for held in self.places.values())
        self.probation, self.protected = [], []
        for held in self.places.values():
            held.parent = None
            held.state = "cancelled" if held.state in ("reserved", "cancelled") else "withdrawn"
        for place in list(self.places):
            self._free_if_unheld(place)
        return used - sum(held.state == "withdrawn" for held in self.places.values())

    def _unlink(self, place: int) -> None:
        (self.protected if place in self.protected else self.probation).remove(place)

    def _demote(self) -> None:
        while len(self.protected) > self.protected_max:
            self.probation.append(self.protected.pop(0))

    def _free_if_unheld(self, place: int | None) -> None:
        if place is None or place not in self.places:
            return
        held = self.places[place]
        if held.state == "withdrawn" and not held.pins and not self.children(place):
            del self.places[place]
