"""The prefix tree: which chunks follow which.

One tree per root key (namespace and salt); a node is one chunk in the context of everything before it. Among several
children one is found by its chained hash, and any is taken only if its tokens and extras are equal: **a hit is never
taken on the hash's word**, so a collision, found or forged, costs a miss and never serves wrong KV.

A node holds one object per part (shard and kernel group). It is complete when none of them is missing; only an
unbroken run of complete nodes from the root is a hit.
"""

from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from lmcache_server.protocol.keys import ChunkHasher

__all__ = ["Node", "PrefixIndex"]

T = TypeVar("T")
_NO_EXTRAS: Mapping[int, bytes] = {}


class Node(Generic[T]):
    """One chunk. `parts` are its objects, `missing` how many of them are not sealed, `slots` where they are, as it
    travels, once none is missing; `writers` is how many reservations touch it.
    """

    __slots__ = (
        "children",
        "extras",
        "hash",
        "missing",
        "only",
        "parent",
        "parts",
        "queued",
        "root",
        "slots",
        "tick",
        "tokens",
        "writers",
    )

    def __init__(self, parent: "Node[T] | None", chunk_hash: bytes, tokens: bytes, extras: bytes, parts: int) -> None:
        self.parent = parent
        if parent is not None:
            self.root: Root[T] = parent if isinstance(parent, Root) else parent.root
        self.hash = chunk_hash
        self.tokens = tokens
        self.extras = extras
        self.children: dict[bytes, Node[T]] = {}
        self.only: Node[T] | None = None
        """The child, if there is no other: a walk needs no hash to choose it."""
        self.parts: list[T | None] = [None] * parts
        self.missing = parts
        self.slots = b""
        self.writers = 0
        self.tick = 0
        self.queued = False

    @property
    def empty(self) -> bool:
        """Whether no part holds an object."""
        return all(part is None for part in self.parts)

    def path(self) -> "list[Node[T]]":
        """The nodes from the first chunk down to this one."""
        nodes: list[Node[T]] = []
        node: Node[T] | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def subtree(self) -> "list[Node[T]]":
        """This node and all below it, parents before children."""
        nodes = [self]
        for node in nodes:
            nodes.extend(node.children.values())
        return nodes


class Root(Node[T]):
    """Where a tree begins: no chunk, only the key that its chunks are under. Its own `root` is not set: a tree that is
    let go of goes without the collector's help.
    """

    __slots__ = ("key",)

    def __init__(self, key: Hashable, seed: bytes) -> None:
        super().__init__(None, seed, b"", b"", 0)
        self.key = key


class PrefixIndex(Generic[T]):
    """Trees of nodes by root key."""

    def __init__(self, hasher: ChunkHasher) -> None:
        self._hasher = hasher
        self._roots: dict[Hashable, Root[T]] = {}
        self.size = 0
        """How many nodes there are, roots not counted."""

    def root(self, key: Hashable) -> Node[T]:
        """The root of `key`'s tree, made if it is not there."""
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = Root(key, self._hasher.root)
        return root

    def find(self, key: Hashable) -> Node[T] | None:
        """The root of `key`'s tree, if it has one."""
        return self._roots.get(key)

    def keys(self) -> Iterator[Any]:
        """The root key of every tree."""
        return iter(self._roots)

    def key(self, node: Node[T]) -> Any:
        """The root key of `node`'s tree."""
        return node.root.key

    def attached(self, node: Node[T]) -> bool:
        """Whether lookups can still reach `node`'s tree."""
        return node.root.tick >= 0

    def linked(self, node: Node[T]) -> bool:
        """Whether `node` is still in its tree, reachable or not."""
        return node.parent is not None and node.parent.children.get(node.hash) is node

    def hit(self, key: Hashable, tokens: bytes, extras: Mapping[int, bytes] = _NO_EXTRAS) -> list[Node[T]]:
        """The longest run of complete nodes that `tokens` (uint32 bytes) begins with."""
        nodes: list[Node[T]] = []
        node: Node[T] | None = self._roots.get(key)
        if node is None:
            return nodes
        size, same = self._hasher.chunk_bytes, tokens.startswith
        for start in range(0, len(tokens) - size + 1, size):
            extra = extras.get(start // size, b"") if extras else b""
            child = node.only
            if child is None:
                child = node.children.get(self._hasher.chain(node.hash, tokens[start : start + size], extra))
            # Whoever chose it, the tokens decide.
            if child is None or child.missing or child.extras != extra or not same(child.tokens, start):
                break
            nodes.append(child)
            node = child
        return nodes

    def walk(
        self, key: Hashable, parts: int, tokens: bytes, extras: Mapping[int, bytes] = _NO_EXTRAS
    ) -> Iterator[tuple[int, Node[T]]]:
        """Each whole chunk of `tokens` with its node; a missing node is made when the walk reaches it.

        Ends early at a node whose hash is equal and whose tokens are not: nothing can be stored beyond a collision.
        """
        node: Node[T] = self.root(key)
        size, same = self._hasher.chunk_bytes, tokens.startswith
        for i in range(len(tokens) // size):
            extra = extras.get(i, b"") if extras else b""
            child = node.only
            if child is None or child.extras != extra or not same(child.tokens, i * size):
                child = self._child(node, tokens[i * size : (i + 1) * size], extra, parts)
                if child is None:
                    return
            node = child
            yield i, node

    def _child(self, node: Node[T], chunk: bytes, extra: bytes, parts: int) -> Node[T] | None:
        """The child of `node` for `chunk`, made if there is none; None where its hash is another's."""
        chunk_hash = self._hasher.chain(node.hash, chunk, extra)
        child = node.children.get(chunk_hash)
        if child is None:
            child = node.children[chunk_hash] = Node(node, chunk_hash, chunk, extra, parts)
            node.only = child if len(node.children) == 1 else None
            self.size += 1
        elif child.tokens != chunk or child.extras != extra:
            return None
        return child

    def remove(self, node: Node[T]) -> None:
        """Take a node without children out of its tree."""
        assert node.parent is not None and not node.children
        siblings = node.parent.children
        del siblings[node.hash]
        node.parent.only = next(iter(siblings.values())) if len(siblings) == 1 else None
        if self.attached(node):
            self.size -= 1

    def detach_all(self) -> list[Root[T]]:
        """Empty the index; the old roots come back, each marked so that `attached` is false for its nodes."""
        roots = list(self._roots.values())
        self._roots.clear()
        self.size = 0
        for root in roots:
            root.tick = -1
        return roots

    def nodes(self) -> Iterator[tuple[Hashable, Node[T]]]:
        """Every node that lookups can reach, with its root key."""
        for key, root in self._roots.items():
            for node in root.subtree()[1:]:
                yield key, node

    def below(self, key: Hashable) -> Iterator[Node[T]]:
        """The nodes of `key`'s tree, parents before children, while the tree may change between any two of them.

        A node that is there all the time is met exactly once, and none is met that is gone by then.
        """
        root = self._roots.get(key)
        waiting = list(root.children.values()) if root is not None else []
        while waiting:
            node = waiting.pop()
            if self.linked(node) and self.attached(node):
                yield node
                waiting.extend(node.children.values())

    def prune_roots(self) -> None:
        """Forget trees that hold nothing, so that a key once seen does not stay for ever."""
        for key in [key for key, root in self._roots.items() if not root.children]:
            del self._roots[key]
