"""Few rows in which every two choices meet: a covering set of pairs, by a greedy search.

levels is {factor: its choices}; a row takes one choice of each factor.  The result depends on the
levels alone.
"""

from collections import Counter
from itertools import combinations, product


def pairs_of(row):
    """Every two (factor, choice) that a row brings together."""
    return set(combinations(sorted((name, str(choice)) for name, choice in row.items()), 2))


def every_pair(levels, possible=lambda row: True):
    """The pairs that some possible row can bring together."""
    found = set()
    for (a, of_a), (b, of_b) in combinations(levels.items(), 2):
        found |= {p for x, y in product(of_a, of_b) if possible({a: x, b: y})
                  for p in pairs_of({a: x, b: y})}  # fmt: skip
    return found


def covering_rows(levels, possible=lambda row: True):
    """Rows {factor: choice} that bring every possible pair together at least once.

    possible takes a row, whole or in part, and says whether its choices go together.
    """
    missing = every_pair(levels, possible)
    choice_of = {(name, str(x)): x for name, choices in levels.items() for x in choices}
    rows, used = [], Counter()
    while missing:
        a, b = min(missing)  # to start from; then the choice that meets the most, or was used least
        row = {a[0]: choice_of[a], b[0]: choice_of[b]}
        for name, choices in levels.items():
            if name in row:
                continue
            candidates = [row | {name: x} for x in choices]
            candidates = [each for each in candidates if possible(each)]
            row = max(
                candidates,
                key=lambda each: (len(pairs_of(each) & missing), -used[name, str(each[name])]),
            )
        used.update((name, str(x)) for name, x in row.items())
        rows.append({name: row[name] for name in levels})
        missing -= pairs_of(row)
    return rows
