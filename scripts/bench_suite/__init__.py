"""Measures lens_rope against what a user would do instead; `scripts/bench` runs it.

`cases` says what is measured and against what limit, `baselines` holds what a user would write in
a notebook, `measure` takes times and memory, and `__main__` runs each case in a fresh process.
"""
