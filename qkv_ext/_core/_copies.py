"""What a subclass adds to one of the package's objects goes along with its copies and pickles.

The objects are built anew from what they hold.  The attributes that a subclass has beside that, in
its __dict__ or in slots of its own, travel as the state of the pickle protocol: __getstate__ and
__setstate__ of a subclass are asked as for any class.
"""

from __future__ import annotations

from typing import Any


def added_state(x: Any, base: Any) -> Any:
    """The state of x without the slots of the base; None where nothing is left."""
    state = x.__getstate__()
    if not (isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict)):
        return state  # what a __getstate__ of the subclass makes of it
    attributes, slots = state
    slots = {name: value for name, value in slots.items() if name not in base.__slots__}
    return (attributes, slots) if slots else attributes or None


def reduced(build: Any, arguments: tuple[Any, ...], state: Any) -> tuple[Any, ...]:
    """What __reduce__ returns."""
    return (build, arguments) if state is None else (build, arguments, state)


def set_state(x: Any, state: Any) -> None:
    """Give x the attributes that added_state found, as pickle does it."""
    if state is None:
        return
    if hasattr(x, "__setstate__"):
        x.__setstate__(state)
        return
    attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    if attributes:
        x.__dict__.update(attributes)
    for name, value in (slots or {}).items():
        setattr(x, name, value)
