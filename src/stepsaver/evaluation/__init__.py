"""The lm-eval adapter, tokenizers and chat templates, and the embedded tasks."""
