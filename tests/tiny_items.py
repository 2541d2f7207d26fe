"""Twelve items, three levels: what most tests over the fake engine serve."""

from __future__ import annotations

from gti_core.catalog import Item

# Uneven on purpose: prefixes with one child and with many, and one id with a slash.
TINY_ITEMS = (
    Item("a1", (0, 0, 0), "Alpha", "First.", {"year": 1990, "genres": ["Drama"]}, 50),
    Item("a2", (0, 0, 1), "Beta", popularity=40),
    Item("a3", (0, 0, 2), "Gamma", popularity=90),
    Item("b1", (0, 1, 0), "Delta", popularity=10),
    Item("b2", (0, 2, 0), "Epsilon", popularity=20),
    Item("c1", (1, 0, 0), "Zeta", popularity=70),
    Item("c2", (1, 0, 3), "Eta", popularity=70),
    Item("d1", (2, 2, 0), "Theta", popularity=5),
    Item("d2", (2, 2, 1), "Iota", popularity=0),
    Item("e/1", (3, 1, 2), "Kappa <|sid_0_0|>", popularity=30),
    Item("f1", (3, 2, 0), "Lambda", popularity=60),
    Item("50", (3, 2, 2), "Mu", popularity=80),
)
