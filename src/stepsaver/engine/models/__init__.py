"""Decoder-only transformers of the Llama family: one file per architecture, one network for all."""
