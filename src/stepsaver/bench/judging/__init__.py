"""From figures to a verdict: intervals, rates, paired comparison."""
