"""`stepsaver tune`: the search for the fastest settings whose answers stay within a limit, and their confirmation.

`space.py` has what may be tried, `observed.py` what is known of a candidate, `search.py` the search, `confirm.py` the
guarantee. None of the four runs a model; `trials.py` runs candidates on the bench.
"""
