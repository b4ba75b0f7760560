"""The decoder: token ids in, token ids out. Imports torch, numpy and safetensors only."""
