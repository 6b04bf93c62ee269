"""What classes of things that touch are compared with."""

from __future__ import annotations


class Classes:
    """Union-find, as in a textbook."""

    def __init__(self) -> None:
        self.parent: dict[object, object] = {}

    def add(self, item: object, *others: object) -> None:
        self.parent.setdefault(item, item)
        for other in others:
            self.parent[self.root(other)] = self.root(item)

    def root(self, item: object) -> object:
        while self.parent[item] is not item:
            item = self.parent[item]
        return item

    def __len__(self) -> int:
        return len({self.root(item) for item in self.parent})
