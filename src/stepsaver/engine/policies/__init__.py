"""Decode policies: one file per policy. A policy decides which rows a step unmasks, nothing else."""
