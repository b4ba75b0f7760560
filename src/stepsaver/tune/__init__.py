"""`stepsaver tune`: the search for the fastest settings whose answers stay within a limit, and their confirmation.

`space.py` has what may be tried, `race.py` what is known of a candidate and when it leaves, `search.py` the search,
`confirm.py` the guarantee. None of the four knows models or files; `trials.py` runs candidates on the bench.
"""
