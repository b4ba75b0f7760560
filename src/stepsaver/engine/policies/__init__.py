"""Decode policies: one file per policy. A policy decides which positions a step unmasks, nothing else."""
