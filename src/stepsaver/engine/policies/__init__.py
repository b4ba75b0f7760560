"""Decode policies: one file per policy. A policy decides which rows a step reveals, nothing else."""
