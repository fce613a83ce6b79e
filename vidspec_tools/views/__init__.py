"""How results show themselves: tables of a terminal, CSV files and figures; no engine.

A view is a module with `tables(rows)` and `draw(rows, path)`.
"""
