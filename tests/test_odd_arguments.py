"""Every argument of every public call, given what nobody should give it (issues as G3 and later).

A call then returns what it returns for the plain Python value that is meant, where one is, or it
raises a TypeError or ValueError that names the argument.  Nothing else: no other exception, no
answer to a question that was not asked.
"""

import fractions
import inspect
import re

import numpy as np
import pytest
from public_calls import CALLS, assert_equal, named

NOTHING = object()  #: no plain value is meant


class Rude:
    """It can be neither shown nor compared nor counted."""

    def __repr__(self):
        raise RuntimeError("no repr")

    __eq__ = __len__ = __bool__ = __float__ = __hash__ = __repr__


ODD = {  # what is given, and what it means
    "()": ((), []),
    "[]": ([], []),
    "{}": ({}, {}),
    "None": (None, None),
    "object": (object(), NOTHING),
    "rude": (Rude(), NOTHING),
    "a type": (int, NOTHING),
    "str": ("x", NOTHING),
    "digits": ("2", NOTHING),
    "bytes": (b"2", NOTHING),
    "2.0": (2.0, 2.0),
    "True": (True, True),
    "nan": (float("nan"), float("nan")),
    "-inf": (float("-inf"), float("-inf")),
    "complex": (1j, NOTHING),
    "10^400": (10**400, 10**400),
    "10^5000": (10**5000, 10**5000),  # which Python does not print
    "-10^5000": (-(10**5000), NOTHING),
    "fraction": (fractions.Fraction(1, 2), NOTHING),
    "uint64": (np.uint64(1), 1),
    "int8": (np.int8(2), 2),
    "float32": (np.float32(2), 2.0),
    "longdouble": (np.longdouble(2), 2.0),
    "bool_": (np.True_, True),
    "array(2)": (np.array(2), 2),
    "array(2.)": (np.array(2.0), 2.0),
    "array([2])": (np.array([2]), [2]),
    "array([2, 2])": (np.array([2, 2]), [2, 2]),
    "array of str": (np.array(["bhld", "bhld"]), NOTHING),
    "array of one str": (np.array(["bottom-right"]), NOTHING),
    "array of objects": (np.array([None, object()]), NOTHING),
    "empty array": (np.empty((1, 0)), [[]]),
    "masked": (np.ma.masked, NOTHING),
    "date": (np.datetime64("2000-01-01"), NOTHING),
    "ragged": ([[1], [1, 2]], NOTHING),
    "range": (range(2), [0, 1]),
    "bool list": ([True], [True]),
    "iterator": (iter([]), NOTHING),
    "ellipsis": (..., NOTHING),
    "slice": (slice(None), NOTHING),
    "function": (len, NOTHING),
}


MEANT = {
    "integer": lambda x: type(x) is int,
    "attribute": lambda x: type(x) in (int, bool),  # ONNX has no bool among its attributes
    "integers": lambda x: type(x) is int or isinstance(x, list),
    "segments": lambda x: type(x) is int or isinstance(x, list),
    "real": lambda x: type(x) in (int, float) and x == x,
    "cap": lambda x: type(x) in (int, float) and x == x,
    "switch": lambda x: type(x) is bool,
    "choice": lambda x: False,
    "pair": lambda x: isinstance(x, list),
    "mapping": lambda x: isinstance(x, dict),
    "array": lambda x: x is not NOTHING and x != {},  # numbers broadcast, as a mask
}


def outcome(function, given):
    """What a call returns, and what it raises."""
    try:
        return function(**given), None
    except Exception as error:
        return None, error


ROWS = [(call, name) for call, (_, _, kinds) in CALLS.items() for name in kinds]


@pytest.mark.filterwarnings("ignore:float64 is computed:qkv_ext.PerformanceWarning")
@pytest.mark.parametrize(("call", "name"), ROWS, ids=[f"{call}-{name}" for call, name in ROWS])
def test_right_or_refused_by_name(call, name):
    function, given, kinds = CALLS[call]
    is_meant = MEANT[kinds[name]]
    for odd, (value, meant) in ODD.items():
        if value is None:
            continue  # the default of most, and refused by the tables of other tests
        answer, error = outcome(function, given | {name: value})
        if error is None:
            assert is_meant(meant), f"{odd} was taken"
            expected, error = outcome(function, given | {name: meant})
            assert error is None, odd
            assert_equal(answer, expected, odd)
            continue
        message = str(error)
        assert isinstance(error, (TypeError, ValueError)), f"{odd}: {error!r}"
        assert len(message) < 1500, odd
        if not re.search(named(name), message):
            # it is the other arguments that do not fit, as they do not fit the plain value
            assert is_meant(meant), f"{odd}: {error!r}"
            assert repr(outcome(function, given | {name: meant})[1]) == repr(error), odd


@pytest.mark.parametrize("call", [c for c, row in CALLS.items() if row[0].__name__ != "<lambda>"])
def test_the_table_is_whole(call):
    """A new argument is a word in the table of tests/public_calls.py."""
    function, _, kinds = CALLS[call]
    names = {p.name for p in inspect.signature(function).parameters.values()
             if p.kind is not p.VAR_KEYWORD}  # fmt: skip
    assert names - set(kinds) == set()
