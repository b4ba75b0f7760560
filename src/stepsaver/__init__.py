"""An engine and a bench for cross-step compute reuse in block-diffusion language models."""
