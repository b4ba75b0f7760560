"""Reuse rules: one file per rule. A rule takes work away from a plan, nothing else."""
