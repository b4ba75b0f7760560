"""Decoders: one file per way of writing text. A decoder decides what a sample does in the next forward."""
