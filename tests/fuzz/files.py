"""Files in a state that nobody leaves them in: documents with spoiled values, damaged bytes, a folder, nothing."""

import json
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.damage import as_json, damaged_bytes, spoiled
from tests.fuzz.workspace import FOLDER


@st.composite
def documents(draw: st.DrawFn, content: bytes, fields: dict[str, Any] | None = None) -> Any:
    """A JSON document: its values spoiled, or its bytes."""
    if draw(st.integers(0, 3)) == 0:
        return draw(damaged(content))
    tree = json.loads(content)
    if fields and draw(st.booleans()):
        name = draw(st.sampled_from(sorted(fields)))
        tree[name] = fields[name]
        return as_json(draw(spoiled(tree, (name,))))
    return as_json(draw(spoiled(tree)))


def damaged(content: bytes) -> st.SearchStrategy[Any]:
    return damaged_bytes(content) | damaged_bytes(content) | st.sampled_from([None, FOLDER])
