"""Where the values of a graph are read while it is edited: what stands for each now, and which uses are whose."""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic

from ..detect.graph import OpGraph
from ..ir import Block, Where
from .editor import Editor, Handle, Use, fail


class Wiring(Generic[Handle]):
    """Find the uses of the values of one graph; `view` is what it was before the first edit.

    `standing` holds what stands for an original value now, `chained` what a block's edge carries after an edit there:
    where its branch reads (`in`), where that ends (`out`), and its skip (`post`).
    """

    def __init__(self, editor: Editor[Handle], view: OpGraph) -> None:
        self.editor, self.view = editor, view
        self.standing: dict[str, Handle] = {}
        self.chained: dict[tuple[str, Where], Handle] = {}
        self.copies: dict[str, list[str]] = {}
        for name, root in view.alias.items():
            self.copies.setdefault(root, []).append(name)

    def stand(self, name: str) -> Handle:
        """Return what stands for an original value now."""
        return self.standing[name] if name in self.standing else self.editor.value(name)

    def uses(self, name: str, wanted: Collection[str], held: Handle | None = None) -> list[Use[Handle]]:
        """Return the uses by which the consumers `wanted` take an original value, no-op copies looked through."""
        copies = [self.editor.value(copy) for copy in self.copies.get(name, ())]
        values = [self.stand(name) if held is None else held, *copies]
        found = [u for v in values for u in self.editor.readers(v) if not set(u.consumers).isdisjoint(wanted)]
        return found or fail(self.editor.label, f"nothing in the plan reads {name}")

    def entrance(self, block: Block) -> list[Use[Handle]]:
        """Return the uses by which a branch reads its stream, or what its in norm made: whatever stands there now."""
        site, anchor = block.at(Where.IN), block.anchor
        name = site.origin[-1] if site else anchor.state
        region = {o.name for o in self.view.between(anchor.state, anchor.branch)}
        wanted = region.intersection(self.view.users[name])
        return self.uses(name, wanted, self.chained.get((block.name, Where.IN)))

    def ahead(self, block: Block) -> list[Use[Handle]]:
        """Return the use by which what a branch's only writer reads is handed on to it now."""
        return self.uses(block.anchor.hidden, self.view.users[block.anchor.hidden])

    def end(self, block: Block) -> list[Use[Handle]]:
        """Return the use by which a branch's value enters its sum now."""
        return self.uses(block.anchor.branch, {block.anchor.add}, self.chained.get((block.name, Where.OUT)))

    def skip(self, block: Block) -> list[Use[Handle]]:
        """Return the use by which a block's sum takes its skip."""
        names, todo = set(), [block.anchor.total]
        while todo:
            name = todo.pop()
            names.add(name)
            terms = [n for n in self.view[name].data if n != block.anchor.skip and n not in names]
            todo += [n for n in terms if self.view[n].kind == "add"]
        return self.uses(block.anchor.skip, names, self.chained.get((block.name, Where.POST)))

    def redirect(self, uses: list[Use[Handle]], new: Handle) -> None:
        """Make uses read `new`."""
        for use in uses:
            self.editor.redirect(use, new)

    def supersede(self, name: str, old: Handle, new: Handle) -> None:
        """Make `new` stand wherever `old` stood, for the original value `name` among them."""
        self.standing.setdefault(name, old)
        self.standing.update({k: new for k, v in self.standing.items() if v is old})
        self.chained.update({k: new for k, v in self.chained.items() if v is old})
