"""Graphics cards. Nothing here has run on one (docs/gpu.md)."""
